"""Plans compiled for TPUs before they are believed."""

import dataclasses

import pytest

from toolkit.looped import LoopedConfig
from toolkit.planning import Plan, Strategy, cluster, plan, predict
from toolkit.planning.grade.by_compiler import _repaired, needed_bytes, verify_plan

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


def test_a_program_too_large_is_a_figure_and_no_error():
    hbm = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    assert needed_bytes(f"{hbm}temporaries (23.30G) exceeds available HBM (15.75G).") == round(
        23.3 * 2**30
    )
    older = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.9G of 15.75G hbm."
    assert needed_bytes(older) == round(17.9 * 2**30)
    with pytest.raises(RuntimeError, match="does not compile it: INTERNAL: Used 1G"):
        needed_bytes("INTERNAL: Used 1G")


@pytest.mark.nightly
def test_plans_are_compiled_and_repaired():
    pytest.importorskip("libtpu")
    found = plan(SMALL, "v5e:2x2", **SIZES)
    assert "as planned" in verify_plan(found)
    chip = dataclasses.replace(found.best.cluster.chip, memory_bytes=2.2e8)
    tight = dataclasses.replace(cluster("v5e:2x2"), chip=chip)
    moved = dataclasses.replace(found.best, cluster=tight)
    assert "repaired" in verify_plan(Plan(moved, (), found.considered, found.fitting))
