"""Huginn's checkpoints, held against numbers that its authors' modelling file computed.

That file (`raven_modeling_minimal.py` of seal-rg/recurrent-pretraining, commit 0d9ed97) ran in
float32 on these tensors and tokens, from the state zero.
"""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedLM,
    decode_step,
    generate,
    load_checkpoint,
    prefill,
    save_checkpoint,
)

CLOSE = 2e-5  # of the largest logit
SETTINGS: dict[str, Any] = {
    "model_type": "huginn_raven", "n_embd": 24, "n_heads": 3, "n_layers": 5, "vocab_size": 50,
    "intermediate_size": 32, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2, "mean_recurrence": 3, "mean_backprop_depth": 2, "qk_bias": True,
    "bias": False, "tie_embeddings": True, "norm_eps": 1e-6, "rope_base": 50000,
    "block_class_name": "SandwichBlock", "block_size": 64, "injection_type": "linear",
}  # fmt: skip
SHAPES = {
    "attn.Wqkv.weight": (72, 24), "attn.proj.weight": (24, 24), "attn.qk_bias": (2, 1, 3, 8),
    "mlp.fc.weight": (64, 24), "mlp.proj.weight": (24, 32),
    **{f"norm_{number}.weight": (24,) for number in (1, 2, 3, 4)},
}  # fmt: skip
LAYERS = ("prelude.0", "core_block.0", "core_block.1", "coda.0", "coda.1")
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))
WANTED = {
    3: (-0.09018412, -0.3472006, 2.252233, -0.7630257, 0.9698335, 1.531398, -0.7109706, 0.6898937),
    5: (-0.1344493, -0.4841884, 2.498789, -1.094781, 0.3041902, 1.560377, -2.06572, -0.09542608),
}
"""The first four logits after the last token of each row, by number of loops."""


def tensors() -> dict[str, np.ndarray]:
    shapes = {
        f"transformer.{layer}.{name}": shape for layer in LAYERS for name, shape in SHAPES.items()
    }
    shapes |= {"transformer.adapter.weight": (24, 48), "transformer.wte.weight": (50, 24)}
    shapes["transformer.ln_f.weight"] = (24,)
    draw, found = np.random.default_rng(7), {}
    for name, shape in sorted(shapes.items()):
        numbers = draw.normal(size=shape)
        scale = 0.3 if "norm" in name or "bias" in name or "ln_f" in name else shape[-1] ** -0.5
        is_norm = "norm" in name or "ln_f" in name
        found[name] = (is_norm + scale * numbers).astype(np.float32)
    return found


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def write(folder, **changes):
    from safetensors.numpy import save_file

    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def difference(model, loops):
    found = np.asarray(model(jnp.asarray(TOKENS), loops=loops))[:, -1, :4]
    wanted = np.reshape(WANTED[loops], (2, 4))
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_logits_are_those_of_the_authors(folder):
    model = load_checkpoint(folder)
    assert (model.config.loops, model.config.prelude, model.config.coda) == (3, "full", "full full")
    for loops in (3, 5):
        assert difference(model, loops) < CLOSE
    for switch in ("norm_of_sum", "norm_before_coda"):  # without either it is another function
        without: Any = {switch: False}
        other = load_checkpoint(folder, **without)
        assert difference(other, 3) > 100 * CLOSE


def test_steps_with_a_cache_are_the_parallel_form(folder):
    model, tokens = load_checkpoint(folder), jnp.asarray(TOKENS)
    wanted = np.asarray(model(tokens))
    _, cache = prefill(model, tokens[:, :7], 16)
    for place in range(7, 11):
        logits, cache = decode_step(model, tokens[:, place], cache)
        np.testing.assert_allclose(logits, wanted[:, place], rtol=0, atol=CLOSE * 4)
    assert generate(model, tokens, 3).shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection_type": "add"}, "injection_type 'add'; known is 'linear'"),
        ({"nonlin_name": "GELU"}, "nonlin_name 'GELU'; known is 'SiLU'"),
        ({"n_layers_in_coda": None}, "does not say 'n_layers_in_coda'"),
        ({"mean_recurrence": None}, "does not say 'mean_recurrence'"),
        ({"gate": 1}, "gate 1, which models of this family do not have"),
    ],
)
def test_what_is_not_huginn_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, **changes))


def test_what_is_written_reads_back_to_the_bit(folder, tmp_path):
    model, place = load_checkpoint(folder), tmp_path / "written"
    save_checkpoint(model, place, style="huginn_raven", settings={"block_size": 64})
    settings = json.loads((place / "config.json").read_text())
    assert {name: settings[name] for name in SETTINGS} == SETTINGS
    from safetensors.numpy import load_file

    written, read = load_file(place / "model.safetensors"), tensors()
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    again = load_checkpoint(place)
    assert again.config == model.config
    np.testing.assert_array_equal(again(jnp.asarray(TOKENS)), model(jnp.asarray(TOKENS)))
    # Their attention adds nothing to the values.
    bias = again.blocks[0].mixer.value.bias
    bias[...] = bias[...].at[3].set(0.5)
    with pytest.raises(ValueError, match=r"value.bias is not 0"):
        save_checkpoint(again, tmp_path / "other", style="huginn_raven")
    other = LoopedLM(dataclasses.replace(model.config, norm_of_sum=False), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cannot express norm_of_sum"):
        save_checkpoint(other, tmp_path / "third", style="huginn_raven")
