"""Long sequences, whose chunks of queries meet the keys in stages, against one stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import ForgettingCache, PathCache, draw_inputs, mixer
from toolkit.attention.softmax.rows import CHUNKS_PER_STAGE, ROWS

FLOAT64_TOLERANCE = 1e-11
TIME = 2 * CHUNKS_PER_STAGE * ROWS + 37  # two stages, the last chunk not full


def empty(word, time):
    if word == "fox":
        return ForgettingCache.empty(1, 1, 1, 4, 2, time, jnp.float64)
    return PathCache.empty(1, 1, 4, 2, time, jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fox", "path"])
def test_stages_change_neither_values_nor_gradients(word):
    """What continues an empty cache knows no place when it is compiled, and so has one stage."""
    row = mixer(word)
    with enable_x64(True):
        inputs = draw_inputs(row, TIME, batch=1, heads=1, key=4, value=2, dtype=jnp.float64)
        documents = jnp.searchsorted(jnp.array([700, 1111]), jnp.arange(TIME), side="right")[None]

        def results(documents, cache=None):
            def loss(*inputs):
                out, _ = row.function(*inputs, segment_ids=documents, initial_state=cache)
                return jnp.sum(jnp.sin(out)), out

            return jax.jit(jax.value_and_grad(loss, range(len(inputs)), has_aux=True))(*inputs)

        got, wanted = results(documents), results(documents, empty(word, TIME))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)
        # The control: one document more, at the end of the second stage.
        other, _ = row.function(*inputs, segment_ids=documents.at[:, -20:].add(1))
        assert np.abs(other - got[0][1])[:, -20:].max() > 1e-3
