"""What the simulator predicts of the real engine, in processor time, calibrated on other traces."""

import json
import time

import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.serving import (
    Engine,
    Instance,
    Scheduler,
    TracedRequest,
    fit_cost,
    replay,
    simulate,
    vary,
)

SLOTS, PAGE = 8, 32
MEASURES = ("first_token", "per_token")
WANTED = 0.1  # median error over the traces


def trace(count, rate, seed):
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, count)).tolist()
    sizes = zip(draw.integers(8, 100, count), draw.integers(8, 60, count), strict=True)
    return [TracedRequest(a, int(p), int(o)) for a, (p, o) in zip(arrivals, sizes, strict=True)]


@pytest.mark.nightly
def test_the_engine_is_predicted_within_a_tenth(capsys):
    """Calibration and evaluation take turns, as a shared machine's speed drifts."""
    model = LoopedLM(LoopedConfig.tiny("full full", 2, width=128, heads=4), rngs=nnx.Rngs(0))
    engine = Engine(model, slots=SLOTS, capacity=256, page=PAGE, clock=time.process_time)
    engine.warm()
    errors: dict[str, list[float]] = {name: [] for name in (*MEASURES, "throughput")}
    rate = replay(engine, trace(40, 1e3, seed=0), skips_idle=True).throughput / 34
    for seed in range(1, 13):
        load = (0.3, 0.6, 0.8)[seed % 3]
        around = [replay(engine, trace(20, 1e3, seed=100 + seed), skips_idle=True)]
        wanted = trace(60, load * rate, seed)
        real = replay(engine, wanted, skips_idle=True)
        around.append(replay(engine, trace(20, 1e3, seed=200 + seed), skips_idle=True))
        turns = [turn for run in around for turn in run.turns]
        cost = vary(fit_cost(turns), turns, seed)
        found = simulate(wanted, [Instance(Scheduler(PAGE), cost, SLOTS, page=PAGE)])
        for name in MEASURES:
            both = [np.nanmedian([getattr(r, name) for r in run.requests]) for run in (found, real)]
            errors[name].append(both[0] / both[1] - 1)
        errors["throughput"].append(found.throughput / real.throughput - 1)
    medians = {name: float(np.median(np.abs(x))) for name, x in errors.items()}
    with capsys.disabled():
        print(json.dumps({name: [round(e, 3) for e in x] for name, x in errors.items()}), medians)
    assert all(error < WANTED for error in medians.values())
