"""A model whose attention is in slices: exact where it says so, and as it decodes where not."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.experiments import run_experiment
from toolkit.experiments.latent import experiment as latent
from toolkit.experiments.latent.sharded import decoded, devices_for
from toolkit.experiments.latent.sliced import align, cut, logits, streams
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    prefill,
    rotate_latents,
    with_slices,
)

TINY = LoopedConfig.tiny(
    "mla mla",
    width=16,
    heads=2,
    feed_forwards="swiglu moe",
    feed_forward_multiple_of=8,
    residual_gate=False,
    options={
        "mla": {"latent_size": 8, "key_size": 4, "rope_size": 4, "value_size": 4},
        "moe": {"experts": 4, "hidden": 8, "shared_hidden": 8, "scores": "sigmoid"},
    },
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 8)), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return LoopedLM(TINY, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("norm", ["sliced", "exact"])
def test_a_model_in_slices_is_what_decodes_after_an_exact_prompt(model, norm):
    wanted, key = model(TOKENS), jax.random.key(0)
    whole = cut(model, streams(model, TOKENS), 1, "Hadamard", key)
    np.testing.assert_allclose(logits(model, whole, TOKENS, norm=norm), wanted, atol=2e-5)
    layers = cut(model, streams(model, TOKENS), 2, "PCA", key)
    found = logits(model, layers, TOKENS, norm=norm, prompt=6)
    np.testing.assert_allclose(found[:, :6], wanted[:, :6], atol=2e-5)
    assert float(jnp.abs(found - wanted).max()) > 1e-4
    # The same by the layer's own decoding, its shares of the energy measured on the same text.
    rotated = rotate_latents(model, TOKENS)
    draft = with_slices(rotated, 2, exact_norm=norm == "exact", tokens=TOKENS)
    _, cache = prefill(draft, TOKENS[:, :6], 8)
    stepped, _ = decode_step(draft, TOKENS[:, 6], cache)
    np.testing.assert_allclose(stepped, found[:, 6], atol=2e-5)


def test_the_model_on_devices_computes_what_the_reference_says(model):
    """Tokens cut are the model itself; slices are their equation, and far from the model."""
    whole, read = model(TOKENS), streams(model, TOKENS)
    layers = cut(model, read, 1, "none", jax.random.key(0))
    tokens = TOKENS[:, :7]  # which two devices do not divide
    found = decoded(model, layers, tokens, mesh=devices_for("dcp", 2), scheme="dcp")
    np.testing.assert_allclose(found, whole[:, :7], atol=5e-5)
    layers = cut(model, read, 2, "random", jax.random.key(0))
    for norm in ("sliced", "exact"):
        how = {"mesh": devices_for("tpla", 2), "scheme": "tpla", "norm": norm}
        found = decoded(model, layers, TOKENS, **how)
        np.testing.assert_allclose(found, logits(model, layers, TOKENS, norm=norm), atol=5e-5)
        assert float(jnp.abs(found - whole).max()) > 1e-2
    with pytest.raises(ValueError, match=r"dcp over 99 devices: jax runs with \d+; call"):
        devices_for("dcp", 99)


def test_alignment_brings_slices_nearer(model):
    layers = cut(model, streams(model, TOKENS), 4, "none", jax.random.key(0))
    text = np.random.default_rng(1).integers(0, 256, 9).astype(np.uint8)  # one window of 8
    how = {"norm": "sliced", "steps": 12, "rate": 1e-2, "seed": 0, "batch": 2, "time": 8}
    aligned, losses = align(model, layers, text, **how)
    assert losses[-1] < 0.5 * losses[0]
    assert (aligned[0].multipliers == layers[0].multipliers).all()


@pytest.mark.slow
def test_the_experiment_runs_made_short(monkeypatch, tmp_path, capsys):
    for name, value in {"TIME": 16, "BATCH": 2, "WINDOWS": (1, 2), "CALIBRATION": 2}.items():
        monkeypatch.setattr(latent, name, value)
    labels = ("MLA", "DCP, 2 devices", "g=4, PCA, sliced norm", "g=4, PCA, sliced norm, aligned")
    settings = {
        label: dataclasses.replace(
            setting, model=TINY, steps=10, align_steps=min(2, setting.align_steps)
        )
        for label in labels
        for setting in [latent.EXPERIMENT.settings[label]]
    }
    short = dataclasses.replace(latent.EXPERIMENT, settings=settings)
    assert run_experiment(short, tmp_path, seeds=1)
    said = capsys.readouterr().out
    for claim in short.claims:
        assert f"not shown    {claim.text}" in said
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    whole, shared, cut_up, aligned = (line["outcome"] for line in lines)
    assert whole["same token"] == shared["same token"] == 1
    assert shared["perplexity"] == pytest.approx(whole["perplexity"])
    assert whole["output error"] < 1e-5 < cut_up["output error"]
    assert len(cut_up["score R2 by layer"]) == 2
    assert len(aligned["align loss"]) == 2
