"""Against Hugging Face transformers: a Llama, and Qwen3-Next's gated delta net layer.

Random tiny PyTorch models; their weights, laid out in our order, must give the same numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.mixing.delta import GatedDeltaNetLayer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

LOGITS_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LAYER_TOLERANCE = 1e-5  # of the largest number: both sides run their recurrence in float32
# Large enough to count, and not to magnify the float32 rounding of outputs that nearly cancel.
NORM_EPSILON = 1e-3


def array(tensor):
    return jnp.asarray(tensor.detach().numpy())


def set_linear(ours, theirs):
    """PyTorch stores [outputs, inputs]."""
    assert ours.kernel.shape == theirs.weight.T.shape
    ours.kernel[...] = array(theirs.weight).T


def redraw(module, seed, std):
    """Weights far enough from initial values that a swapped pair would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            centre = parameter if parameter.ndim == 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + std * noise)


@pytest.fixture(scope="module")
def llama_pair():
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    redraw(theirs, seed=0, std=0.2)
    config = LoopedConfig(
        vocabulary=61,
        width=32,
        pattern="full full",
        heads=4,
        key_value_heads=2,
        feed_forward=48,
        rope_theta=10_000.0,
    )
    ours = LoopedLM(config, rngs=nnx.Rngs(0))
    ours.embedding.embedding[...] = array(theirs.model.embed_tokens.weight)
    ours.norm.scale[...] = array(theirs.model.norm.weight)
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        block.mixer_norm.scale[...] = array(layer.input_layernorm.weight)
        block.feed_forward_norm.scale[...] = array(layer.post_attention_layernorm.weight)
        set_linear(block.mixer.query, layer.self_attn.q_proj)
        set_linear(block.mixer.key, layer.self_attn.k_proj)
        set_linear(block.mixer.value, layer.self_attn.v_proj)
        set_linear(block.mixer.output, layer.self_attn.o_proj)
        set_linear(block.feed_forward.gate, layer.mlp.gate_proj)
        set_linear(block.feed_forward.up, layer.mlp.up_proj)
        set_linear(block.feed_forward.down, layer.mlp.down_proj)
    return ours, theirs


def test_llama_logits(llama_pair):
    ours, theirs = llama_pair
    tokens = np.random.default_rng(0).integers(0, 61, (2, 37))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.std(wanted) > 0.5
    np.testing.assert_allclose(ours(jnp.asarray(tokens)), wanted, **LOGITS_TOLERANCE)


def test_llama_looped_by_hand(llama_pair):
    """The same weights run twice, with a residual gate: loops of PyTorch's own layers."""
    ours, theirs = llama_pair
    tokens = np.random.default_rng(1).integers(0, 61, (2, 15))
    rho = 0.5 * np.random.default_rng(2).standard_normal((2, 32)).astype(np.float32)
    config = LoopedConfig(
        vocabulary=61,
        width=32,
        pattern="full full",
        heads=4,
        key_value_heads=2,
        feed_forward=48,
        loops=2,
    )
    looped = LoopedLM(config, rngs=nnx.Rngs(0))
    looped.embedding, looped.blocks, looped.norm = ours.embedding, ours.blocks, ours.norm
    looped.rho[...] = jnp.asarray(rho)

    positions = torch.arange(15)[None]
    future = torch.full((15, 15), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        h = theirs.model.embed_tokens(torch.tensor(tokens))
        rotary = theirs.model.rotary_emb(h, positions)
        for gate in torch.tensor(rho):
            start = h
            for layer in theirs.model.layers:
                h = layer(h, attention_mask=future, position_embeddings=rotary)
            h = h + gate * start
        wanted = theirs.lm_head(theirs.model.norm(h)).numpy()
    np.testing.assert_allclose(looped(jnp.asarray(tokens)), wanted, **LOGITS_TOLERANCE)


def gated_delta_net_pair(key_heads, value_heads):
    from transformers.models.qwen3_next import modeling_qwen3_next

    width, key_size, value_size = 24, 8, 12
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(
        transformers.Qwen3NextConfig(
            hidden_size=width,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=key_heads,
            linear_num_value_heads=value_heads,
            linear_key_head_dim=key_size,
            linear_value_head_dim=value_size,
            linear_conv_kernel_dim=4,
            rms_norm_eps=NORM_EPSILON,
        ),
        layer_idx=0,
    )
    redraw(theirs, seed=1, std=0.3)
    with torch.no_grad():
        # Decay rates near 1. At rates near 16 both chunked forms lose digits in the same place,
        # differences of summed log-decays, and agree to 2e-5 only.
        theirs.A_log.copy_(torch.linspace(-1.0, 0.5, value_heads))
    config = LoopedConfig(
        width=width,
        pattern="gdn",
        heads=key_heads,
        gdn_value_heads=value_heads,
        gdn_key_size=key_size,
        gdn_value_size=value_size,
        norm_epsilon=NORM_EPSILON,
    )
    ours = GatedDeltaNetLayer(config, rngs=nnx.Rngs(0))
    # Their projection interleaves by key head: [q, k, the head's values, the head's gates], and
    # [write strengths, decays]. Ours is all queries, all keys, all values, with gates apart.
    per_head = value_heads // key_heads
    fused = array(theirs.in_proj_qkvz.weight).T.reshape(width, key_heads, -1)
    borders = np.cumsum([key_size, key_size, per_head * value_size])
    parts = [part.reshape(width, -1) for part in jnp.split(fused, borders, axis=-1)]
    ours.query_key_value.kernel[...] = jnp.concatenate(parts[:3], axis=-1)
    ours.gate.kernel[...] = parts[3]
    fused = array(theirs.in_proj_ba.weight).T.reshape(width, key_heads, 2, per_head)
    ours.write.kernel[...] = fused[:, :, 0].reshape(width, -1)
    ours.decay.kernel[...] = fused[:, :, 1].reshape(width, -1)
    ours.convolution.kernel[...] = array(theirs.conv1d.weight)[:, 0].T
    ours.log_rate[...] = array(theirs.A_log)
    ours.step_bias[...] = array(theirs.dt_bias)
    ours.norm.scale[...] = array(theirs.norm.weight)
    set_linear(ours.output, theirs.out_proj)
    return ours, theirs


def test_gated_delta_net_layer():
    # Three value heads to a key head: the order of grouped heads shows.
    ours, theirs = gated_delta_net_pair(key_heads=2, value_heads=6)
    generator = np.random.default_rng(0)
    x, weight = generator.standard_normal((2, 2, 75, 24)).astype(np.float32)
    x_torch = torch.tensor(x, requires_grad=True)
    wanted = theirs(x_torch)
    (wanted * torch.tensor(weight)).sum().backward()

    @jax.jit
    def value_and_gradient(layer, x):
        out, pullback = jax.vjp(lambda x: layer(x)[0], x)
        return out, pullback(jnp.asarray(weight))[0]

    out, gradient = value_and_gradient(ours, jnp.asarray(x))
    for ours, theirs in [(out, wanted.detach().numpy()), (gradient, x_torch.grad.numpy())]:
        assert np.std(theirs) > 0.1
        assert np.max(np.abs(ours - theirs)) < LAYER_TOLERANCE * np.max(np.abs(theirs))
