"""RWKV-7's checkpoints, held against numbers that flash-linear-attention's modelling file computed.

That file (`fla/models/rwkv7/modeling_rwkv7.py`, commit bc3b101) ran in float32 on these tensors and
tokens with the naive recurrence of `fla/ops/generalized_delta_rule/dplr/naive.py`.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    load_checkpoint,
    load_model,
    parameter_count,
    prefill,
    save_checkpoint,
    save_model,
)
from toolkit.looped.blocks import run_blocks

CLOSE = 1e-5  # of the largest logit
SETTINGS: dict[str, Any] = {
    "model_type": "rwkv7", "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3,
    "head_dim": 8, "num_heads": 3, "intermediate_size": 40, "decay_low_rank_dim": 6,
    "a_low_rank_dim": 5, "v_low_rank_dim": 4, "gate_low_rank_dim": 7, "norm_eps": 1e-3,
    "norm_first": True, "norm_bias": True, "hidden_act": "sqrelu", "tie_word_embeddings": False,
}  # fmt: skip
LOW_RANK = {"w": 6, "a": 5, "v": 4, "g": 7}
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))
WANTED = (
    -0.1626054, -1.795216, -1.31509, 1.410308, -1.250986, -2.419919, -0.1364632, -0.2586044,
)  # fmt: skip
"""The first four logits after the last token of each row."""
TEXT = (
    (10, 29, 47, 29, 47, 29, 47, 29, 47, 29, 32, 35, 47, 3, 0, 47, 25, 29, 11, 9),
    (45, 25, 43, 29, 47, 29, 32, 35, 47, 3, 0, 47, 25, 27, 47, 35, 40, 45, 25, 17),
)
"""What follows each row, by the largest logit."""


def tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (50, 24),
        "lm_head.weight": (50, 24),
    }
    norms = ["norm", "layers.0.pre_norm"]
    for layer in range(3):
        mixer, fed = f"model.layers.{layer}.attn.", f"model.layers.{layer}.ffn."
        norms += [f"layers.{layer}.{name}" for name in ("attn_norm", "ffn_norm", "attn.g_norm")]
        shapes |= {f"{mixer}x_{letter}": (1, 1, 24) for letter in "rwkvag"}
        shapes |= {f"{mixer}k_k": (24,), f"{mixer}k_a": (24,), f"{mixer}r_k": (3, 8)}
        shapes |= {f"{mixer}{letter}_proj.weight": (24, 24) for letter in "rkvo"}
        for letter, rank in LOW_RANK.items():
            if letter == "v" and not layer:
                continue
            shapes[f"{mixer}{letter}_lora.lora.0.weight"] = (rank, 24)
            shapes[f"{mixer}{letter}_lora.lora.2.weight"] = (24, rank)
            if letter != "g":
                shapes[f"{mixer}{letter}_lora.lora.2.bias"] = (24,)
        shapes |= {f"{fed}x_k": (24,), f"{fed}key.weight": (40, 24), f"{fed}value.weight": (24, 40)}
    shapes |= {f"model.{name}.{part}": (24,) for name in norms for part in ("weight", "bias")}
    draw, found = np.random.default_rng(7), {}
    for name, shape in sorted(shapes.items()):
        is_scale = name.endswith("norm.weight")
        found[name] = (is_scale + 0.3 * draw.normal(size=shape)).astype(np.float32)
    return found


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def write(folder, **changes):
    from safetensors.numpy import save_file

    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def logits_of(model):
    return np.asarray(jax.jit(LoopedLM.__call__)(model, jnp.asarray(TOKENS)))[:, -1, :4]


def difference(model):
    wanted = np.reshape(WANTED, (2, 4))
    return np.abs(logits_of(model) - wanted).max() / np.abs(wanted).max()


def test_logits_and_text_are_those_of_the_public_file(folder):
    model = load_checkpoint(folder)
    assert model.config.pattern == "rwkv7 channel_mix " * 2 + "rwkv7 channel_mix"
    assert difference(model) < CLOSE
    assert parameter_count(model.config) == sum(tensor.size for tensor in tensors().values())
    # Without the first layer's values, or without the embedding's norm, it is another function.
    for block in model.blocks[2::2]:
        block.mixer.value_mix.bias[...] = jnp.full(24, -100.0)
    assert difference(model) > 100 * CLOSE
    model = load_checkpoint(folder)
    model.embedding.norm.scale[...] = jnp.ones(24)
    assert difference(model) > 100 * CLOSE
    save_model(load_checkpoint(folder), folder / "ours")
    model, text, step = load_model(folder / "ours"), [], jax.jit(decode_step)
    logits, cache = prefill(model, jnp.asarray(TOKENS), 32)
    for _ in TEXT[0]:
        text.append(np.argmax(logits, axis=-1))
        logits, cache = step(model, jnp.asarray(text[-1]), cache)
    np.testing.assert_array_equal(np.transpose(text), TEXT)


def test_what_is_written_reads_back_to_the_bit(folder, tmp_path):
    from safetensors.numpy import load_file

    model, place = load_checkpoint(folder), tmp_path / "written"
    save_checkpoint(model, place, style="rwkv7")
    settings = json.loads((place / "config.json").read_text())
    assert {name: settings[name] for name in SETTINGS} == SETTINGS
    written, read = load_file(place / "model.safetensors"), tensors()
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert load_checkpoint(place).config == model.config
    other = LoopedLM(model.config.with_options(rwkv7={"norm_epsilon": 0.5}), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"rwkv7\.norm_epsilon to be key_size norm_epsilon"):
        save_checkpoint(other, tmp_path / "other", style="rwkv7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": [24, 24, 48]}, r"value_dim \[24, 24, 48\]; known is hidden_size, 24"),
        ({"num_heads": 4}, "head_dim 8 and num_heads 4, which do not make 24 channels"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'; known is 'sqrelu'"),
        ({"attn": {"layers": [1], "num_heads": 3}}, "attn .*; known is None"),
        ({"hidden_size": None}, "does not say 'hidden_size' in a whole number"),
        ({"norm_eps": "small"}, "norm_eps 'small'; it must be a number"),
        ({"v_low_rank_dim": 3}, "cannot make"),
    ],
)
def test_what_is_not_this_model_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, **changes))


def test_the_values_of_the_first_layer_are_needed(folder):
    """A part of the stack, such as a stage of a pipeline, does not have them."""
    blocks = load_checkpoint(folder).blocks
    with pytest.raises(ValueError, match="called without the first one's values"):
        run_blocks(blocks[2:4], jnp.zeros((1, 3, 24)))
    option = {"rwkv7": {"value_residual": True}}
    with pytest.raises(ValueError, match="stack's first layer, which is 'full'"):
        LoopedConfig.tiny("full rwkv7", options=option)
    with pytest.raises(ValueError, match="value_residual and streams exclude each other"):
        LoopedConfig.tiny("rwkv7 rwkv7", options=option, streams=2)


@pytest.mark.slow
def test_the_values_of_a_loop_are_its_own():
    """Two loops of one layer and two of another's values: steps are the parallel form."""
    config = LoopedConfig.tiny(
        "rwkv7 full rwkv7", loops=2, width=16, heads=2, vocabulary=20,
        options={"rwkv7": {"value_residual": True}}, embedding_norm=True,
    )  # fmt: skip
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    model.blocks[2].mixer.value_mix.down.kernel[...] = jnp.ones((16, 32)) / 4
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9]])
    call = jax.jit(LoopedLM.__call__)
    wanted = call(model, tokens)
    logits, cache = prefill(model, tokens[:, :4], 8)
    for place in (4, 5):
        logits, cache = decode_step(model, tokens[:, place], cache)
        np.testing.assert_allclose(logits, wanted[:, place], rtol=0, atol=1e-5)
    two = jnp.concatenate([tokens, tokens], axis=1)
    packed = call(model, two, segment_ids=jnp.asarray([[0] * 6 + [1] * 6]))
    np.testing.assert_allclose(packed[:, 6:], wanted, rtol=0, atol=1e-5)
