"""Selecting exactly k of equal scores the first, and attending to a selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import sparse
from toolkit.attention.sparse import selected_indices, top_mask
from toolkit.attention.sparse.selection import largest_indices
from toolkit.attention.sparse.train.spread import prefers_gather

attend = jax.jit(sparse.attend)  # as one program; eagerly each of its steps would be one

TOLERANCE, FLOAT32_TOLERANCE = 1e-12, 1e-5
BOTH = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def naive_mask(scores, visible, count):
    """By sorting (score, index) pairs in Python; -0.0 equals 0.0 there."""
    mask = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        pairs = sorted((-scores[row][i], i) for i in np.flatnonzero(visible[row]))
        mask[row][[i for _, i in pairs[:count]]] = True
    return mask


@BOTH
@pytest.mark.parametrize("count", [1, 5, 16, 31, 40])
def test_exactly_the_largest_and_of_equal_ones_the_first(dtype, count):
    random = np.random.default_rng(count)
    scores = np.stack(
        [
            random.standard_normal(31),
            random.integers(-2, 3, 31),  # many ties
            np.zeros(31),
            np.where(random.random(31) < 0.5, 0.0, -0.0),  # equal, though their bits differ
            random.standard_normal(31) * 1e-42,  # below the smallest normal float32; not 0
            np.where(random.random(31) < 0.2, -np.inf, 1e38),
        ]
    ).astype(dtype)
    visible = random.random(scores.shape) < 0.8
    with enable_x64(dtype == np.float64):
        mask = np.asarray(jax.jit(top_mask, static_argnums=2)(scores, visible, count))
        index, filled = selected_indices(jnp.asarray(mask), count)
    np.testing.assert_array_equal(mask, naive_mask(scores, visible, count))
    for row, places, is_filled in zip(mask, np.asarray(index), np.asarray(filled), strict=True):
        np.testing.assert_array_equal(places[is_filled], np.flatnonzero(row))
        assert is_filled.sum() == row.sum()


@pytest.mark.parametrize(("count", "limit"), [(3, 3), (3, 2), (12, 12), (12, 0), (60, 57)])
def test_largest_of_blocks_are_the_largest_of_all(count, limit):
    """60 of 203 scores are searched as one row, fewer in blocks of 4 and 8; the last is short."""
    random = np.random.default_rng(count)
    scores = np.stack(
        [
            random.standard_normal(203),
            random.integers(-2, 3, 203),  # ties within blocks and between them
            np.where(random.random(203) < 0.98, -np.inf, 1.0),  # fewer than wanted
            np.where(np.arange(203) % 50 == 7, -np.nan, np.arange(203)),
        ]
    ).astype(np.float32)
    found = jax.jit(largest_indices, static_argnums=1)(
        jnp.asarray(scores), count, jnp.full(4, limit)
    )
    by_value = np.where(np.isnan(scores), np.inf, scores)
    wanted = naive_mask(by_value, by_value > -np.inf, limit)
    for row, index, is_one in zip(wanted, *map(np.asarray, found), strict=True):
        np.testing.assert_array_equal(index[is_one], np.flatnonzero(row))


def test_where_nothing_is_visible_nothing_is_selected():
    """Also from rows so long that their blocks are searched first."""
    nothing = jnp.full((2, 4096), -jnp.inf)
    for scores, count in ((nothing, 0), (nothing.at[1, 7].set(1), 1)):
        assert largest_indices(scores, 16, jnp.full(2, 16))[1].sum() == count


def test_a_selection_has_no_gradient():
    scores = jnp.arange(6.0)
    mask = jnp.ones(6, bool)
    gradient = jax.grad(lambda x: jnp.where(top_mask(x, mask, 3), 1.0, 0.0).sum())(scores)
    np.testing.assert_array_equal(gradient, 0)


def some_attention(seed=0, *, queries=7, group=2, keys=11, key=4, value=4):
    random = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(random.standard_normal(shape))
        for shape in ((queries, group, key), (keys, key), (keys, value))
    )
    return q, k, v, jnp.asarray(random.random((queries, keys)) < 0.6).at[0].set(False)


def test_masked_and_gathered_attention_equal_jax():
    q, k, v, mask = some_attention()
    got = attend(q, k, v, mask, scale=0.7)
    index, filled = selected_indices(mask, 11)
    gathered = attend(q, k[index], v[index], filled, scale=0.7)
    wanted = jax.nn.dot_product_attention(
        q[None], k[None, :, None], v[None, :, None], scale=0.7, mask=mask[None, None]
    )[0]
    np.testing.assert_allclose(got.out[1:], wanted[1:], atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(got.out, gathered.out, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(got.lse, gathered.lse, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(got.weights[1:].sum(-1), 1, atol=FLOAT32_TOLERANCE)
    np.testing.assert_array_equal(got.weights[0], 0)
    np.testing.assert_array_equal(got.out[0], 0)


def test_two_disjoint_selections_merge_by_their_lse():
    with enable_x64(True):
        q, k, v, mask = some_attention()
        half = jnp.arange(11)[None] < 5
        whole = attend(q, k, v, mask, scale=1.0)
        parts = [attend(q, k, v, mask & side, scale=1.0) for side in (half, ~half)]
        weights = jax.nn.softmax(jnp.stack([part.lse for part in parts]), axis=0)[..., None]
        merged = sum(w * part.out for w, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(merged[1:], whole.out[1:], atol=TOLERANCE)


def test_only_queries_that_attend_to_nan_show_it():
    q, k, v, mask = some_attention()
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    sees = np.asarray(mask[:, 4])

    def loss(q, k, v):
        out = attend(q, k, v, mask, scale=1.0).out
        return jnp.where(jnp.asarray(sees)[:, None, None], 0, out).sum(), out

    run = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, out = run(q, k.at[4].set(jnp.nan), v.at[4].set(jnp.inf))
    assert np.isnan(out[sees]).all()
    assert np.isfinite(out[~sees]).all()
    wanted, _ = run(q, k, v)
    for got, clean in zip(gradients, wanted, strict=True):
        np.testing.assert_array_equal(got, clean)


def test_copies_pay_when_many_heads_share_them_or_the_context_is_long():
    assert not prefers_gather(4096, 2048, 1, 4, platform="cpu")
    assert not prefers_gather(4096, 2048, 16, 4, platform="cpu")
    assert prefers_gather(16_384, 2048, 16, 4, platform="cpu")
    assert prefers_gather(131_072, 2048, 1, 4, platform="cpu")
