"""Methods on a problem that takes no time: budgets, pairs, lanes, resuming."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.experiments import load_experiment, run_experiment
from toolkit.experiments.lr import experiment, methods
from toolkit.experiments.lr.evaluation import EVALUATION, MILLISECONDS
from toolkit.experiments.lr.methods import (
    BY_RATE,
    FORWARD_COST,
    LR_RANGE,
    METHODS,
    ORACLE_GRID,
    PEAK,
    SPENT,
    TEST,
    VALIDATION_BATCHES,
)
from toolkit.experiments.lr.sources import Workload
from toolkit.experiments.lr.training import LaneTrainer
from toolkit.lr import contender, search, shape_rates
from toolkit.lr.running.candidates import CandidateRunner

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.nightly

TOLERANCE = 1e-5  # of float32 along some 100 steps
BUDGET = 300
ROUNDING = 30  # steps that a plan in whole steps may leave, and never fewer than none
SEEDS = np.arange(2)


def toy() -> Workload:
    """Least squares in three dimensions."""
    rows = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
    noise = 0.3 * np.random.default_rng(1).normal(size=96)
    answers = (rows @ np.array([1.0, -2.0, 0.5]) + noise).astype(np.float32)
    parts = [(jnp.asarray(rows[i::3]), jnp.asarray(answers[i::3])) for i in range(3)]

    def sample(data, step, seed):
        key = jax.random.fold_in(jax.random.key(seed), step)
        picked = jax.random.randint(key, (4,), 0, len(data[0]))
        return data[0][picked], data[1][picked]

    return Workload(
        "toy", "toy", 4, lambda key: jax.random.normal(key, (3,)),
        lambda params, batch: jnp.mean((batch[0] @ params - batch[1]) ** 2),
        parts[0], sample, parts[1], parts[2],
    )  # fmt: skip


@pytest.fixture
def problem(monkeypatch):
    monkeypatch.setitem(EVALUATION, "toy", toy)
    monkeypatch.setitem(MILLISECONDS, "toy", 1.0)
    return experiment.workload("toy")


def run(name, problem, seeds=SEEDS, budget=BUDGET):
    return METHODS[name].run(problem, budget, seeds, lambda share: None)


SEARCHES = [name for name, method in METHODS.items() if method.kind == "search"]
OTHERS = ["Prodigy + cosine", "Schedule-Free, fixed", "linear, fixed rate"]


@pytest.mark.parametrize("name", SEARCHES + OTHERS)
def test_the_budget_is_kept_to_the_step(problem, name, monkeypatch):
    made = []

    def count(owner, name, rates_of):
        original = getattr(owner, name)

        def counted(self, *arguments, **options):
            made.append(rates_of(arguments).size)
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(LaneTrainer, "train", lambda arguments: arguments[2])
    for name_of_run in ("run", "run_together"):
        count(CandidateRunner, name_of_run, lambda arguments: arguments[1].rates)
    outcomes = run(name, problem)
    spent = [outcome[SPENT] for outcome in outcomes]
    assert all(BUDGET - ROUNDING <= each <= BUDGET + TOLERANCE for each in spent)
    forward = sum(spent) - sum(made)
    trials = {"random search": 4, "random probes": 8, "successive halving": 14}.get(name, 0)
    if name.startswith("sweep of "):
        trials = int(name.split()[2].strip(","))
    expected = len(SEEDS) * trials * VALIDATION_BATCHES * FORWARD_COST
    assert forward == pytest.approx(expected, abs=TOLERANCE)
    is_wider = name.startswith(("probe then decay", "sweep of 9"))
    if PEAK in outcomes[0] and not is_wider:
        assert all(LR_RANGE[0] * 0.9 <= outcome[PEAK] for outcome in outcomes)


def test_an_oracle_takes_one_rate_for_all_seeds_by_validation_losses(problem):
    outcomes = run("linear (oracle)", problem)
    assert len({outcome[PEAK] for outcome in outcomes}) == 1
    best = ORACLE_GRID.index(outcomes[0][PEAK])
    assert all(outcome[TEST] == outcome[BY_RATE][best] for outcome in outcomes)
    assert all(outcome[SPENT] == BUDGET for outcome in outcomes)


def test_a_run_is_the_same_alone_and_beside_others(problem):
    together = [outcome[TEST] for outcome in run("linear, fixed rate", problem)]
    alone = [run("linear, fixed rate", problem, np.array([seed]))[0][TEST] for seed in SEEDS]
    assert together == pytest.approx(alone, rel=TOLERANCE)
    assert together[0] != together[1]


def test_rates_as_data_are_the_schedule_of_the_contender(problem):
    rate, steps = 0.05, 120
    rival = contender("linear", steps, rate)
    theirs = LaneTrainer(problem, rival.transformation)
    ours = LaneTrainer(problem, optax.adam(1.0))
    ones = np.ones((1, 1, steps), np.float32)
    table = ones * rate * shape_rates("linear", steps, round(0.05 * steps))
    ends = [
        trainer.evaluate(trainer.train(trainer.init([3]), [3], rates)[0], problem.test)[0, 0]
        for trainer, rates in ((theirs, ones), (ours, table.astype(np.float32)))
    ]
    assert ends[0] == pytest.approx(ends[1], rel=TOLERANCE)


def test_training_in_pieces_is_training(problem):
    trainer = LaneTrainer(problem, optax.adam(1.0))
    rates = np.full((1, 2, 50), 0.1, np.float32)
    whole, losses = trainer.train(trainer.init([0], 2), [0], rates)
    first, early = trainer.train(trainer.init([0], 2), [0], rates[..., :20])
    second, late = trainer.train(first, [0], rates[..., 20:])
    np.testing.assert_array_equal(whole.params, second.params)
    np.testing.assert_array_equal(losses, np.concatenate([early, late], -1))
    assert trainer.evaluations == 200


def test_it_is_the_search_that_users_call(problem):
    seed = 1
    result = search(
        problem.loss, problem.init(jax.random.key(seed)),
        lambda step: problem.sample(problem.data, step, jnp.uint32(seed)),
        budget=BUDGET, optimizer=optax.adam(1.0),
    )  # fmt: skip
    [found] = run("probe then decay", problem, np.array([seed]))
    assert found[PEAK] == pytest.approx(result.progress.controller.rates.max(), rel=1e-3)
    theirs = float(problem.loss(result.params, problem.test))
    assert found[TEST] == pytest.approx(theirs, rel=1e-3)


def test_what_diverges_is_worth_its_start(problem, monkeypatch):
    monkeypatch.setattr(methods, "DEFAULT_RATE", 1e30)
    outcomes = run("linear, fixed rate", problem)
    start = problem.loss(problem.init(jax.random.key(0)), problem.test)
    assert [outcome[TEST] for outcome in outcomes] == pytest.approx([float(start)] * 2)


def test_a_killed_experiment_goes_on_to_the_same_numbers(problem, tmp_path, monkeypatch, capsys):
    names = ("linear, fixed rate", "random search")
    settings = [experiment.MethodSetting("toy", BUDGET, name) for name in names]
    small = dataclasses.replace(
        load_experiment("lr"), settings={setting.label: setting for setting in settings}
    )
    calls, fail = [], [True]
    randomly = METHODS["random search"]

    def killed_once(*arguments):
        calls.append(arguments[1])
        if fail.pop() if fail else False:
            raise KeyboardInterrupt
        return randomly.run(*arguments)

    monkeypatch.setitem(METHODS, randomly.name, dataclasses.replace(randomly, run=killed_once))
    assert not run_experiment(small, tmp_path, seeds=3)
    assert run_experiment(small, tmp_path, seeds=3)
    assert len(calls) == 2  # the second trained all seeds in one program
    killed = (tmp_path / "runs.jsonl").read_text()
    experiment._blocks.clear()
    assert run_experiment(small, tmp_path / "whole", seeds=3)

    def numbers(text):
        return [json.loads(line)["outcome"] for line in text.splitlines()]

    assert numbers(killed) == numbers((tmp_path / "whole" / "runs.jsonl").read_text())
    assert "not shown" in capsys.readouterr().out
