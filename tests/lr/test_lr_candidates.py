"""The three ways to run candidates: the same losses, nothing left behind."""

import time
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.lr import MODES, ProbeThenDecay, Request, TrainState, ask, init, search, tell
from toolkit.lr.running.batches import STEPS_PER_CALL
from toolkit.lr.running.candidates import CandidateRunner

SAME = 2e-4  # relative, float32 over 24 steps
OVERHEAD = 0.01  # of a step
ROUNDS = 20
LR_RANGE = (1e-3, 1.0)

FEATURES = jax.random.normal(jax.random.key(0), (8, 16, 4))
DATA = {"x": FEATURES, "y": FEATURES @ jnp.array([1.0, -2.0, 0.5, 3.0])}
PARAMS = {"w": jnp.zeros(4), "b": jnp.zeros(())}
OPTIMIZER = optax.adam(1.0)
RATES = np.geomspace(1e-2, 1.0, 5)[:, None] * np.linspace(1, 0.1, 24)
PROBE = Request("probe", RATES.astype(np.float32))


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def runner():
    return CandidateRunner(loss_fn, OPTIMIZER, DATA, lambda params: jnp.sum(params["w"] ** 2))


@pytest.fixture(scope="module")
def state():
    return TrainState(jnp.int32(3), PARAMS, OPTIMIZER.init(PARAMS))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("validate_every", [0, 12])
def test_every_mode_gives_the_same_losses(runner, state, mode, validate_every):
    request = Request("probe", PROBE.rates, validate_every)
    expected = runner.run_together(state, request, "loop")
    losses = runner.run_together(state, request, mode)
    assert losses.shape == (5, request.points)
    np.testing.assert_allclose(losses, expected, rtol=SAME)


def test_a_snapshot_is_the_arrays_themselves(runner, state):
    before = jax.tree.map(np.array, state)
    for mode in MODES:
        runner.run_together(state, PROBE, mode)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    train = Request("train", PROBE.rates[:1])
    after, losses = runner.run(state, train)
    fresh, fresh_losses = CandidateRunner(loss_fn, OPTIMIZER, DATA).run(state, train)
    jax.tree.map(np.testing.assert_array_equal, after, fresh)
    np.testing.assert_array_equal(losses, fresh_losses)


def test_modes_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="evaluation"):
        search(loss_fn, PARAMS, DATA, evaluation="threads")


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_one_program_for_every_length(state, mode):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    runner = CandidateRunner(counted, OPTIMIZER, DATA)
    runner.run_together(state, PROBE, mode)
    count = len(traces)
    for steps in (1, 7, STEPS_PER_CALL + 3):
        rates = np.full((5, steps), 1e-2, np.float32)
        runner.run_together(state, Request("probe", rates), mode)
    assert len(traces) == count


@pytest.mark.timed
def test_the_driver_costs_little_beside_the_steps():
    """The quickest of each, by turns; a busy moment may pass."""
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.normal(size=(16, 64, 64)), jnp.float32)
    classes = jnp.asarray(generator.integers(0, 10, size=(16, 64)))
    sizes = (64, 128, 128, 10)
    params = [
        jnp.asarray(generator.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
        for shape in pairwise(sizes)
    ]

    def mlp_loss(params, batch):
        hidden = jax.nn.relu(jax.nn.relu(batch[0] @ params[0]) @ params[1])
        logits = hidden @ params[2]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    steps, searcher = 4000, ProbeThenDecay((1e-4, 1e-1), 4000)
    runner = CandidateRunner(mlp_loss, OPTIMIZER, (images, classes))
    state = TrainState.create(params, OPTIMIZER)
    piece = Request("train", np.full((1, STEPS_PER_CALL), 1e-3, np.float32))

    def compute():
        jax.block_until_ready(runner.run(state, piece)[0].params)

    def decide():
        controller = init(searcher)
        while (request := ask(searcher, controller)) is not None:
            controller, _ = tell(searcher, controller, request, np.ones(request.rates.shape))

    # The same calls of a program that does nothing: padding, dispatch, gathering of losses.
    nothing = partial(runner._run, lambda *arguments: (state, np.zeros(STEPS_PER_CALL)))

    def dispatch():
        for _ in range(steps // STEPS_PER_CALL):
            nothing(None, state, piece, piece.rates[0])

    quickest = dict.fromkeys((compute, decide, dispatch), np.inf)
    for part in quickest:
        part()
    for _ in range(ROUNDS):
        for part in quickest:
            began = time.process_time()
            part()
            quickest[part] = min(quickest[part], time.process_time() - began)
        overhead = (quickest[decide] + quickest[dispatch]) / steps
        share = overhead / (quickest[compute] / STEPS_PER_CALL)
        if share < OVERHEAD:
            return
    raise AssertionError(f"the driver costs {share:.1%} of a step")
