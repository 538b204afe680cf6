"""Derivatives of every row of `MIXERS`: both modes, first and second order, at every length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import MIXERS, draw_inputs, mixer

TOLERANCE = 1e-10
OPTIONS = {
    "window": {"sliding_window": 5},
    "nsa": {"block_size": 3, "selected_blocks": 4, "sliding_window": 5},
    "moba": {"block_size": 3, "selected_blocks": 3},
    "dsa": {"selected_tokens": 6},
}
SIZES = {"batch": 1, "heads": 1, "key": 4, "value": 3}
REPRESENTATIVES = ("full", "mamba2", "rwkv7", "nsa", "dsa")  # of what has its own code
EARLIER = 3  # tokens before, in the state
BELOW, AT, ABOVE = 7, 16, 20  # against a chunk of 16 tokens
MODES = ("forward", "forward over reverse", "reverse over reverse", "reverse over forward")


def derivatives(modes, function, inputs):
    """Of a loss of the outputs: along one direction, and how the gradient changes along it."""
    rng = np.random.default_rng(3)
    direction = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in inputs)
    gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(3 * function(*x))), range(len(inputs)))

    def along(*inputs):
        return jax.jvp(lambda *x: jnp.sum(jnp.sin(3 * function(*x))), inputs, direction)[1]

    def gradient_along(*inputs):
        return sum(map(jnp.vdot, gradient(*inputs), direction))

    every = range(len(inputs))
    ways = {
        "forward": lambda: along(*inputs),
        "forward over reverse": lambda: jax.jvp(gradient, inputs, direction)[1],
        "reverse over reverse": lambda: jax.grad(gradient_along, every)(*inputs),
        "reverse over forward": lambda: jax.grad(along, every)(*inputs),
    }
    return {mode: ways[mode]() for mode in modes}


def assert_derivatives_equal_the_reference(row, time, modes, implementation=None):
    """Tokens of two documents, the first of which continues a state."""
    with enable_x64(True):
        drawn = draw_inputs(row, EARLIER + time, dtype=jnp.float64, **SIZES)
        earlier, inputs = ([x[:, part] for x in drawn] for part in (slice(3), slice(3, None)))
        ids = jnp.asarray(np.arange(EARLIER + time)[None] >= 9, jnp.int32)
        sizes = (*SIZES.values(), EARLIER + time, jnp.float64)
        _, state = row.function(
            *earlier, initial_state=row.empty_state(*sizes, **row.options), **row.options
        )
        options = {"initial_state": state, "segment_ids": ids[:, EARLIER:], **row.options}

        def function(*inputs):
            return row.function(*inputs, implementation=implementation, **options)[0]

        def reference(*inputs):
            whole = (jnp.concatenate(both, axis=1) for both in zip(earlier, inputs, strict=True))
            return row.reference(*whole, segment_ids=ids, **row.options)[0][:, EARLIER:]

        got = jax.jit(partial(derivatives, modes, function))(tuple(inputs))
        # A Hessian is symmetric: whatever the modes, its product with a vector is the same.
        wanted = jax.jit(partial(derivatives, MODES[:2], reference))(tuple(inputs))
        for mode in modes:
            exact = wanted["forward" if mode == "forward" else "forward over reverse"]
            for a, b in zip(jax.tree.leaves(got[mode]), jax.tree.leaves(exact), strict=True):
                scale = max(1.0, float(jnp.max(jnp.abs(b))))
                np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale, err_msg=mode)


def row_of(name):
    return mixer(name, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", ["mamba2", "kda"])
def test_forward_mode_and_second_derivatives_equal_the_reference(name):
    assert_derivatives_equal_the_reference(row_of(name), ABOVE, MODES[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_every_row_has_them(name):
    assert_derivatives_equal_the_reference(row_of(name), ABOVE, MODES[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_way_to_them_and_every_length_gives_the_same(name):
    assert_derivatives_equal_the_reference(row_of(name), BELOW, MODES)
    assert_derivatives_equal_the_reference(row_of(name), AT, MODES[1:2])


@pytest.mark.nightly
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_every_implementation_has_them(name):
    for implementation in row_of(name).differentiable[1:]:
        assert_derivatives_equal_the_reference(row_of(name), BELOW, MODES[:2], implementation)
