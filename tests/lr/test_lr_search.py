"""The search on problems small enough to follow: restores are exact, nothing stale, nothing spent
beyond the budget.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.lr import AutoLRS, ProbeThenDecay, Request, TrainState, ask, init, search, tell
from toolkit.lr.running.candidates import CandidateRunner

LR_RANGE = (1e-3, 1.0)
EXACT = 1e-5  # float32

FEATURES = jax.random.normal(jax.random.key(0), (8, 16, 4))
TARGETS = FEATURES @ jnp.array([1.0, -2.0, 0.5, 3.0]) + 0.1
DATA = {"x": FEATURES, "y": TARGETS}
PARAMS = {"w": jnp.zeros(4), "b": jnp.zeros(())}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def request(rate, steps, kind="train", validate_every=0):
    return Request(kind, np.full((1, steps), rate, np.float32), validate_every)


@pytest.fixture(scope="module")
def found():
    return search(loss_fn, PARAMS, DATA, lr_range=LR_RANGE, budget=600)


def test_five_lines(found):
    assert found.ledger.gradient_evaluations == 600
    assert found.ledger.kept_steps == int(found.progress.state.step)
    assert loss_fn(found.params, jax.tree.map(lambda x: x[0], DATA)) < 0.1
    optimizer, params = optax.adamw(found.schedule), PARAMS
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for index in range(found.ledger.kept_steps):
        batch = {name: rows[index % 8] for name, rows in DATA.items()}
        params, state = step(params, state, batch)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), params, found.params)


@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
def test_training_is_bit_identical_to_a_run_without_the_search(evaluation):
    optimizer = optax.adamw(1.0)
    before = jax.tree.map(np.array, PARAMS)
    found = search(
        loss_fn,
        PARAMS,
        DATA,
        lr_range=LR_RANGE,
        budget=400,
        evaluation=evaluation,
    )
    assert_same_bits(before, PARAMS)
    runner = CandidateRunner(loss_fn, optimizer, DATA)
    rates = np.asarray(jax.vmap(found.schedule)(np.arange(found.ledger.kept_steps)))[None]
    state, _ = runner.run(TrainState.create(PARAMS, optimizer), Request("train", rates))
    assert_same_bits(state, found.progress.state)


def test_candidates_together_are_candidates_one_by_one():
    losses = {}
    for evaluation in ("loop", "vmap"):
        found = search(loss_fn, PARAMS, DATA, lr_range=LR_RANGE, budget=200, evaluation=evaluation)
        losses[evaluation] = found.table
    np.testing.assert_allclose(losses["loop"]["rate"], losses["vmap"]["rate"])
    np.testing.assert_allclose(
        losses["loop"]["forecast"][:10], losses["vmap"]["forecast"][:10], rtol=1e-3
    )


def test_no_first_step_at_a_stale_rate():
    """On w^2 / 2 with plain steps the first update alone tells at which rate it was made."""
    runner = CandidateRunner(lambda w, batch: 0.5 * w**2, optax.sgd(1.0), jnp.zeros(1))
    state = TrainState.create(jnp.float32(1.0), optax.sgd(1.0))
    state, _ = runner.run(state, request(0.9, 1))
    for rate in (0.5, 0.01, 0.25):
        _, losses = runner.run(state, request(rate, 3, "probe"))
        expected = 0.5 * 0.1**2 * (1 - rate) ** (2 * np.arange(3))
        np.testing.assert_allclose(losses[0], expected, rtol=EXACT)


def test_candidates_and_training_see_the_same_batches():
    seen = CandidateRunner(
        lambda w, batch: 0.0 * w + batch, optax.sgd(1.0), lambda step: 1.0 * step
    )
    state = TrainState(jnp.int32(700), jnp.float32(0.0), optax.sgd(1.0).init(jnp.float32(0.0)))
    rates = np.ones((3, 300), np.float32)
    together = seen.run_together(state, Request("probe", rates))
    after, alone = seen.run(state, request(0.1, 300))
    np.testing.assert_array_equal(together, np.broadcast_to(np.arange(700.0, 1000.0), (3, 300)))
    np.testing.assert_array_equal(alone, together[:1])
    assert after.step == 1000


@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
def test_divergence_in_one_candidate_touches_no_other(evaluation):
    found = search(
        loss_fn,
        PARAMS,
        DATA,
        lr_range=(1e-3, 1e6),
        budget=400,
        searcher=AutoLRS.scaled,
        evaluation=evaluation,
        optimizer=optax.sgd(1.0),
    )
    first = found.table["stage"] == 0
    assert np.isinf(found.table["forecast"][first]).any()
    assert np.isfinite(found.table["forecast"][first]).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))
    assert found.ledger.gradient_evaluations == 400


def test_divergence_in_the_last_update_is_noticed():
    runner = CandidateRunner(lambda w, batch: w, optax.sgd(1.0), jnp.zeros(1))
    state = TrainState.create(jnp.float32(1.0), optax.sgd(1.0))
    _, losses = runner.run(state, request(np.inf, 1, "probe"))
    assert np.isnan(losses).all()


@pytest.mark.parametrize("cut", [2, 6])
@pytest.mark.parametrize("proposals", ["sequential", "together"])
def test_a_stopped_search_resumes_bit_for_bit(cut, proposals):
    options = {
        "lr_range": LR_RANGE,
        "budget": 300,
        "searcher": partial(AutoLRS.scaled, proposals=proposals, candidates=4),
    }
    whole = search(loss_fn, PARAMS, DATA, **options)
    asked = []

    def stop(progress, request, losses):
        asked.append(request)
        return len(asked) == cut

    part = search(loss_fn, PARAMS, DATA, callback=stop, **options)
    saved = jax.tree.map(np.array, part.progress)  # as a checkpoint would hold it
    resumed = search(loss_fn, PARAMS, DATA, start=saved, **options)
    without_time = jax.tree.map(np.asarray, (whole.progress.state, whole.table, whole.ledger))
    again = jax.tree.map(np.asarray, (resumed.progress.state, resumed.table, resumed.ledger))
    assert_same_bits(without_time[:2], again[:2])
    assert whole.ledger.gradient_evaluations == resumed.ledger.gradient_evaluations


def test_groups_of_parameters_keep_their_ratio():
    optimizer = optax.multi_transform(
        {"fast": optax.sgd(1.0), "slow": optax.sgd(0.01)}, {"w": "fast", "b": "slow"}
    )
    runner = CandidateRunner(lambda p, batch: p["w"].sum() + p["b"], optimizer, jnp.zeros(1))
    state = TrainState.create(PARAMS, optimizer)
    state, _ = runner.run(state, request(0.5, 1))
    np.testing.assert_allclose(state.params["w"], -0.5 * np.ones(4), rtol=EXACT)
    np.testing.assert_allclose(state.params["b"], -0.005, rtol=EXACT)


@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
def test_validation_losses_come_at_their_steps(evaluation):
    searcher = partial(AutoLRS.scaled, first_stage=100, longest_stage=100, validation_points=5)
    found = search(
        loss_fn,
        PARAMS,
        DATA,
        lr_range=LR_RANGE,
        budget=400,
        searcher=searcher,
        validation=lambda params: jnp.sum(params["w"] ** 2),
        evaluation=evaluation,
    )
    assert found.ledger.forward_evaluations >= 50
    runner = CandidateRunner(
        lambda w, batch: 0.5 * w**2, optax.sgd(1.0), jnp.zeros(1), validation=lambda w: w
    )
    state = TrainState.create(jnp.float32(1.0), optax.sgd(1.0))
    _, losses = runner.run(state, request(0.5, 11, "probe", 2))
    np.testing.assert_allclose(losses[0], 0.25 ** np.arange(1, 6), rtol=EXACT)


def test_compiles_once_however_long_the_request():
    traces = []

    def counted(w, batch):
        traces.append(1)
        return 0.5 * w**2

    runner = CandidateRunner(counted, optax.sgd(1.0), jnp.zeros(1))
    state = TrainState.create(jnp.float32(1.0), optax.sgd(1.0))
    state, _ = runner.run(state, request(0.5, 2))
    count = len(traces)
    for steps in (1, 7, 300):
        state, _ = runner.run(state, request(0.1, steps))
    assert len(traces) == count


@pytest.mark.parametrize("searcher", [AutoLRS.scaled, ProbeThenDecay])
def test_a_second_search_knows_nothing_of_the_first(searcher):
    options = {"lr_range": LR_RANGE, "budget": 400, "searcher": searcher}
    first = search(loss_fn, PARAMS, DATA, **options)
    search(loss_fn, PARAMS, DATA, **{**options, "lr_range": (1e-2, 10.0)})
    again = search(loss_fn, PARAMS, DATA, **options)
    assert_same_bits(first.progress.state, again.progress.state)
    assert_same_bits(first.table, again.table)


def test_the_last_step_is_training_at_a_rate_near_zero():
    """Published, a run may end inside a probe at a rate that never came down."""
    found = search(loss_fn, PARAMS, DATA, lr_range=LR_RANGE, budget=1000)
    rates = found.progress.controller.rates
    assert found.ledger.gradient_evaluations == 1000
    assert found.ledger.kept_steps == len(rates) == int(found.progress.state.step)
    assert rates[-1] < 0.01 * rates.max()
    assert set(found.table["stage"]) == {0}


def test_nothing_kept_still_gives_a_usable_schedule():
    found = search(
        lambda w, batch: w * jnp.nan, jnp.float32(1.0), jnp.zeros(1), lr_range=LR_RANGE, budget=300
    )
    assert float(found.schedule(0)) == np.float32(LR_RANGE[0])
    assert float(found.params) == 1.0


def test_a_loop_of_ones_own_finds_the_best_constant_rate():
    """Expected loss of the noisy quadratic, where the best rate of a stage is known."""
    curvature, noise = 0.7, 0.3
    searcher = AutoLRS(
        (1e-3, 1.9),
        2000,
        first_stage=100,
        longest_stage=100,
        proposals="together",
        forecast="robust",
        candidates=40,
        probe_ratio=4,
    )

    def train(second_moment, rates):
        losses = []
        for rate in rates.astype(np.float64):
            losses.append(curvature * second_moment / 2)
            second_moment = (1 - rate * curvature) ** 2 * second_moment + rate**2 * noise
        return second_moment, losses

    controller, second_moment = init(searcher), 2.0
    request = ask(searcher, controller)
    runs = [train(second_moment, rates) for rates in request.rates]
    controller, is_kept = tell(searcher, controller, request, [losses for _, losses in runs])
    assert not is_kept
    ends = [train(second_moment, np.full(100, rate))[0] for rate in request.rates[:, 0]]
    assert ask(searcher, controller).rates[0, 0] == request.rates[np.argmin(ends), 0]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="evaluation"):
        search(loss_fn, PARAMS, DATA, evaluation="threads")


def test_a_result_is_printed_in_a_few_lines():
    data = jnp.linspace(0, 1, 4096).reshape(8, 512)
    found = search(lambda w, batch: jnp.mean((w - batch) ** 2), jnp.zeros(512), data, budget=300)
    lines = repr(found).splitlines()
    assert lines[0] == f"SearchResult: {found.reason}"
    assert len(lines) == 4
    assert max(map(len, lines)) < 200
    assert f"{found.ledger.kept_steps} steps" in lines[1]
