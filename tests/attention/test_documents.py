"""Documents are runs of equal numbers, in every mixer and its oracle, with a cache or without."""

import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    MIXERS,
    IndexedCache,
    deepseek_sparse_attention,
    deepseek_sparse_attention_reference,
    draw_inputs,
    mixer,
)

OPTIONS = {
    "window": {"sliding_window": 5},
    "nsa": {"block_size": 3, "selected_blocks": 4, "sliding_window": 5},
    "moba": {"block_size": 3, "selected_blocks": 3},
    "dsa": {"selected_tokens": 6},
    "hca": {"block_size": 3, "sliding_window": 5},
    "csa": {"block_size": 3, "selected_entries": 3, "sliding_window": 5},
    "qsa": {"block_size": 4, "selected_tokens": 8},
}
TOLERANCE = 1e-11
TIME = 18
RUNS = [5, 6, 7]


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_a_number_used_twice_is_two_documents(name):
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, TIME)
    twice, once = (
        jnp.asarray(np.repeat(numbers, RUNS)[None].repeat(2, 0), jnp.int32)
        for numbers in ([4, 1, 4], [1, 2, 3])
    )
    for function in (row.function, row.reference):
        got, wanted = (
            function(*inputs, segment_ids=ids, **row.options)[0] for ids in (twice, once)
        )
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_the_oracle_of_bfloat16_rounds_once(name):
    """It adds up in the accumulator's type, so that it may judge what does too."""
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, TIME, dtype=jnp.bfloat16)
    got, _ = row.reference(*inputs, **row.options)
    wanted, _ = row.reference(*(x.astype(jnp.float32) for x in inputs), **row.options)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))


@pytest.mark.slow
def test_the_oracle_of_deepseek_sparse_attention_knows_documents_in_a_cache():
    with enable_x64(True):
        inputs = draw_inputs(mixer("dsa"), TIME, dtype=jnp.float64)
        ids = jnp.asarray(np.repeat([1, 2, 3], RUNS)[None].repeat(2, 0), jnp.int32)
        caches = [IndexedCache.empty(2, 2, 16, 8, 16, TIME, jnp.float64)] * 2
        functions = deepseek_sparse_attention, deepseek_sparse_attention_reference
        for part in (slice(0, 8), slice(8, 13), slice(13, TIME)):
            outputs = []
            for number, function in enumerate(functions):
                out, caches[number] = function(
                    *(x[:, part] for x in inputs),
                    selected_tokens=4,
                    segment_ids=ids[:, part],
                    initial_state=caches[number],
                )
                outputs.append(out)
            np.testing.assert_allclose(*outputs, atol=TOLERANCE)
            np.testing.assert_array_equal(caches[0].length, caches[1].length)
