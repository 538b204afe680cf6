"""The suite of early exits and mixtures of recursions, at a tiny size."""

import jax.numpy as jnp
import pytest

from toolkit.bench import exits
from toolkit.looped import LoopedConfig


@pytest.mark.slow
def test_models_with_routers_are_trained_read_and_compared():
    config = LoopedConfig.tiny("full", 2, width=16, heads=2, coda="full", residual_gate=False)
    case = exits.recursion_case("small", config, steps=2)
    results = {name: call() for name, call in case.contenders.items()}
    case.check(results)
    facts = case.facts()
    assert facts[exits.NO_ROUTER]["loops per token"][0] == 2
    for found in facts.values():
        assert 0 < found["loss of held-out text"][0] < 20
        assert 1 <= found["loops per token"][0] <= 2
    wrong = {**results, "token": (jnp.asarray(results["token"]) + 1) % 256}
    with pytest.raises(ValueError, match="'token' wrote another text"):
        case.check(wrong)


@pytest.mark.nightly
def test_rows_of_a_batch_are_read_by_every_rule():
    config = LoopedConfig.tiny("full", 2, width=16, heads=2, exit_gate=True, residual_gate=False)
    case = exits.exits_case("small", batch=8, config=config, steps=2)
    results = {name: case.contenders[name]() for name in (exits.ALL, exits.RULES[0])}
    case.check(results)
    for found in case.facts().values():
        assert 1 <= found["loops per token"][0] <= found["loops of a step's longest row"][0] <= 2
    with pytest.raises(ValueError, match="wrote another text"):
        case.check({**results, exits.ALL: results[exits.ALL] + 1})
