"""Blocks gone back through in pieces: the same gradients, and less memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import program_cost

TIME, CHUNKS = 128, 4


def parts_of(pattern, **options):
    sizes = {"loops": 1, "width": 32, "heads": 2, "vocabulary": 16, "feed_forward": 256}
    return nnx.split(LoopedLM(LoopedConfig.tiny(pattern, **(sizes | options)), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("pattern", "loops", "share"),
    [
        pytest.param("window", 2, 0.8, marks=pytest.mark.nightly),
        pytest.param("full gdn", 1, 0.8, marks=pytest.mark.slow),
        # They mix all tokens again at once: the feed-forward layer alone goes in pieces.
        pytest.param("mla", 1, 0.9, marks=pytest.mark.slow),
        pytest.param("nsa", 1, 0.9, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_the_same_in_less_memory(pattern, loops, share):
    graph, params = parts_of(pattern, loops=loops)
    tokens = jax.random.randint(jax.random.key(0), (1, TIME + 1), 0, 16)
    batch = tokens[:, :-1], tokens[:, 1:]
    results, memory = [], []
    for chunks in (1, CHUNKS):
        loss = partial(next_byte_loss, graph, block_chunks=chunks)
        program = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
        results.append(program(params, batch))
        memory.append(program_cost(program).temp_bytes)
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5, rtol=0)
    assert memory[1] < share * memory[0]


@pytest.mark.parametrize(
    ("options", "chunks", "packed", "message"),
    [
        ({}, 7, (), "chunks: got 7, wanted a divisor of 8 tokens"),
        ({"ladder_residual": True}, 2, (), "block_chunks: not available for ladder_residual"),
        ({}, 2, (jnp.zeros((1, 8), int),), "block_chunks: not available for packed documents"),
    ],
)
def test_what_cannot_stream_is_said(options, chunks, packed, message):
    batch = (jnp.zeros((1, 8), int), jnp.zeros((1, 8), int), *packed)
    with pytest.raises(ValueError, match=message):
        next_byte_loss(*parts_of("full", **options), batch, block_chunks=chunks)
