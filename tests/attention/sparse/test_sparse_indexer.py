"""The lightning indexer's loss: its value, whom it teaches, and where it is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import indexer_loss
from toolkit.attention.sparse import index_scores, top_mask

TOLERANCE = 1e-11
COMPILE_FAST = {"xla_backend_optimization_level": 0}
BATCH, TIME, HEADS, GROUPS, KEY = 2, 19, 4, 2, 8
DOCUMENTS = np.repeat([4, 7], [8, 11])[None].repeat(BATCH, axis=0)


def inputs():
    random = np.random.default_rng(0)
    shapes = ((HEADS, KEY), (GROUPS, KEY), (3, 5), (5,), (3,))
    return [jnp.asarray(random.standard_normal((BATCH, TIME, *shape))) for shape in shapes]


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def naive_loss(q, k, index_q, index_k, weights, documents, count):
    """Token by token."""
    rows = []
    for b, t in np.ndindex(BATCH, TIME):
        past = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
        seen = np.array(past)
        scores = weights[b, t] @ np.maximum(index_q[b, t] @ index_k[b, seen].T, 0)
        if count is not None:
            kept = np.sort(np.argsort(-scores, kind="stable")[:count])
            seen, scores = seen[kept], scores[kept]
        target = 0
        for h in range(HEADS):
            keys = k[b, seen, h * GROUPS // HEADS]
            target = target + np.exp(log_softmax(keys @ q[b, t, h] / np.sqrt(KEY))) / HEADS
        rows.append(np.sum(target * (np.log(target) - log_softmax(scores))))
    return np.reshape(rows, (BATCH, TIME))


@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_loss_and_gradient(count, documents):
    everything = np.zeros((BATCH, TIME), int) if documents is None else documents
    with enable_x64(True):
        q, k, *index = inputs()
        ids = None if documents is None else jnp.asarray(documents, jnp.int32)

        def loss(*index):
            losses = indexer_loss(q, k, *index, selected_tokens=count, segment_ids=ids)
            return losses.sum(), losses

        run = jax.jit(
            jax.value_and_grad(loss, (0, 1, 2), has_aux=True), compiler_options=COMPILE_FAST
        )
        (_, got), gradients = run(*index)
        wanted = naive_loss(*(np.asarray(x) for x in (q, k, *index)), everything, count)
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
        step = 1e-5
        for place, gradient in enumerate(gradients):
            direction = jnp.asarray(
                np.random.default_rng(place).standard_normal(gradient.shape) * step
            )
            ends = [
                run(*(x + sign * direction if i == place else x for i, x in enumerate(index)))[0][0]
                for sign in (1, -1)
            ]
            wanted = (ends[0] - ends[1]) / 2
            assert abs(jnp.vdot(gradient, direction) - wanted) < 1e-5 * step + 1e-4 * abs(wanted)


def test_only_the_indexer_learns():
    arrays = inputs()
    run = jax.grad(lambda *x: indexer_loss(*x).sum(), argnums=range(5))
    gradients = jax.jit(run, compiler_options=COMPILE_FAST)(*arrays)
    assert [bool(np.any(gradient)) for gradient in gradients] == [False, False, True, True, True]


def test_an_indexer_that_copies_its_only_head_is_perfect():
    """ReLU(s) - ReLU(-s) = s: two index heads make the scores of attention itself."""
    q, k, *_ = inputs()
    q, k = q[:, :, :1], k[:, :, :1]
    index_q = jnp.concatenate([q, -q], axis=2)
    weights = jnp.broadcast_to(jnp.array([1.0, -1.0]) * KEY**-0.5, (BATCH, TIME, 2))
    for count in (None, 5):
        loss = indexer_loss(q, k, index_q, k[:, :, 0], weights, selected_tokens=count)
        np.testing.assert_allclose(loss, 0, atol=1e-6)


def test_scores_are_the_equation_and_zeros_tie():
    _, _, index_q, index_k, weights = (np.asarray(x) for x in inputs())
    got = index_scores(index_q[0], index_k[0], weights[0])
    wanted = np.zeros((TIME, TIME))
    for t, s in np.ndindex(TIME, TIME):
        wanted[t, s] = sum(
            w * max(0.0, q @ index_k[0, s])
            for w, q in zip(weights[0, t], index_q[0, t], strict=True)
        )
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    nothing = index_scores(-np.abs(index_q[0]), np.abs(index_k[0]), weights[0])
    mask = top_mask(nothing, jnp.ones((TIME, TIME), bool), 3)
    np.testing.assert_array_equal(mask, np.arange(TIME)[None].repeat(TIME, 0) < 3)


def test_wrong_inputs_are_named():
    q, k, index_q, index_k, weights = inputs()
    with pytest.raises(ValueError, match=r"index_weights .*must have shape"):
        indexer_loss(q, k, index_q, index_k, weights[..., :2])
    with pytest.raises(ValueError, match=r"the heads of q must be a multiple"):
        indexer_loss(q[:, :, :3], k, index_q, index_k, weights)
    with pytest.raises(TypeError, match=r"segment_ids must be integers"):
        indexer_loss(q, k, index_q, index_k, weights, segment_ids=q[:, :, 0, 0])
