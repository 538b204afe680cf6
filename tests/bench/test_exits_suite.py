"""The suite of early exits and mixtures of recursions, at a tiny size."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from toolkit.bench import exits
from toolkit.looped import LoopedConfig
from toolkit.measure import read_records

RECORD = Path(__file__).parents[2] / "data/measurements/amd-epyc-2-cores/exits.json"


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


def test_what_the_page_on_serving_says_of_exits():
    values = {record.name: record.value for record in read_records(RECORD)}
    case = "early exits, 4 loops, bytes, B=8 float32 | 2 cores | "
    for rule, rate, bits in ((exits.ALL, 7892, 2.61), ("gate:0.5", 8974, 2.56),
                             ("gate:0.3", 11_327, 2.57)):  # fmt: skip
        assert 8 * exits.WRITTEN / values[case + rule] == pytest.approx(rate, abs=0.5)
        loss = values[f"{case}{rule}, loss of held-out text"]
        assert loss == pytest.approx(bits, abs=5e-3)
    assert values[case + "gate:1"] / values[case + exits.ALL] == pytest.approx(1.29, abs=5e-3)


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
