"""Plans compiled for TPUs before they are believed."""

import dataclasses

import pytest

from toolkit.looped import LoopedConfig
from toolkit.planning import Plan, Strategy, cluster, plan, predict
from toolkit.planning.grade.by_compiler import _repaired, verify_plan

SMALL = LoopedConfig(
    vocabulary=2048, width=512, pattern="full full", heads=4, feed_forward=1536,
    residual_gate=False, dtype="bfloat16",
)  # fmt: skip
SIZES = {"batch": 8, "sequence_length": 1024}


def test_repairs_compute_more_anew_and_then_halve_the_parts():
    found, memory = predict(SMALL, "v5e:2x2", Strategy(fsdp=4), **SIZES), []
    strategies = []
    while found is not None:
        memory.append(found.memory.activations + found.memory.working)
        strategies.append((found.strategy.recompute, found.strategy.microbatches))
        found = _repaired(found)
    assert strategies == [("none", 1), ("layer", 1), ("layer", 2)]
    assert memory == sorted(memory, reverse=True)


def test_what_no_tpu_compiler_takes_is_refused():
    found = plan(SMALL, "h100:4", **SIZES)
    with pytest.raises(ValueError, match="want a TPU topology"):
        verify_plan(found)


@pytest.mark.nightly
def test_plans_are_compiled_and_repaired():
    pytest.importorskip("libtpu")
    found = plan(SMALL, "v5e:2x2", **SIZES)
    assert "as planned" in verify_plan(found)
    chip = dataclasses.replace(found.best.cluster.chip, memory_bytes=2.2e8)
    tight = dataclasses.replace(cluster("v5e:2x2"), chip=chip)
    moved = dataclasses.replace(found.best, cluster=tight)
    assert "repaired" in verify_plan(Plan(moved, (), found.considered, found.fitting))
