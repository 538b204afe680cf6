"""What the tests of linear-time mixers compare: outputs, final states and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def results(function, inputs, **options):
    """Output, final state and the gradients of a loss that uses both."""

    def loss(*inputs):
        out, state = function(*inputs, **options)
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(2 * state)), (out, state)

    run = jax.jit(jax.value_and_grad(loss, argnums=range(len(inputs)), has_aux=True))
    (_, (out, state)), gradients = run(*inputs)
    return out, state, *gradients


def assert_close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def with_state(function):
    """The function with its initial state as one more argument, to differentiate it too."""
    return lambda *inputs, **options: function(*inputs[:-1], initial_state=inputs[-1], **options)


def random_state(heads, dtype, batch=2, key=16, value=8):
    shape = (batch, heads, key, value)
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), dtype)
