"""Forgetting attention: the paper's equation by matrices, long sequences, closed gates, undoing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    ForgettingCache,
    draw_inputs,
    forgetting_attention,
    forgetting_attention_step,
    mixer,
    softmax_attention,
)

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
LONG = 300  # three chunks of queries, the last of them not full


def drawn(time, heads=2, **how):
    return draw_inputs(mixer("fox"), time, batch=2, heads=heads, key=8, value=4, **how)


def by_matrices(q, k, v, g):
    """Weights F_ij exp(q_i . k_j) over their sum, with F a matrix of products of sigmoids."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    gates, time = np.exp(g), g.shape[1]
    faded = np.zeros((*g.shape[:1], g.shape[2], time, time))
    for i in range(time):
        faded[:, :, i, i] = 1
        for j in range(i - 1, -1, -1):
            faded[:, :, i, j] = faded[:, :, i, j + 1] * gates[:, j + 1]
    weights = faded * np.exp(np.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("bhij,bjhv->bihv", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("form", ["dense", "chunked"])
def test_it_is_the_equation_of_the_paper(form, key_heads):
    with enable_x64(True):
        q, k, v, g = drawn(LONG if form == "chunked" else 21, heads=4, dtype=jnp.float64)
        k, v = k[:, :, :key_heads], v[:, :, :key_heads]
        out, _ = forgetting_attention(q, k, v, g, implementation=form)
        np.testing.assert_allclose(
            out, by_matrices(q, k, v, g), rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
        )


def test_open_gates_are_softmax_attention():
    q, k, v, g = drawn(LONG)
    out, _ = forgetting_attention(q, k, v, 0 * g)
    wanted, _ = softmax_attention(q, k, v)
    np.testing.assert_allclose(out, wanted, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_decays_keep_their_digits_after_all_that_was_forgotten():
    """In float32, against float64; the difference of two cumulative sums is the control."""
    q, k, v, g = drawn(LONG)
    g = g.at[:, : LONG // 2].add(-3e4)
    out, _ = forgetting_attention(q, k, v, g)
    with enable_x64(True):
        exact = [x.astype(jnp.float64) for x in (q, k, v, g)]
        wanted = np.asarray(forgetting_attention(*exact)[0])
    np.testing.assert_allclose(out, wanted, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
    total = jnp.cumsum(g, axis=1).swapaxes(1, 2)
    naive, _ = softmax_attention(q, k, v, bias=total[..., None] - total[:, :, None])
    assert np.abs(naive - wanted).max() > 100 * FLOAT32_TOLERANCE


def test_a_closed_gate_begins_a_new_document():
    q, k, v, g = drawn(21)
    g = g.at[:, 9].set(-jnp.inf)
    documents = jnp.asarray(np.repeat([0, 1], [9, 12])[None].repeat(2, 0))

    def results(g, **options):
        def loss(*inputs):
            out, _ = forgetting_attention(*inputs, **options)
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(loss, argnums=range(4), has_aux=True)(q, k, v, g)

    got, wanted = results(g), results(g.at[:, 9].set(-1.0), segment_ids=documents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_tokens_can_be_taken_back():
    """Each token keeps its own gate, so that what came after it leaves nothing behind."""
    inputs, other = drawn(12), drawn(12, seed=1)
    cache = ForgettingCache.empty(2, 2, 2, 8, 4, capacity=12)
    _, cache = forgetting_attention(*(x[:, :6] for x in inputs), initial_state=cache)
    for t in range(3):
        _, cache = forgetting_attention_step(*(x[:, t] for x in other), cache)
    cache = cache.truncate(jnp.full(2, 6, jnp.int32))
    wanted, _ = forgetting_attention(*inputs)
    for t in range(6, 12):
        out, cache = forgetting_attention_step(*(x[:, t] for x in inputs), cache)
        np.testing.assert_allclose(
            out, wanted[:, t], rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE
        )


def test_a_gate_above_one_gives_nan_in_its_document():
    q, k, v, g = drawn(21)
    g = g.at[0, 5, 1].set(0.1)
    documents = jnp.asarray(np.repeat([0, 1], [9, 12])[None].repeat(2, 0))
    out, _ = forgetting_attention(q, k, v, g, segment_ids=documents)
    spoilt = np.zeros(out.shape[:3], bool)
    spoilt[0, 5:9, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(out).any(-1), spoilt)
