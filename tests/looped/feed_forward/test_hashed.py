"""Mixtures whose experts follow from the token: every way of running them gives the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.language.load import parts_of
from toolkit.language.losses import loss_and_bias
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    load_model,
    parameter_count,
    prefill,
    save_model,
)

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
MOE = {"experts": 300, "chosen": 3, "hidden": 6, "scores": "sigmoid", "choice_bias": True}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)))


@pytest.mark.slow
def test_a_table_names_the_experts(tmp_path):
    config = LoopedConfig.tiny(
        "full full", loops=2, width=16, heads=2, feed_forwards="hash_moe moe", options={"moe": MOE}
    )
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    graph, params, kept = parts_of(model)
    assert kept is not None
    assert parameter_count(config) == sum(array.size for array in jax.tree.leaves(params))
    table = model.blocks[0].feed_forward.router.table
    wanted, (hashed, _) = model.with_routing(TOKENS)
    loads = np.bincount(np.asarray(table[...])[TOKENS].ravel(), minlength=300)
    np.testing.assert_array_equal(hashed.loads[0].sum(0), loads)
    # Numbers beyond 256 would be rounded in bfloat16.
    save_model(model, tmp_path / "model", dtype="bfloat16")
    again: Any = load_model(tmp_path / "model")
    np.testing.assert_array_equal(again.blocks[0].feed_forward.router.table[...], table[...])
    logits, cache = prefill(model, TOKENS[:, :6], 9)
    for token in TOKENS[:, 6:].T:
        logits, cache = decode_step(model, token, cache)
    np.testing.assert_allclose(logits, model.head(wanted)[:, -1], **CLOSE)
    # A step moves the biases of choices and leaves the table.
    how: dict[str, Any] = {"bias_rate": 1e-3, "balance": 0.0, "router_z": 0.0}
    _, moved = loss_and_bias(graph, params, kept, (TOKENS[:, :-1], TOKENS[:, 1:]), **how)
    other = nnx.merge(graph, params, moved)
    np.testing.assert_array_equal(other.blocks[0].feed_forward.router.table[...], table[...])
    assert (other.blocks[1].feed_forward.router.choice_bias[...] != 0).all()
    other.blocks[0].feed_forward.router.table[...] = jnp.roll(table[...], 1, axis=0)
    assert np.abs(other.with_routing(TOKENS)[0] - wanted).max() > 1e-3
    with pytest.raises(ValueError, match="called without tokens; call the model"):
        model.blocks[0](jnp.zeros((1, 3, 16)))
