"""PaTH attention: products of reflections one by one, long sequences, undoing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    PathCache,
    draw_inputs,
    mixer,
    path_attention,
    path_attention_step,
    softmax_attention,
)

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
LONG = 161  # two chunks of queries and six blocks of keys, the last of them not full


def drawn(time, heads=2, **how):
    return draw_inputs(mixer("path"), time, batch=2, heads=heads, key=8, value=4, **how)


def one_by_one(q, k, v, w, beta, *, is_reversed=False):
    """Each pair's product of matrices I - beta w w^T, multiplied out."""
    q, k, v, w, beta = (np.asarray(x, np.float64) for x in (q, k, v, w, beta))
    group = q.shape[2] // k.shape[2]
    k, v, w, beta = (np.repeat(x, group, axis=2) for x in (k, v, w, beta))
    batch, time, heads, size = q.shape
    out = np.zeros((batch, time, heads, v.shape[-1]))
    for b, h in np.ndindex(batch, heads):
        reflect = np.eye(size) - beta[b, :, h, None, None] * np.einsum(
            "tk,tl->tkl", w[b, :, h], w[b, :, h]
        )
        for i in range(time):
            product, scores = np.eye(size), np.zeros(i + 1)
            for j in range(i, -1, -1):
                scores[j] = k[b, j, h] @ product @ q[b, i, h] / np.sqrt(size)
                product = product @ reflect[j] if is_reversed else reflect[j] @ product
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights / weights.sum() @ v[b, : i + 1, h]
    return out


@pytest.mark.parametrize("key_heads", [2, 4])
def test_it_is_the_equation_of_the_paper(key_heads):
    with enable_x64(True):
        q, k, v, w, beta = drawn(LONG, heads=4, dtype=jnp.float64)
        k, v, w, beta = (x[:, :, :key_heads] for x in (k, v, w, beta))
        out, _ = path_attention(q, k, v, w, beta)
        tolerance = {"rtol": FLOAT64_TOLERANCE, "atol": FLOAT64_TOLERANCE}
        np.testing.assert_allclose(out, one_by_one(q, k, v, w, beta), **tolerance)
        # The control: the same matrices, multiplied in the other order.
        other = one_by_one(q, k, v, w, beta, is_reversed=True)
        assert np.abs(out - other).max() > 1e-3


def test_without_strength_it_is_softmax_attention():
    q, k, v, w, beta = drawn(LONG)
    out, _ = path_attention(q, k, v, w, 0 * beta)
    wanted, _ = softmax_attention(q, k, v)
    np.testing.assert_allclose(out, wanted, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_tokens_can_be_taken_back():
    inputs, other = drawn(44), drawn(44, seed=1)
    cache = PathCache.empty(2, 2, 8, 4, capacity=44)
    _, cache = path_attention(*(x[:, :30] for x in inputs), initial_state=cache)
    step = jax.jit(path_attention_step)
    for t in range(6):  # over the end of a block of 32
        _, cache = step(*(x[:, t] for x in other), cache)
    cache = cache.truncate(jnp.full(2, 30, jnp.int32))
    wanted, _ = path_attention(*inputs)
    for t in range(30, 44):
        out, cache = step(*(x[:, t] for x in inputs), cache)
        np.testing.assert_allclose(
            out, wanted[:, t], rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE
        )


def test_a_strength_above_two_gives_nan_in_its_document():
    q, k, v, w, beta = drawn(21)
    beta = beta.at[0, 5, 1].set(2.1)
    documents = jnp.asarray(np.repeat([0, 1], [9, 12])[None].repeat(2, 0))
    out, _ = path_attention(q, k, v, w, beta, segment_ids=documents)
    spoilt = np.zeros(out.shape[:3], bool)
    spoilt[0, 5:9, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(out).any(-1), spoilt)
