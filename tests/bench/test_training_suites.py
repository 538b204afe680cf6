"""Suites of whole runs at a tiny size: utilisation and checkpoints."""

import dataclasses

import pytest
from flax import nnx

from toolkit.bench.runs import checkpoints
from toolkit.bench.runs.utilisation import model_flops, utilisation_case
from toolkit.bench.training import plain_parameters
from toolkit.looped import LoopedConfig, LoopedLM

CONFIG = LoopedConfig.tiny("full", loops=2, width=16, heads=2, vocabulary=32, remat=True)


def results_of(case):
    return {name: call() for name, call in case.contenders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_a_looped_step_is_that_of_plain_jax(dtype):
    case = utilisation_case(dataclasses.replace(CONFIG, dtype=dtype), 2, 16, "small")
    for _ in range(2):
        case.check(results_of(case))


def test_model_flops_are_those_of_matrices_and_scores():
    model = LoopedLM(CONFIG, rngs=nnx.Rngs(0))
    batch, time, width, hidden = 2, 8, 16, CONFIG.feed_forward_size
    matrices = 2 * (4 * width * width + 3 * width * hidden) + 32 * width
    found = model_flops(CONFIG, plain_parameters(model), batch, time)
    scores = found - 6 * batch * time * matrices
    assert 0 < scores <= 3 * 2 * 4 * batch * time * time * width


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [checkpoints.resume_case, checkpoints.begin_case, checkpoints.save_case]
)
def test_checkpoints_are_read_and_written(make):
    sizes = (2, 8) if make is checkpoints.resume_case else (2, 8, 2)
    case = make(*sizes, "small")
    for _ in range(2):
        case.check(results_of(case))
