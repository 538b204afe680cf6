"""Packed documents are read apart, whatever their lengths: hypothesis looks for a way to leak.

The shapes stay the same, so that each mixer is compiled once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.attention import draw_inputs, mixer

TIME = 40  # several chunks of 16, the last one incomplete
ROUNDING = 2e-5  # a chunk's decays are summed across documents before they are cut apart


@functools.cache
def packed(name):
    """The row, its inputs, other inputs, and the jitted function of inputs and documents."""
    row = mixer(name)
    inputs, others = (draw_inputs(row, TIME, batch=1, seed=seed) for seed in (0, 1))

    @jax.jit
    def read(inputs, documents):
        chunk = {} if name == "window" else {"chunk": 16}
        return row.function(*inputs, **row.options, **chunk, segment_ids=documents)[0]

    return row, inputs, others, read


@pytest.mark.parametrize("name", ["window", "hgrn2", "gdn", "rwkv7"])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    starts=st.sets(st.integers(1, TIME - 1)),
    token=st.integers(0, TIME - 1),
    stray=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
def test_a_document_does_not_feel_its_neighbours(name, starts, token, stray):
    row, inputs, others, read = packed(name)
    documents = np.searchsorted(sorted(starts), np.arange(TIME), side="right")
    own = documents == documents[token]
    changed = []
    for argument, x, other in zip(row.names, inputs, others, strict=True):
        if argument == "v" and stray is not None:
            other = jnp.full_like(x, stray)
        changed.append(jnp.where(own.reshape(1, TIME, *[1] * (x.ndim - 2)), x, other))
    ids = jnp.asarray(documents)[None]
    got, wanted = (read(arrays, ids)[:, own] for arrays in (changed, inputs))
    np.testing.assert_allclose(got, wanted, rtol=ROUNDING, atol=ROUNDING)
