"""The short convolution: its equation, gradient, documents, pieces and steps; the token before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from toolkit.attention import short_convolution, short_convolution_step
from toolkit.attention.short_convolution import token_before

assert_close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def test_it_is_the_sum_in_its_docstring_however_it_is_cut():
    x, kernel, bias = draw(2, 7, 3), draw(4, 3), draw(3)
    padded = np.concatenate([np.zeros((2, 3, 3)), x], axis=1)
    wanted = sum(np.asarray(kernel)[i] * padded[:, i : i + 7] for i in range(4)) + np.asarray(bias)
    out, state = short_convolution(x, kernel, bias)
    assert_close(out, wanted)
    np.testing.assert_array_equal(state, x[:, 4:])
    # In pieces shorter than the kernel, the state carries more than the last piece.
    pieces, state = [], jnp.zeros((2, 3, 3))
    for piece in (x[:, :2], x[:, 2:3], x[:, 3:5]):
        out, state = short_convolution(piece, kernel, bias, initial_state=state)
        pieces.append(out)
    for t in (5, 6):
        out, state = short_convolution_step(x[:, t], kernel, state, bias)
        pieces.append(out[:, None])
    assert_close(jnp.concatenate(pieces, axis=1), wanted)


def test_gradient():
    """Written by hand; with one document all the same, jax derives the sum over taps itself."""
    x, kernel = draw(2, 7, 3), draw(4, 3)

    def loss(kernel, x, segment_ids=None):
        return jnp.sum(short_convolution(x, kernel, segment_ids=segment_ids)[0] ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    wanted = gradient(kernel, x, jnp.zeros((2, 7), jnp.int32))
    jax.tree.map(assert_close, gradient(kernel, x), wanted)
    with enable_x64(True):
        wide = [a.astype(jnp.float64) for a in (kernel, x)]
        check_grads(jax.jit(loss), wide, order=2, atol=1e-5, rtol=1e-5)
    # The kernel is whole on every device and the batch is not: its gradient is summed over both.
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spread = jax.shard_map(
        jax.grad(lambda kernel, x: jax.lax.psum(loss(kernel, x), "data"), argnums=(0, 1)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P("data")),
    )
    jax.tree.map(assert_close, jax.jit(spread)(kernel, x), wanted)


def test_what_continues_a_document_knows_no_other():
    """The last document is two tokens long, the states would hold three and one."""
    x, kernel = draw(1, 7, 3), draw(4, 3)
    documents = jnp.asarray([[1, 1, 1, 1, 1, 2, 2]])
    _, state = short_convolution(x, kernel, segment_ids=documents)
    np.testing.assert_array_equal(state, x[:, 4:].at[:, 0].set(0))
    # A state handed in belongs to the first document.
    here = {"initial_state": x[:, 4:]}
    out, state = short_convolution(x[:, :1], kernel, segment_ids=documents[:, :1], **here)
    np.testing.assert_array_equal(state, jnp.concatenate([x[:, 5:], x[:, :1]], axis=1))
    assert_close(out, short_convolution(x[:, :1], kernel, **here)[0])
    before, state = token_before(x, segment_ids=documents)
    wanted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :7].at[:, 5].set(0)
    np.testing.assert_array_equal(before, wanted)
    np.testing.assert_array_equal(state, x[:, 6:])


def test_a_number_used_twice_is_two_documents():
    x, kernel = draw(1, 7, 3), draw(4, 3)
    twice, once = jnp.asarray([[1, 2, 1, 1, 2, 2, 1]]), jnp.asarray([[1, 2, 3, 3, 4, 4, 5]])
    for function in (partial(short_convolution, x, kernel), partial(token_before, x)):
        got, wanted = (function(segment_ids=ids) for ids in (twice, once))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_kernel_of_one_tap_goes_on_from_its_empty_state():
    x, kernel = draw(2, 4, 3), draw(1, 3)
    _, state = short_convolution(x[:, :2], kernel)
    out, state = short_convolution(x[:, 2:3], kernel, initial_state=state)
    last, _ = short_convolution_step(x[:, 3], kernel, state)
    np.testing.assert_array_equal(jnp.concatenate([out, last[:, None]], 1), x[:, 2:] * kernel[None])


def test_wrong_shapes_are_named():
    x, kernel = draw(2, 7, 3), draw(4, 3)
    with pytest.raises(ValueError, match=r"the state must hold 3 inputs, .*; got 4"):
        short_convolution(x, kernel, initial_state=x[:, :4])
    with pytest.raises(ValueError, match=r"kernel \[taps, channels\] must have shape"):
        short_convolution(x, kernel[:, :2])
