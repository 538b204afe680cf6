"""What an eager call costs beside the same call compiled by the caller: a dispatch and no more."""

import functools
import time

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import (
    MIXERS,
    KVCache,
    draw_inputs,
    indexer_loss,
    latent,
    log_decay,
    merge_attention,
    mixer,
    short_convolution,
    short_convolution_step,
    sparse,
    unit_length,
)
from toolkit.attention.sparse.prefill.tiles import tile_masses

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
    "hca": {"block_size": 4, "sliding_window": 5},
    "csa": {"block_size": 4, "selected_entries": 3, "sliding_window": 5},
    "qsa": {"block_size": 4, "selected_tokens": 8},
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


@pytest.mark.by_family
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


def waits(function, arrays):
    """Whether a call returns only when what it is given has been computed, in each of ten tries."""
    jax.block_until_ready((function(*arrays), late(arrays, MATRIX)))
    for _ in range(10):  # a busy machine may compute before it returns
        pending = late(arrays, MATRIX)
        function(*pending)
        is_ready = all(x.is_ready() for x in jax.tree.leaves(pending))
        jax.block_until_ready(pending)
        if not is_ready:
            return False
    return True


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_no_call_waits_for_what_the_device_still_computes(name):
    for function, arrays in calls(name):
        function(*arrays)
        late(arrays, MATRIX)
        with jax.transfer_guard("disallow"):
            assert not waits(function, arrays)


def others():
    """Calls of the room that are no mixers, and what each is given."""
    key = jax.random.key(0)
    x, kernel, past = jnp.ones((1, 4, 8)), jnp.ones((3, 8)), jnp.ones((1, 2, 8))
    q, lse = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2))
    kv, rows = KVCache.empty(2, 2, 8, 8, 4), jnp.array([1])
    yield short_convolution, (x, kernel)
    yield short_convolution_step, (x[:, 0], kernel, past)
    yield unit_length, (x,)
    yield log_decay, (q[..., 0], jnp.ones(2))
    yield merge_attention, ((q, lse), (q, lse))
    yield KVCache.free, (kv, rows)
    yield KVCache.insert, (kv, rows, KVCache.empty(1, 2, 8, 8, 4))
    yield KVCache.truncate, (kv, jnp.array([0, 0]))
    sizes = {"width": 8, "heads": 2, "latent_size": 4, "key_size": 4, "rope_size": 2}
    config = latent.LatentConfig(**sizes, value_size=4)
    weights, held = latent.LatentWeights.random(config, key), latent.LatentCache.empty(1, 4, 2, 8)
    yield functools.partial(latent.mla, config=config), (x, weights)
    yield functools.partial(latent.mla_step, config=config), (x[:, 0], weights, held)
    selector, budget = sparse.Selector(), sparse.FixedTokens(8)
    keys = jnp.ones((1, 2, 8, 8))
    cache = sparse.build(selector, keys, keys, jnp.array([4]))
    yield functools.partial(sparse.build, selector), (keys, keys, jnp.array([4]))
    yield functools.partial(sparse.update, selector), (cache, q[:, 0], q[:, 0])
    decode = functools.partial(sparse.decode_step, selector=selector, budget=budget)
    yield decode, (cache, q[:, 0])
    yield functools.partial(tile_masses, query_block=2, key_block=2), (q, q, lse)
    yield indexer_loss, (q, q, q, q[:, :, 0], lse)


def test_no_other_call_waits_either():
    for function, arrays in others():
        assert not waits(function, arrays), function


def test_a_read_does_wait_for_what_the_device_still_computes():
    assert waits(lambda array: float(jnp.min(array)), [jnp.ones((2, 3))])
    assert not waits(jnp.min, [jnp.ones((2, 3))])
