"""The delta rule as MaxText calls it: held to its recurrence, written down here once more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import chunk_gated_delta_rule

TOLERANCE = 2e-5
HALF_TOLERANCE = 2e-2  # of bfloat16, relative to the largest number
TIME, HEADS, KEY, VALUE = 70, 2, 8, 6  # no multiple of any chunk


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, TIME, HEADS, KEY))
    v = rng.normal(size=(2, TIME, HEADS, VALUE))
    g = -rng.exponential(size=(2, TIME, HEADS)) / 4
    beta = rng.uniform(size=(2, TIME, HEADS))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def recurrence(q, k, v, g, beta, state=None):
    """Token by token in NumPy: what is read under the decayed state is replaced by the value."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    batch, time, heads, key = q.shape
    state = np.zeros((batch, heads, key, v.shape[-1])) if state is None else state
    outs = []
    for t in range(time):
        state = state * np.exp(g[:, t])[..., None, None]
        found = np.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t][..., None] * (v[:, t] - found)
        state = state + k[:, t][..., None] * change[..., None, :]
        outs.append(np.einsum("bhk,bhkv->bhv", q[:, t], state) / key**0.5)
    return np.stack(outs, axis=1), state


def run(arrays, state=None, dtype=jnp.float32, **more):
    # By position, as MaxText's layer could: the size of a chunk is the sixth argument.
    return chunk_gated_delta_rule(*map(jnp.asarray, arrays), 64, state, True, dtype, **more)


def test_outputs_are_those_of_the_recurrence(inputs):
    out, state = run(inputs)
    wanted, _ = recurrence(*inputs)
    assert state is None
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE)


def test_a_state_goes_on(inputs):
    halves = [[x[:, :30] for x in inputs], [x[:, 30:] for x in inputs]]
    _, before = recurrence(*halves[0])
    out, state = run(halves[1], jnp.asarray(before, jnp.float32))
    wanted, after = recurrence(*halves[1], before)
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE)
    np.testing.assert_allclose(state, after, atol=TOLERANCE)


def test_half_precision_is_of_the_products_and_not_of_the_output(inputs):
    out, _ = run(inputs, dtype=jnp.bfloat16)
    wanted, _ = recurrence(*inputs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, wanted, atol=HALF_TOLERANCE * abs(wanted).max())


def test_a_packed_document_is_as_one_alone(inputs):
    documents = jnp.where(jnp.arange(TIME)[None] < 33, 1, 2) * jnp.ones((2, 1), jnp.int32)
    packed, _ = run(inputs, segment_ids=documents)
    alone, _ = recurrence(*(x[:, 33:] for x in inputs))
    np.testing.assert_allclose(packed[:, 33:], alone, atol=TOLERANCE)
    # The control: without numbers of documents the first one shows in the second.
    leaky, _ = run(inputs)
    assert abs(np.asarray(leaky)[:, 33:] - alone).max() > 100 * TOLERANCE


def test_shared_keys_need_not_be_repeated(inputs):
    q, k, v, g, beta = inputs
    few = [q[:, :, :1], k[:, :, :1], v, g, beta]
    repeated = [q[:, :, [0, 0]], k[:, :, [0, 0]], v, g, beta]
    np.testing.assert_allclose(run(few)[0], run(repeated)[0], atol=TOLERANCE)


def test_it_has_a_gradient(inputs):
    loss = lambda v: (run([*inputs[:2], v, *inputs[3:]])[0] ** 2).sum()  # noqa: E731
    v = jnp.asarray(inputs[2])
    step = 1e-2 * jax.random.normal(jax.random.key(1), v.shape)
    change = (loss(v + step) - loss(v - step)) / 2
    np.testing.assert_allclose(change, (jax.grad(loss)(v) * step).sum(), rtol=1e-3)
