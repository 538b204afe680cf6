"""Against Hugging Face transformers: a whole Llama, once and looped.

A random tiny PyTorch model; its weights, laid out in our order, must give the same numbers.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, load_layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

LOGITS_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


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
        tensors = {name: t.numpy() for name, t in layer.self_attn.state_dict().items()}
        load_layer(block.mixer, tensors, style="llama")
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
