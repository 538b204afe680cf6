"""Plans for the devices there are, from rates measured here."""

import jax
import pytest

from toolkit.looped import LoopedConfig
from toolkit.planning import Strategy, cluster, plan, predict

CONFIG = LoopedConfig.tiny("full full", width=64, residual_gate=False)


@pytest.mark.slow
def test_a_plan_for_the_devices_here_counts_on_what_was_measured():
    where = cluster("here")
    assert (where.chips, where.is_measured) == (len(jax.devices()), True)
    assert where.chip.links[0].bytes_per_second > 0
    strategy = Strategy(fsdp=where.chips)
    found = predict(CONFIG, "here", strategy, batch=where.chips, sequence_length=16)
    assert found.constants.matmul == found.constants.link == 1.0
    assert found.step_seconds > 0
    assert min(found.seconds.values()) >= 0
    best = plan(CONFIG, "here", batch=where.chips, sequence_length=16).best
    assert best.step_seconds <= found.step_seconds
