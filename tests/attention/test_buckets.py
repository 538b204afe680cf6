"""A hundred lengths share a few programs; what fills a sequence up changes nothing before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import counted_programs
from test_eager import OPTIONS

from toolkit.attention import MIXERS, bucket_length, draw_inputs, mixer

TOLERANCE = 1e-5
MOST_PROGRAMS = 8


def filled(inputs, size):
    return [
        np.pad(x, [(0, 0), (0, size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
        for x in map(np.asarray, inputs)
    ]


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_zeros_after_a_sequence_change_neither_outputs_nor_states(name):
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, 21, batch=1)
    wanted, final = row.function(*inputs, **row.options)
    got, state = row.function(*filled(inputs, bucket_length(21)), **row.options)
    assert got.shape[1] == 32
    np.testing.assert_allclose(got[:, :21], wanted, rtol=TOLERANCE, atol=TOLERANCE)
    if final is not None and name != "retention":  # whose decay is no input
        np.testing.assert_allclose(state, final, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("is_bucketed", [True, False])
def test_a_hundred_lengths_compile_eight_programs_at_most(is_bucketed):
    row = mixer("linear")
    jax.clear_caches()
    count = 100 if is_bucketed else MOST_PROGRAMS + 1
    with counted_programs() as programs:
        for length in range(1, count + 1):
            size = bucket_length(length) if is_bucketed else length
            inputs = [np.zeros((1, size, 1, 4), np.float32)] * 3
            row.function(*inputs)
    assert (len(programs) <= MOST_PROGRAMS) == is_bucketed


def test_buckets_hold_their_lengths():
    sizes = {bucket_length(length) for length in range(1, 2049)}
    assert sorted(sizes) == [16 * 2**n for n in range(MOST_PROGRAMS)]
    for length in range(1, 300):
        assert length <= bucket_length(length, least=3) < max(4, 2 * length)
    with pytest.raises(ValueError, match="length must be at least 1 token; got 0"):
        bucket_length(0)
    with pytest.raises(TypeError, match="length must be an int"):
        bucket_length(jnp.int32(3))
