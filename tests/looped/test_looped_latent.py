"""A looped model of latent attention: rotated it is the same, sliced it drafts for itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit._compat import set_value
from toolkit.attention.latent import LatentWeights, mla
from toolkit.looped import (
    LAYERS,
    LoopedConfig,
    LoopedLM,
    decode_step,
    generate,
    generate_speculatively,
    load_layer,
    prefill,
    rotate_latents,
    with_slices,
)

SIZES = {"latent_size": 8, "key_size": 4, "rope_size": 4, "value_size": 4, "yarn_factor": 4.0}


def build():
    config = LoopedConfig.tiny(
        "mla mla", 2, width=16, heads=2, vocabulary=20, options={"mla": SIZES}
    )
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    for block in model.blocks:
        gain = np.random.default_rng(0).uniform(0.5, 1.5, 8)
        set_value(block.mixer.latent_norm.scale, jnp.asarray(gain, jnp.float32))
    return model


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 10)))


def test_rotated_is_the_same_and_sliced_is_not():
    model = build()
    wanted = model(TOKENS)
    for basis in ("principal", "hadamard", "none"):
        rotated = rotate_latents(model, TOKENS, basis=basis)
        np.testing.assert_allclose(rotated(TOKENS), wanted, atol=2e-5)
        assert float(jnp.abs(rotated.blocks[0].mixer.latent_norm.scale[...] - 1).max()) == 0
    sliced = with_slices(rotated, 2)
    np.testing.assert_allclose(sliced(TOKENS), wanted, atol=2e-5)
    everywhere = with_slices(rotated, 2, slices_prompt=True, exact_norm=False)
    assert float(jnp.abs(everywhere(TOKENS) - wanted).max()) > 1e-3
    np.testing.assert_allclose(with_slices(everywhere, 1)(TOKENS), wanted, atol=2e-5)
    # A prompt read exactly, then a token that meets the slices: neither of the two.
    _, cache = prefill(sliced, TOKENS[:, :6], 10)
    stepped, _ = decode_step(sliced, TOKENS[:, 6], cache)
    assert float(jnp.abs(stepped - wanted[:, 6]).max()) > 1e-4


def test_parameters_are_rotated_in_their_own_type_not_in_that_of_the_compute():
    model = build()
    config = dataclasses.replace(model.config, dtype="bfloat16")
    lower = LoopedLM(config, rngs=nnx.Rngs(0))
    nnx.update(lower, nnx.state(model))
    rotated = [rotate_latents(x, TOKENS, basis="hadamard") for x in (model, lower)]
    for wanted, found in zip(*(jax.tree.leaves(nnx.state(x)) for x in rotated), strict=True):
        np.testing.assert_array_equal(found, wanted)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model))
    nnx.update(model, halves)
    for leaf in jax.tree.leaves(nnx.state(rotate_latents(model, TOKENS))):
        assert leaf.dtype == jnp.bfloat16


@pytest.mark.slow
def test_slices_draft_what_the_whole_verifies():
    model = rotate_latents(build(), TOKENS)
    draft = with_slices(model, 2)
    found = generate_speculatively(model, draft, TOKENS, 12, drafts=3, shares_cache=True)
    assert (found.tokens == generate(model, TOKENS, 12)).all()
    assert 0 < float(found.kept.mean()) <= 3


@pytest.mark.parametrize("style", ["deepseek_v2_lite", "deepseek_v3"])
def test_deepseek_names_fill_the_layer(style):
    """The layer computes what the same tensors give as `LatentWeights`."""
    query = 6 if style == "deepseek_v3" else None
    config = build().config.with_options(mla={"query_latent_size": query})
    layer = LAYERS["mla"](config, rngs=nnx.Rngs(0))
    sizes, shapes = layer.sizes, {"q_proj": (16, 16)}
    if query:
        shapes = {"q_a_proj": (6, 16), "q_a_layernorm": (6,), "q_b_proj": (16, 6)}
    shapes |= {"kv_a_proj_with_mqa": (12, 16), "kv_a_layernorm": (8,)}
    shapes |= {"kv_b_proj": (16, 8), "o_proj": (16, 8)}
    draw = np.random.default_rng(0).normal
    tensors = {f"{n}.weight": draw(size=s).astype(np.float32) for n, s in shapes.items()}
    load_layer(layer, tensors, style=style)
    x = draw(size=(1, 5, 16)).astype(np.float32)
    wanted, _ = mla(x, LatentWeights.from_tensors(tensors, sizes), sizes)
    np.testing.assert_allclose(layer(x)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: with_slices(m, 3), "mla.slices must divide latent_size 8; got 3"),
        (lambda m: rotate_latents(m, TOKENS, basis="pca"), "basis must be one of"),
        (lambda m: m.config.with_options(mla={"rope_size": 3}), "mla.rope_size must be even"),
        (lambda m: m.config.with_options(mla={"yarn_factor": 0.0}), "factor must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(build())


def test_a_model_without_latents_has_none_to_rotate():
    model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must have an 'mla' layer"):
        with_slices(model, 2)
    assert jax.tree.leaves(nnx.state(model))
