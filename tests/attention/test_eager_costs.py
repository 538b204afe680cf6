"""What an eager call costs beside the same call compiled by the caller: a dispatch and no more."""

import functools
import time

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import MIXERS, draw_inputs, mixer

pytestmark = pytest.mark.timed

# A dispatch of five arrays takes 9 microseconds on the yardstick's quiet machine. Both take turns,
# so that a busy machine slows them down alike.
DISPATCH_MICROSECONDS = 9
MOST_MICROSECONDS = 30
OPTIONS = {
    "window": {"sliding_window": 5},
    "nsa": {"block_size": 4, "selected_blocks": 4, "sliding_window": 5},
    "moba": {"block_size": 4, "selected_blocks": 2},
    "dsa": {"selected_tokens": 6},
}


def calls(name, length=4):
    """The mixer and its step, ready to be called on small inputs, and those inputs."""
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, length, batch=1)
    tokens = [x[:, 0] for x in inputs]
    state = row.empty_state(1, 2, 16, 8, 8, jnp.float32, **row.options)
    yield functools.partial(row.function, **row.options), inputs
    yield functools.partial(row.step, **row.options), [*tokens, state]


def seconds(action, repeats=10):
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


@functools.cache
def dispatch():
    """A program of five small arrays: the yardstick of a call."""
    arrays = [jnp.ones((1, 4, 2, 8))] * 5
    program = jax.jit(lambda *arrays: arrays[:2])
    program(*arrays)
    return lambda: program(*arrays)


@pytest.mark.parametrize("name", MIXERS)
def test_an_eager_call_costs_a_dispatch_and_little_more(name):
    for function, arrays in calls(name):
        whole = jax.jit(function)
        jax.block_until_ready((function(*arrays), whole(*arrays)))
        yardstick, compiled, eager = [], [], []
        for _ in range(100):  # the quickest of each: a busy moment may pass
            yardstick.append(seconds(dispatch()))
            compiled.append(seconds(lambda: whole(*arrays)))  # noqa: B023
            eager.append(seconds(lambda: function(*arrays)))  # noqa: B023
            over = (min(eager) - min(compiled)) / min(yardstick) * DISPATCH_MICROSECONDS
            if len(eager) >= 5 and over < MOST_MICROSECONDS:
                break
        assert over < MOST_MICROSECONDS, function


@jax.jit
def late(arrays, matrix):
    """The arrays, after products that a device has to work on for a while."""
    for _ in range(8):
        matrix = matrix @ matrix
    nothing = matrix.sum() * 0
    return jax.tree.map(lambda x: x + nothing.astype(x.dtype), arrays)


MATRIX = jnp.full((300, 300), 1 / 300)


@pytest.mark.parametrize("name", MIXERS)
def test_no_call_waits_for_what_the_device_still_computes(name):
    for function, arrays in calls(name):
        jax.block_until_ready((function(*arrays), late(arrays, MATRIX)))
        with jax.transfer_guard("disallow"):
            pending = late(arrays, MATRIX)
            function(*pending)
            assert not pending[0].is_ready(), "the call waited"
            jax.block_until_ready(pending)


def test_a_read_does_wait_for_what_the_device_still_computes():
    arrays = [jnp.ones((2, 3))]
    jax.block_until_ready(late(arrays, MATRIX))
    pending = late(arrays, MATRIX)
    assert not pending[0].is_ready()
    float(jnp.min(pending[0]))
    assert pending[0].is_ready()
