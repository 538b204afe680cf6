"""Inkling-2, there and back, against Hugging Face transformers; and what is refused of it."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    extend,
    load_checkpoint,
    parameter_count,
    prefill,
)
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import settings_of

STYLE = "inkling2_loop_text"
SETTINGS: dict[str, Any] = {
    "vocab_size": 64, "unpadded_vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 4,
    "sliding_window_size": 4, "d_rel": 3, "rel_extent": 5, "log_scaling_n_floor": 4,
    "log_scaling_alpha": 0.3, "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "route_scale": 2.0, "qk_l2_clip_threshold": 1.5, "rel_l2_clip_threshold": 0.7,
    "n_layers_per_attn_res_block": 2, "final_logit_softcapping": 20.0, "conv_kernel_size": 3,
    "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2,
    "loop_gate_rank": 5,
}  # fmt: skip
SHOWS = 1e-3  # of the largest logit
STEPS = 1e-4  # of logits of order one


def read(**changes: Any) -> LoopedConfig:
    given = {name: v for name, v in (SETTINGS | changes).items() if v != "absent"}
    return LoopedConfig(**fields_of(FAMILIES[STYLE], given))


def test_settings_become_fields_and_fields_settings():
    config = read()
    assert config.prelude == config.pattern == config.coda == "relative_window relative"
    assert (config.loops, config.message_rank, config.attention_residual) == (2, 5, 2)
    assert (config.vocabulary, config.relative.extent, config.relative_window.heads) == (61, 5, 6)
    assert (config.moe.activation, config.moe.scale) == ("capped_silu", 2.0)
    again = fields_of(FAMILIES[STYLE], settings_of(STYLE, config))
    assert LoopedConfig(**again).options == config.options
    loop = {"core_start": 2, "core_end": 4, "num_passes": 2, "gate_rank": 5}
    names = [name for name in SETTINGS if name.startswith("loop_")]
    assert read(loop_config=loop, **dict.fromkeys(names, "absent")) == config
    # A window need not loop beside what sees all.
    assert read(loop_layer_index_end=3, n_layers_per_attn_res_block=1).relative.extent == 5
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_gate_softcap": 3.0}, "mlp_gate_softcap 3.0; known is 4.0"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; known is 'sigmoid'"),
        ({"layer_types": ["hybrid"] * 5}, "layer_types .*; wanted 6 out of"),
        ({"loop_layer_index_start": 0}, "layers 0 to 4 of 6; wanted some after the first"),
        ({"loop_layer_index_end": 6}, "message_rank without coda"),
        ({"loop_layer_index_end": 3}, "wants a multiple of attention_residual 2"),
        ({"swa_num_attention_heads": 4}, "heads 4 is not a multiple of relative_window"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read(**change)


def test_numbers_in_few_bits_are_refused():
    tensors = {"model.llm.layers.2.mlp.experts.w13_weight_scale": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"quantised in NVFP4 or MXFP8 \(model\.llm"):
        load_checkpoint(tensors, style=STYLE)


@pytest.mark.slow
@pytest.mark.oracle
def test_inkling_2_there_and_back(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from their_models import (
        IDS,
        assert_same_parameters,
        check_there_and_back,
        error_of,
        logits_of,
        made,
        some_tokens,
    )

    theirs = made("Inkling2Loop", SETTINGS | IDS, "TextConfig")
    theirs.save_pretrained(tmp_path)  # in the spelling of the published files
    model, _ = check_there_and_back(theirs, tmp_path, STYLE)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["layer_types"] == SETTINGS["layer_types"]
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    fields = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(LoopedConfig)}
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:61]
    other: Any = load_checkpoint(state, style=STYLE, **fields)
    assert_same_parameters(model, other)
    # Controls: biases of other distances, and another convolution after a feed-forward layer.
    tokens = some_tokens()
    wanted = np.asarray(logits_of(theirs, tokens))
    first, second = other.blocks[1].mixer, model.coda[0].mixer
    first.profiles[...] = np.roll(first.profiles[...], 1, axis=1)
    second.fed_convolution.kernel[...] *= 0
    assert min(error_of(changed, tokens, wanted) for changed in (other, model)) > SHOWS


@pytest.mark.slow
def test_pieces_steps_and_documents_are_the_whole():
    config = LoopedConfig.tiny("relative_window relative", width=16, heads=2)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    draw = iter(jax.random.split(jax.random.key(1), 99))
    # Convolutions and gates start at zero.
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(draw), x.shape), params)
    model = nnx.merge(graph, params)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 30))
    whole = jax.jit(LoopedLM.__call__)
    wanted = whole(model, tokens)
    _, cache = prefill(model, tokens[:, :11], 32)
    logits, cache = extend(model, tokens[:, 11:28], cache)
    step = jax.jit(decode_step)
    for token in tokens[:, 28:].T:
        logits, cache = step(model, token, cache)
    np.testing.assert_allclose(logits, wanted[:, -1], rtol=0, atol=STEPS)
    documents = np.repeat([[0] * 13 + [1] * 17], 2, axis=0)
    packed = jax.jit(lambda *given: given[0](given[1], segment_ids=given[2]))
    alone = whole(model, tokens[:, 13:])
    np.testing.assert_allclose(packed(model, tokens, documents)[:, 13:], alone, rtol=0, atol=STEPS)
    # A control: a text that goes on from the first document is another one.
    assert np.abs(wanted[:, 13:] - alone).max() > 100 * STEPS
