"""Bytes of a decoding step: the cost model's, for every system, at the sizes it is quoted for."""

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import sparse
from toolkit.attention.sparse.decode.stopping import FIRST, SAMPLES
from toolkit.attention.sparse.decode.tactic import PLACES, TOKENS

CONTEXT, SIZE, SELECTED = 131_072, 128, 2048
WHOLE = 4 * CONTEXT * SIZE  # keys and values in bfloat16
KEY = 2 * SIZE
LOOKED_AT = {  # by one query head, to find where a mass is reached
    "samples": (FIRST + SAMPLES * 9) * KEY,
    "fit": len(PLACES) * TOKENS * KEY + CONTEXT * KEY // 100 + 1,
}


def of_tactic(size):
    """Centroids with their sizes and places."""
    return CONTEXT // size * (KEY + 8)


# settings, the index bytes that a step reads, and how many times less than everything that is
SYSTEMS = {
    "quest": ({}, 4 * CONTEXT * SIZE // 16, 12.8),
    "tactic": ({}, of_tactic(16), 16.8),
    "tactic, 32": ({"cluster_size": 32}, of_tactic(32), 22.9),
    "hata": ({}, 18 * CONTEXT + 4 * SIZE * 128, 19.7),
    "hata, no norms": ({"uses_norms": False}, 16 * CONTEXT + 4 * SIZE * 128, 21.3),
    "pqcache": ({}, 2 * CONTEXT + KEY * 2**6, 51),
    "pqcache, 4 x 8": ({"parts": 4, "bits": 8}, 4 * CONTEXT + KEY * 2**8, 41),
    "oracle": ({}, 2 * CONTEXT * SIZE, 2),
    "window": ({}, 0, 64),
    "random": ({}, 0, 64),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_reads_what_the_cost_model_says(name):
    settings, wanted, times = SYSTEMS[name]
    selector = sparse.SELECTORS[name.split(",")[0]](**settings)
    rows = jax.ShapeDtypeStruct((CONTEXT, SIZE), jnp.bfloat16)
    index = jax.eval_shape(selector.build, rows, rows, jnp.int32(CONTEXT))
    q = jax.ShapeDtypeStruct((1, SIZE), jnp.bfloat16)
    read = int(selector.index_bytes(index, q, jnp.int32(CONTEXT)))
    assert read == pytest.approx(wanted, rel=2e-3)  # new tokens wait for their cluster
    # The model counts what decides; sizes, places and projections come to a few percent.
    assert WHOLE / (read + 4 * SIZE * SELECTED) > 0.95 * times
    tail = int(selector.tail_bytes(index, q, jnp.int32(CONTEXT)))
    means = KEY * CONTEXT // selector.cluster_size if name.startswith("tactic") else 8 * SIZE
    assert tail == pytest.approx(means, rel=2e-3)


@pytest.mark.parametrize("stops_by", LOOKED_AT)
@pytest.mark.parametrize("group_size", [1, 4])
def test_every_query_head_looks_for_its_own_mass(stops_by, group_size):
    tactic = sparse.SELECTORS["tactic"](stops_by=stops_by)
    rows = jax.ShapeDtypeStruct((CONTEXT, SIZE), jnp.bfloat16)
    index = jax.eval_shape(tactic.build, rows, rows, jnp.int32(CONTEXT))
    q = jax.ShapeDtypeStruct((group_size, SIZE), jnp.bfloat16)
    read = int(tactic.estimate_bytes(index, q, jnp.int32(CONTEXT)))
    assert read == pytest.approx(group_size * LOOKED_AT[stops_by], rel=2e-3)
