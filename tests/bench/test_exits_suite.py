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
