"""Connections and messages, held against the modelling files of Hugging Face transformers.

The sub-layers of their models are replaced by plain ones that `LoopedConfig` has too, so that what
is compared is all that stands around them: the streams of DeepSeek-V4, the attention residuals and
the looping forward pass of Inkling-2.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

TOLERANCE = 1e-5  # of the largest logit
WIDTH, HEADS, VOCABULARY, FED = 16, 2, 40, 24
SIZES: dict[str, Any] = {
    "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY, "feed_forward": FED,
    "residual_gate": False, "tied_embedding": False, "norm_epsilon": 1e-6,
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 9))


class Attention(torch.nn.Module):
    """Causal softmax attention with rotary positions, of one or of three inputs."""

    def __init__(self):
        super().__init__()
        linear = torch.nn.Linear
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden_states, key_hidden_states=None, value_hidden_states=None, **_):
        batch, time, _ = hidden_states.shape
        keys = hidden_states if key_hidden_states is None else key_hidden_states
        values = hidden_states if value_hidden_states is None else value_hidden_states
        q, k, v = (
            project(x).view(batch, time, HEADS, -1).transpose(1, 2)
            for project, x in ((self.q, hidden_states), (self.k, keys), (self.v, values))
        )
        half = q.shape[-1] // 2
        angles = torch.arange(time)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            first, second = x[..., :half], x[..., half:]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        out = torch.nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, time, -1)), None


class SwiGLU(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(WIDTH, FED, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(FED, WIDTH, bias=False)

    def forward(self, x, **_):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Nothing(torch.nn.Module):
    def forward(self, x, **_):
        return x


def draw(model):
    """Random numbers for all parameters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name or name.endswith("scale")
            spread = 0.3 if is_scale or parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(is_scale + spread * torch.randn_like(parameter))
    return model.eval()


def given(parameter, tensor, *, transpose=True):
    array = tensor.detach().numpy()
    array = array.T if transpose and array.ndim == 2 else array
    assert parameter.shape == array.shape
    parameter[...] = jnp.asarray(array)


def give_block(block, layer):
    """The plain parts of a block."""
    theirs, ours = layer.self_attn, block.mixer
    for name in ("query", "key", "value", "output"):
        given(getattr(ours, name).kernel, getattr(theirs, name[0]).weight)
    for name in ("gate", "up", "down"):
        given(getattr(block.feed_forward, name).kernel, getattr(layer.mlp, name).weight)
    given(block.mixer_norm.scale, layer.input_layernorm.weight)
    given(block.feed_forward_norm.scale, layer.post_attention_layernorm.weight)


def compare(model, theirs, *, changed):
    """Logits, greedy tokens, and a control: a `changed` model is another one."""
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()
        text = torch.tensor(TOKENS)
        for _ in range(20):
            logits = theirs(input_ids=text, use_cache=False).logits[:, -1]
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    scale = np.abs(wanted).max()
    tokens = jnp.asarray(TOKENS)
    assert np.abs(np.asarray(model(tokens)) - wanted).max() <= TOLERANCE * scale
    assert np.abs(np.asarray(changed(tokens)) - wanted).max() > 100 * TOLERANCE * scale
    written = np.asarray(generate(model, tokens, 20))
    np.testing.assert_array_equal(written, text.numpy()[:, TOKENS.shape[1] :])
    assert len(np.unique(written)) > 3


def deepseek_v4():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as file

    config = transformers.DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=1, head_dim=8, q_lora_rank=8, o_lora_rank=8, o_groups=1, hc_mult=3,
        moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, index_n_heads=1,
        index_head_dim=8, index_topk=2, hc_sinkhorn_iters=5,
    )  # fmt: skip
    theirs = file.DeepseekV4ForCausalLM(config)
    for layer in theirs.model.layers:
        layer.self_attn, layer.mlp = Attention(), SwiGLU()
    return draw(theirs)


def test_streams_are_those_of_deepseek_v4():
    theirs = deepseek_v4()
    how: dict[str, Any] = {"streams": 3, "stream_mixing_steps": 5}
    model = LoopedLM(LoopedConfig(pattern="full full", **SIZES, **how), rngs=nnx.Rngs(0))

    def give_weights(weights, kernel, bias, scale):
        given(weights.kernel, kernel)
        given(weights.bias, bias)
        given(weights.scale, scale)

    given(model.embedding.embedding, theirs.model.embed_tokens.weight, transpose=False)
    given(model.unembedding, theirs.lm_head.weight, transpose=False)
    given(model.norm.scale, theirs.model.norm.weight)
    for block, layer in zip(model.blocks, theirs.model.layers, strict=True):
        give_block(block, layer)
        pairs = {"mixer": layer.attn_hc, "feed_forward": layer.ffn_hc}
        for name, their in pairs.items():
            own = getattr(block.connections, name).weights
            give_weights(own, their.fn, their.base, their.scale)
    head, end = theirs.model.hc_head, model.blocks[-1].connections.end.weights
    give_weights(end, head.hc_fn, head.hc_base, head.hc_scale)
    graph, state = nnx.split(model)
    changed = nnx.merge(graph, nnx.clone(state))
    # Columns of the mixing alone sum to 1; in the first block all streams are equal.
    changed.blocks[1].connections.mixer.steps = 1
    compare(model, theirs, changed=changed)


def inkling(passes, **changes):
    from transformers.models.inkling2_loop import modeling_inkling2_loop as file
    from transformers.models.inkling2_loop.configuration_inkling2_loop import (
        Inkling2LoopTextConfig,
    )

    layers = 8
    config = Inkling2LoopTextConfig(
        vocab_size=VOCABULARY, unpadded_vocab_size=VOCABULARY, hidden_size=WIDTH, head_dim=8,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        swa_num_attention_heads=HEADS, swa_num_key_value_heads=HEADS, swa_head_dim=8, d_rel=4,
        rel_extent=4, sliding_window_size=4, moe_intermediate_size=8, n_routed_experts=2,
        num_experts_per_tok=1, n_layers_per_attn_res_block=2, loop_layer_index_start=2,
        loop_layer_index_end=6, loop_num_passes=passes, loop_gate_rank=4, eos_token_id=None,
        layer_types=["hybrid_sliding"] * layers, **changes,
    )  # fmt: skip
    theirs = file.Inkling2LoopForCausalLM(config)
    for layer in theirs.model.layers:
        layer.self_attn, layer.mlp = Attention(), SwiGLU()
        layer.post_attention_convolution, layer.post_mlp_convolution = Nothing(), Nothing()
    return draw(theirs)


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_messages_between_loops_are_those_of_inkling_2(passes):
    theirs = inkling(passes)
    config = LoopedConfig(
        prelude="full full", pattern="full full full full", coda="full full", loops=passes,
        attention_residual=2, message_rank=4, head_soft_cap=30.0, **SIZES,
    )  # fmt: skip
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    # Their embedding has a norm of its own, which is the same for every occurrence of a token.
    with torch.no_grad():
        table = theirs.model.embed_tokens(torch.arange(VOCABULARY))
    given(model.embedding.embedding, table, transpose=False)
    given(model.unembedding, theirs.lm_head.weight, transpose=False)
    given(model.norm.scale, theirs.model.norm.weight)
    messages = theirs.model.message_input.query
    blocks = [*model.prelude, *model.blocks, *model.coda]
    for place, (block, layer) in enumerate(zip(blocks, theirs.model.layers, strict=True)):
        give_block(block, layer)
        own = block.connections
        if place:
            given(own.mixer.residual.query, layer.attention_input.query)
        given(own.feed_forward.residual.query, layer.mlp_input.query)
        if own.gates is None:
            continue
        given(own.gates.queries, messages[place - 2], transpose=False)
        names = {"query": "q", "key": "k", "value": "v", "feed_forward": "mlp"}
        for ours, their in names.items():
            gate, theirs_gate = getattr(own.gates, ours), getattr(layer, f"{their}_message_gate")
            given(gate.down, theirs_gate.down_proj.weight)
            given(gate.forget, theirs_gate.forget_gate_proj.weight)
            given(gate.message, theirs_gate.message_gate_proj.weight)
    given(blocks[-1].connections.end.query, theirs.model.final_input.query)
    graph, state = nnx.split(model)
    changed = nnx.merge(graph, nnx.clone(state))
    if passes == 1:
        changed.prelude[0].connections.mixer.is_boundary = False  # the embedding is no source
    else:
        own = changed.blocks[0].connections.gates
        own.queries[...] = own.queries[...][jnp.array([1, 0, 2, 3])]  # queries' and keys' messages
    compare(model, theirs, changed=changed)
