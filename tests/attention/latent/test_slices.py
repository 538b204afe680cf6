"""Folding is exact, slicing a softmax is not, and where it must be it is: spec by properties."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from latent_layers import distance, drawn, small, stream

from toolkit.attention.latent import (
    LatentCache,
    LatentWeights,
    calibration_latents,
    energy_shares,
    fold,
    hadamard_basis,
    least_squares_multipliers,
    mla,
    principal_basis,
    random_basis,
    slice_latents,
    slicing_report,
    tpla,
    tpla_reference,
    tpla_step,
)

KEY = jax.random.key(0)
EXACT = {"norm": "exact"}


@pytest.fixture(autouse=True)
def double():
    with enable_x64(True):
        yield


def layer(**changes):
    config = small(**changes)
    return config, drawn(config), stream(config)


def bases(config, weights, x):
    latents = calibration_latents(x, weights, config)
    skew = np.random.default_rng(0).normal(size=(16, 16)) + 4 * np.eye(16)
    return {
        "none": None,
        "hadamard": hadamard_basis(16, KEY),
        "principal": principal_basis(latents),
        "centred": principal_basis(latents, is_centred=True),
        "random": random_basis(16, KEY),
        "any": skew,
    }


def test_folding_changes_nothing_and_forgetting_the_gain_does():
    config, weights, x = layer()
    wanted, _ = mla(x, weights, config)
    for basis in bases(config, weights, x).values():
        folded = fold(weights, basis)
        assert distance(mla(x, folded, config)[0], wanted) < 1e-12
        again = fold(folded, hadamard_basis(16))
        assert distance(mla(x, again, config)[0], wanted) < 1e-12
    turn = jnp.asarray(random_basis(16, KEY))
    wrong = replace(
        weights,
        latent_down=weights.latent_down @ turn,
        key_up=jnp.einsum("rk,rhv->khv", turn, weights.key_up),
        value_up=jnp.einsum("rk,rhv->khv", turn, weights.value_up),
    )
    assert distance(mla(x, wrong, config)[0], wanted) > 0.1


@pytest.mark.parametrize("name", ["none", "hadamard", "principal", "any"])
def test_one_slice_and_summed_scores_are_the_layer(name):
    config, weights, x = layer()
    wanted, _ = mla(x, weights, config)
    folded = fold(weights, bases(config, weights, x)[name])
    norms = ["exact"] if name == "any" else ["exact", "sliced"]
    for norm in norms:
        assert (
            distance(tpla_reference(x, slice_latents(folded, 1), config, norm=norm), wanted) < 1e-12
        )
    for slices, shared in ((2, 0), (4, 4)):
        sliced = slice_latents(folded, slices, shared=shared)
        summed = tpla_reference(x, sliced, config, norm="exact", softmax="summed")
        assert distance(summed, wanted) < 1e-12
        approximate = tpla_reference(x, sliced, config, norm="exact")
        assert distance(approximate, wanted) > 1e-3
        # One token is its whole softmax, and a prompt is read exactly.
        assert distance(approximate[:, :1], wanted[:, :1]) < 1e-12
        prompted = tpla_reference(x, sliced, config, prompt=5)
        assert distance(prompted[:, :5], wanted[:, :5]) < 1e-12
        assert distance(prompted[:, 5:], wanted[:, 5:]) > 1e-3
    everywhere = slice_latents(folded, 2, shared=16)
    assert distance(tpla_reference(x, everywhere, config, norm="exact"), wanted) < 1e-12


def test_without_scores_of_latents_slicing_is_exact():
    config, weights, x = layer()
    still = fold(replace(weights, key_up=jnp.zeros_like(weights.key_up)))
    assert (
        distance(
            tpla_reference(x, slice_latents(still, 4), config, **EXACT), mla(x, still, config)[0]
        )
        < 1e-12
    )


def test_slices_that_are_copies_need_the_multiplier():
    config, weights, x = layer()
    double = {
        "latent_down": jnp.tile(weights.latent_down[:, :8], (1, 2)),
        "key_up": jnp.tile(weights.key_up[:8], (2, 1, 1)),
    }
    copies = replace(weights, latent_norm=jnp.ones(16), **double)
    wanted, _ = mla(x, copies, config)
    sliced = slice_latents(copies, 2, multipliers=np.array([2.0, 2.0]))
    for norm in ("sliced", "exact"):
        assert distance(tpla_reference(x, sliced, config, norm=norm), wanted) < 1e-12
    assert distance(tpla_reference(x, slice_latents(copies, 2), config, **EXACT), wanted) > 0.01
    for is_per_head in (False, True):
        plain = slice_latents(copies, 2)
        found = least_squares_multipliers(x, plain, config, is_per_head=is_per_head)
        assert np.allclose(found, 2)


def test_latents_of_low_rank_lie_in_the_first_slice():
    config, weights, x = layer()
    thin = weights.latent_down[:, :4] @ jnp.asarray(np.random.default_rng(2).normal(size=(4, 16)))
    weights = replace(weights, latent_down=thin)
    latents = calibration_latents(x, weights, config)
    folded = fold(weights, principal_basis(latents))
    shares = energy_shares(calibration_latents(x, folded, config), 4)
    assert shares[0] == pytest.approx(1)
    # What the others hold is noise of rounding, which a norm of their own would blow up.
    sliced = slice_latents(folded, 4, shares=np.maximum(shares, 1e-9))
    wanted, _ = mla(x, weights, config)
    for norm in ("sliced", "exact"):
        assert distance(tpla_reference(x, sliced, config, norm=norm), wanted) < 1e-10


@pytest.mark.parametrize("slices", [2, 4])
def test_grouped_latents_are_sliced_exactly(slices):
    config, weights, x = layer()
    weights = fold(weights)
    own = np.kron(np.eye(slices), np.ones((16 // slices, config.heads // slices)))[..., None]
    ups = {name: getattr(weights, name) * own for name in ("key_up", "value_up")}
    grouped = replace(weights, **ups)
    found = tpla_reference(x, slice_latents(grouped, slices), config, **EXACT)
    assert distance(found, mla(x, grouped, config)[0]) < 1e-12


def test_hadamard_energy_is_a_butterfly_of_halves():
    rng = np.random.default_rng(0)
    c = rng.normal(size=64)
    basis = hadamard_basis(64, KEY)
    signs = np.sign(basis[:, 0])
    first = energy_shares(jnp.asarray((c @ basis)[None]), 2)[0]
    s = signs * c
    assert first == pytest.approx(0.5 + (s[:32] * s[32:]).sum() / (c**2).sum(), abs=1e-12)
    one_hot = np.eye(64)[:5] @ basis
    assert np.allclose(energy_shares(jnp.asarray(one_hot), 8), 1 / 8)


def test_the_fast_forms_are_the_equation():
    config, weights, x = layer()
    folded = fold(weights, bases(config, weights, x)["principal"])
    for norm, shared in (("sliced", 0), ("exact", 0), ("exact", 4), ("sliced", 4)):
        sliced = slice_latents(folded, 4, shared=shared, multipliers=np.array([1, 0.9, 1.2, 1]))
        wanted = tpla_reference(x, sliced, config, norm=norm)
        assert distance(tpla(x, sliced, config, norm=norm)[0], wanted) < 1e-12
        kept = sliced.owned.size
        cache = LatentCache.empty(2, kept, config.rope_size, 7, x.dtype)
        y, cache = tpla(x[:, :3], sliced, config, norm=norm, initial_state=cache)
        assert distance(y, wanted[:, :3]) < 1e-12
        y_t, cache = tpla_step(x[:, 3], sliced, cache, config, norm=norm)
        assert distance(y_t, wanted[:, 3]) < 1e-12


def test_after_an_exact_prompt_the_mixed_cache_decodes_as_the_equation():
    config, weights, x = layer()
    folded = fold(weights, bases(config, weights, x)["principal"])
    sliced = slice_latents(folded, 2, shares=np.array([0.7, 0.3]))
    cache = LatentCache.empty(2, 16, config.rope_size, 7, x.dtype)
    _, cache = mla(x[:, :2], folded, config, initial_state=cache)
    wanted = tpla_reference(x, sliced, config, prompt=2)
    for t in range(2, 7):
        y, cache = tpla_step(x[:, t], sliced, cache, config)
        assert distance(y, wanted[:, t]) < 1e-12


def spectrum(power):
    """A layer whose latents have energies i^-power, and a long stream."""
    config = small(width=64, latent_size=64, heads=4, key_size=16, value_size=16, yarn=None)
    weights = LatentWeights.random(config, jax.random.key(1), float)
    energies = np.arange(1, 65.0) ** (-power / 2)
    mix = random_basis(64, jax.random.key(2))
    return config, replace(weights, latent_down=jnp.asarray(mix * energies @ random_basis(64, KEY)))


def test_norms_cost_less_than_softmaxes_and_principal_components_least():
    config, weights = spectrum(2.0)
    x = stream(config, 1, 64)
    wanted, _ = mla(x, weights, config)
    found = {}
    latents = calibration_latents(x, weights, config)
    for name, basis in {
        "hadamard": hadamard_basis(64, KEY),
        "pca": principal_basis(latents),
    }.items():
        folded = fold(weights, basis)
        shares = energy_shares(calibration_latents(x, folded, config), 2)
        sliced = slice_latents(folded, 2, shares=shares)
        how = {
            "norm": ("sliced", "summed"),
            "softmax": ("exact", "sliced"),
            "both": ("sliced",) * 2,
        }
        for part, (norm, softmax) in how.items():
            y = tpla_reference(x, sliced, config, norm=norm, softmax=softmax)
            found[name, part] = distance(y, wanted)
        report = slicing_report(x, sliced, config, norm="exact")
        assert report.output_error == pytest.approx(found[name, "softmax"], rel=1e-9)
    for name in ("hadamard", "pca"):
        assert found[name, "norm"] < found[name, "softmax"] < 1.1 * found[name, "both"]
    assert found["pca", "softmax"] < 0.5 * found["hadamard", "softmax"]
    assert report.score_r2[0] > 0.8 > report.score_r2[1]
    assert report.divergence[0] < report.divergence[1]
    assert report.top_agreement[0] > report.top_agreement[1]


def test_a_report_of_one_slice_finds_nothing():
    config, weights, x = layer()
    report = slicing_report(x, slice_latents(fold(weights), 1), config)
    assert report.output_error < 1e-12
    assert np.allclose(report.divergence, 0, atol=1e-12)
    assert np.allclose(report.score_r2, 1)
    assert np.allclose(report.top_agreement, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, f, c, x: slice_latents(f, 3), "slices must divide the latent size 16; got 3"),
        (lambda w, f, c, x: slice_latents(f, 4, shared=2), "16 - 2 shared features; got 4"),
        (lambda w, f, c, x: slice_latents(w, 2), "must be folded"),
        (lambda w, f, c, x: slice_latents(f, 2, shares=np.ones(3)), "shares must be 2"),
        (lambda w, f, c, x: slice_latents(f, 2, multipliers="two"), "multipliers must be one of"),
        (lambda w, f, c, x: slice_latents(f, 2, multipliers=jnp.ones((2, 3))), "by 8 heads"),
        (lambda w, f, c, x: fold(w, jnp.ones((16, 16))), "must be invertible"),
        (lambda w, f, c, x: fold(w, jnp.ones((8, 8))), "basis"),
        (lambda w, f, c, x: hadamard_basis(12), "power of two; got 12"),
        (lambda w, f, c, x: random_basis(10**9, KEY), "at most 8192"),
        (lambda w, f, c, x: tpla_reference(x, slice_latents(f, 2), c, prompt=9), "at most the 7"),
        (lambda w, f, c, x: tpla(x, slice_latents(f, 2), small(heads=4)), "sliced.key_up"),
        (lambda w, f, c, x: slicing_report(x[:, :1], slice_latents(f, 2), c), "two tokens"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    config, weights, x = layer()
    with pytest.raises((ValueError, TypeError), match=message):
        call(weights, fold(weights), config, x)
