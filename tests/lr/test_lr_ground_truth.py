"""Where the best schedule is known: how close the searches come; and the values of the theory."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.lab.lr.small_problems import problem as known_problem
from toolkit.lr import (
    NoisyQuadratic,
    ProbeThenDecay,
    ask,
    init,
    last_iterate_bound,
    refined_schedule,
    shape_rates,
    tell,
)
from toolkit.lr.fits.peak import PeakRate, peak_at

TABLE = 6e-3  # three digits, of which the last is rounded
STEPS = 1000
LR_RANGE = (0.02, 1.99)  # beyond 2 a constant rate is not stable
OPTIMUM = {
    (10, None): 0.07850,
    (10, 50): 0.07862,
    (10, 10): 0.08095,
    (100, None): 0.01436,
    (100, 50): 0.01441,
    (100, 10): 0.01528,
}
CHARGED = {10: 1.3, 100: 1.5}  # the search, a tenth, counted


@cache
def problem(batch):
    return NoisyQuadratic.harmonic(batch)


def run(quadratic, searcher):
    """The loss that a search ends at where losses are their own expectation."""
    controller, moment = init(searcher), quadratic.start
    with np.errstate(over="ignore", invalid="ignore"):
        while (request := ask(searcher, controller)) is not None:
            runs = [quadratic.advance(moment, row) for row in request.rates.astype(np.float64)]
            losses = [losses for _, losses in runs]
            if request.validate_every:
                losses = [[quadratic.loss(end)] for end, _ in runs]
            checked = {"validation": losses[0][-1]} if request.is_checked else {}
            controller, is_kept = tell(searcher, controller, request, losses, **checked)
            moment = runs[0][0] if is_kept else moment
    return quadratic.loss(moment), controller


@pytest.mark.parametrize(
    ("batch", "pieces"),
    [pytest.param(*x, marks=[pytest.mark.nightly] if x[1] == 50 else []) for x in OPTIMUM],
)
def test_the_global_optimum(batch, pieces):
    quadratic = problem(batch)
    rates = quadratic.best_rates(STEPS, 1.95, pieces=pieces, iterations=50)
    assert quadratic.final_loss(rates) == pytest.approx(OPTIMUM[batch, pieces], rel=TABLE)
    assert rates.max() <= 1.95 * (1 + 1e-9)
    if pieces is None:  # at the bound for a third or two thirds of the run, then smoothly down
        at_bound = (rates > 1.94).mean()
        assert abs(at_bound - {10: 0.35, 100: 0.65}[batch]) < 0.1
        assert rates[-1] < 0.08


def test_in_one_dimension_the_optimum_is_greed():
    one = NoisyQuadratic([0.7], [0.3], [2.0])
    best = one.final_loss(one.best_rates(50, 2.0))
    assert best == pytest.approx(one.final_loss(one.greedy_rates(50)), rel=1e-6)


@pytest.mark.parametrize("batch", [10, 100])
def test_a_tenth_of_the_budget_pays_for_the_search(batch):
    searcher = ProbeThenDecay(
        LR_RANGE, STEPS, extensions=0, search_fraction=0.1, validation_batches=1
    )
    loss, controller = run(problem(batch), searcher)
    assert STEPS - 1 <= controller.ledger.spent <= STEPS
    watching = 20 / 3  # validation losses along the run
    assert controller.ledger.kept_steps >= 0.9 * STEPS - watching
    assert loss <= CHARGED[batch] * OPTIMUM[batch, None]


BOUND = {
    "linear": (0.06343, 0.0314),
    "cosine": (0.06526, 0.0308),
    "wsd": (0.06871, 0.0162),
    "constant": (0.0921, 0.0109),
}


@pytest.mark.parametrize("shape", BOUND)
def test_the_bound_of_convex_problems(shape):
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda peak: last_iterate_bound(peak * shape_rates(shape, STEPS)),
        bounds=(1e-3, 1.0),
        method="bounded",
        options={"xatol": 1e-5},
    )
    known, peak = BOUND[shape]
    assert found.fun == pytest.approx(known, rel=TABLE)
    assert found.x == pytest.approx(peak, abs=5e-4)


def test_linear_decay_is_almost_the_best_for_the_bound():
    from scipy.optimize import minimize

    @jax.jit
    @jax.value_and_grad
    def bound(log_rates):
        rates = jnp.exp(log_rates)
        left = jnp.cumsum(rates[::-1])[::-1]
        energy = jnp.cumsum(rates[::-1] ** 2)[::-1]
        last = rates[:-1] / (left[1:] * left[:-1]) * energy[:-1]
        return (1 + energy[0]) / (2 * left[0]) + last.sum() / 2

    with enable_x64(True):
        linear = np.log(shape_rates("linear", STEPS) / np.sqrt(STEPS))
        assert float(bound(linear)[0]) == pytest.approx(last_iterate_bound(np.exp(linear)))
        found = minimize(bound, linear, jac=True, method="L-BFGS-B", options={"maxiter": 300})
    assert found.fun == pytest.approx(0.06332, rel=TABLE)
    assert last_iterate_bound(np.exp(found.x)) == pytest.approx(found.fun, rel=1e-9)


def test_the_refined_schedule_is_best_for_its_norms():
    norms = np.linspace(1.0, 0.4, STEPS) + 2 * np.exp(-np.arange(STEPS) / 30)
    refined = np.asarray(jax.vmap(refined_schedule(norms, 1.0))(np.arange(STEPS)))

    def best(shape):
        rates = shape[: STEPS - 1]  # the last rate of a refined schedule is zero
        peaks = np.geomspace(1e-3, 1.0, 200)
        return min(last_iterate_bound(peak * rates, norms[: STEPS - 1]) for peak in peaks)

    others = {name: best(shape_rates(name, STEPS)) for name in ("linear", "cosine", "wsd")}
    assert best(refined) < min(others.values())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="rates"):
        last_iterate_bound([1.0, 0.0])
    with pytest.raises(ValueError, match="pieces"):
        problem(10).best_rates(1000, 1.9, pieces=7)


def test_a_long_run_on_a_noisy_quadratic_wants_a_lower_peak_than_its_probes():
    """The run as planned, and at the peak of the probes themselves."""
    ratios = []
    for name in ("quadratic 10", "quadratic 100", "quadratic 1d"):
        task = known_problem(name)
        for budget in (1000, 2000, 4000):
            searcher = ProbeThenDecay(task.lr_range, budget)
            controller = init(searcher)
            while (request := ask(searcher, controller)).kind == "probe":
                losses = task.run(task.start(), request)[1]
                controller, _ = tell(searcher, controller, request, losses)
            plan, unmoved = controller.plan, PeakRate(0.0, 0)
            with np.errstate(over="ignore", invalid="ignore"):
                lower, higher = (
                    task.quadratic.final_loss(plan / factor)
                    for factor in (1.0, peak_at(len(plan), unmoved, searcher.probe_steps))
                )
            ratios.append(lower / higher)
    assert (np.array(ratios) < 1).sum() == 7
    assert ratios.count(0.0) == 2
