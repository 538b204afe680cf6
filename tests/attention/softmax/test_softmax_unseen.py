"""A key whose bias is -inf is not seen: left padding as an additive mask, as torch knows it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from tiers import by_night

from toolkit.attention import softmax_attention, softmax_attention_reference
from toolkit.attention.softmax import tiles

TOLERANCE = 1e-12
TIME, PADDING, HEADS, KEY = 37, 20, 2, 4
FORMS = {
    "dense": partial(softmax_attention, implementation="dense"),
    "blockwise": partial(softmax_attention, implementation="blockwise"),
    "reference": softmax_attention_reference,
}
SINKS = {"no sinks": None, "sinks": [0.3, -1.0], "a sink of -inf": [0.3, -np.inf]}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16, so that some are not seen at all."""
    monkeypatch.setattr(tiles, "largest_tile", lambda keys: 16)


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def results(function, bias, sinks, **options):
    """Outputs, residuals, gradients of both and their change along a direction."""
    arrays = {name: numbers(i, 1, TIME, HEADS, KEY) for i, name in enumerate("qkv")}
    arrays |= {"bias": bias} | ({} if sinks is None else {"sinks": jnp.asarray(sinks)})

    def call(arrays):
        out, _, residual = function(**arrays, **options, return_residual=True)
        return out, jnp.where(residual == -jnp.inf, 0, residual)

    out, backward = jax.vjp(call, arrays)
    gradients = backward(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), out))
    moved = jax.jvp(call, (arrays,), (jax.tree.map(jnp.ones_like, arrays),))[1]
    return function(**arrays, **options, return_residual=True), gradients, moved


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sinks", by_night({"no sinks", "sinks"}, SINKS))
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_of_minus_infinity_is_a_mask(form, sinks, is_causal):
    sinks = SINKS[sinks]
    with enable_x64(True):
        bias = numbers(5, 1, HEADS, 1, TIME)
        seen = (jnp.arange(TIME) >= PADDING).reshape(1, 1, 1, TIME)
        if not is_causal:  # padding after the text, too, and queries that see nothing
            bias = jnp.broadcast_to(bias, (1, HEADS, TIME, TIME))
            seen &= (jnp.arange(TIME) > 3).reshape(1, 1, TIME, 1)
        hidden = jnp.where(seen, bias, -jnp.inf)
        got = results(FORMS[form], hidden, sinks, is_causal=is_causal)
        wanted = results(FORMS[form], bias, sinks, is_causal=is_causal, mask=seen)
    (out, _, residual), *derivatives = got
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, derivatives)))
    empty = slice(0, PADDING if is_causal else 4)
    assert not out[:, empty].any()
    sink = np.array([-np.inf] * HEADS if sinks is None else sinks)
    np.testing.assert_array_equal(
        residual[:, empty], np.broadcast_to(sink, residual[:, empty].shape)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE), got, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_the_lowest_finite_bias_is_seen_where_there_is_nothing_else(form):
    # Masks of many models are made of it, and padding may come first.
    q, k, v = (numbers(seed, 1, TIME, HEADS, KEY) for seed in range(3))
    hides = (jnp.arange(TIME) < PADDING).reshape(1, 1, 1, TIME)
    out, _ = FORMS[form](q, k, v, bias=jnp.where(hides, jnp.finfo(q.dtype).min, 0.0))
    after, _ = FORMS[form](q, k, v, bias=jnp.where(hides, -jnp.inf, 0.0))
    np.testing.assert_array_equal(out[:, PADDING:], after[:, PADDING:])
    means = np.cumsum(np.asarray(v), axis=1) / np.arange(1, TIME + 1).reshape(1, -1, 1, 1)
    np.testing.assert_allclose(out[:, :PADDING], means[:, :PADDING], atol=1e-6)
    # Scores that are -inf without a mask have overflowed.
    out, _ = FORMS[form](jnp.abs(q) + 1, jnp.full_like(k, -3e38), v)
    assert jnp.isnan(out).all()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_bias_hides_never_shows(form):
    q, k, v = (numbers(seed, 1, TIME, HEADS, KEY) for seed in range(3))
    bias = jnp.where(jnp.arange(TIME) < PADDING, -jnp.inf, 0).reshape(1, 1, 1, TIME)
    dirty = (x.at[:, :PADDING].set(jnp.nan) if form != "reference" else x for x in (k, v))
    out, _ = FORMS[form](q, *dirty, bias=bias)
    np.testing.assert_array_equal(out, FORMS[form](q, k, v, bias=bias)[0])
    # A bias that is NaN is seen.
    out, _ = FORMS[form](q, k, v, bias=bias.at[..., -1].set(jnp.nan))
    assert jnp.isnan(out[:, -1]).all()
    assert jnp.isfinite(out[:, :-1]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64, np.uint64])
def test_lengths_and_places_out_of_range_are_the_nearest_in_it(form, dtype):
    """Cast to 32 bits as they are, 2**32 + 1 would count one token and 2**63 none."""
    with enable_x64(True):
        q, k, v = (numbers(seed, 3, TIME, HEADS, KEY) for seed in range(3))
        info = np.iinfo(dtype)
        far = np.array([info.min, 5, min(info.max, 2**32 + 1)], dtype)
        near, attend = np.array([0, 5, TIME]), partial(FORMS[form], q, k, v, is_causal=False)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            wanted = attend(**{name: jnp.asarray(near)})[0]
            np.testing.assert_array_equal(attend(**{name: jnp.asarray(far)})[0], wanted)
            assert not wanted[0].any()
        near = np.array([-TIME if info.min else 0, 5, TIME])  # no key before it is seen, or all
        attend = partial(FORMS[form], q, k, v)
        wanted = attend(query_offset=jnp.asarray(near))[0]
        np.testing.assert_allclose(attend(query_offset=jnp.asarray(far))[0], wanted, rtol=TOLERANCE)


def test_a_far_place_is_refused():
    q = numbers(0, 1, 3, HEADS, KEY)
    with pytest.raises(ValueError, match="query_offset must be within 2"):
        softmax_attention(q, q, q, query_offset=2**31 - 1)
