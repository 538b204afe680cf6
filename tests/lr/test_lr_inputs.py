"""What a search is given: loaders, states, keys, files; and what it must not accept in silence."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.lr import AutoLRS, ProbeThenDecay, Request, TrainState, ask, init, search, tell
from toolkit.lr.running.batches import REPLAYED_PER_CALL
from toolkit.lr.running.candidates import CandidateRunner

ROOT = Path(__file__).parents[2]
BUDGET = 300
WEIGHTS = jnp.array([1.0, -2.0, 0.5, 3.0])
X = jax.random.normal(jax.random.key(0), (8, 16, 4))
DATA = {"x": X, "y": X @ WEIGHTS}
ROWS = [jax.tree.map(lambda leaf, at=at: np.asarray(leaf[at]), DATA) for at in range(8)]
ZEROS = jnp.zeros(4)


def loss_fn(weights, batch):
    return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)


found_in = partial(search, loss_fn, ZEROS, budget=BUDGET)


@pytest.mark.slow
def test_the_examples_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, scope = (ROOT / "docs/lr_search.md").read_text(), {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        assert len(block.splitlines()) <= 14
        exec(compile(block, "lr_search.md", "exec"), scope)
    averages = scope["model"].layers[0].mean[...]
    assert np.abs(averages).max() > 0


def test_an_iterator_trains_on_what_arrays_train_on():
    """The loader is the arrays, gone through again and again: the same bits."""
    expected = found_in(DATA)

    class Loader:
        def __iter__(self):
            return iter(ROWS)

    for batches in (itertools.cycle(ROWS), Loader(), ROWS):
        found = found_in(batches)
        np.testing.assert_allclose(found.table["forecast"], expected.table["forecast"], rtol=1e-5)
        np.testing.assert_allclose(found.params, expected.params, rtol=1e-4, atol=1e-6)


def test_candidates_see_the_batches_that_training_sees_and_no_more_are_kept():
    runner = CandidateRunner(
        lambda w, batch: 0.0 * w + batch, optax.sgd(1.0), (np.float32(i) for i in itertools.count())
    )
    state = TrainState.create(jnp.float32(0.0), optax.sgd(1.0))
    steps = 2 * REPLAYED_PER_CALL + 3
    for begin in (0.0, steps):
        expected = np.arange(begin, begin + steps)
        for mode in ("vmap", "loop"):
            probe = Request("probe", np.ones((3, steps), np.float32))
            together = runner.run_together(state, probe, mode)
            np.testing.assert_array_equal(together, np.broadcast_to(expected, (3, steps)))
        state, alone = runner.run(state, Request("train", np.ones((1, steps), np.float32)))
        np.testing.assert_array_equal(alone[0], expected)
    assert len(runner.source._kept) == steps


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda step: next(LOADER), "does not depend on the step"),
        (lambda step: DATA["x"][0], "does not depend on the step"),
        (lambda step: (next(LOADER), step), "two calls with the same step differ"),
        (lambda step: ROWS[int(step)], r"must be traceable \(ConcretizationTypeError\)"),
        (iter(ROWS), "the iterator ended after 8 batches"),
        (iter([]), "the iterator ended after 0 batches"),
        ([], "empty tree"),
        (DATA | {"y": DATA["y"][:7]}, r"must share their first size, .*\(7, 16\)"),
        (DATA | {"y": jnp.float32(1)}, r"must share their first size"),
        (iter([ROWS[0], {"x": ROWS[1]["x"][:3], "y": ROWS[1]["y"][:3]}]), "drop the last, smaller"),
    ],
)  # fmt: skip
def test_batches_that_would_be_one_batch_or_end_are_refused(batches, message):
    with pytest.raises(ValueError, match=f"^batches: .*{message}"):
        found_in(batches)


LOADER = itertools.cycle(ROWS)


def test_parameters_that_have_no_gradient_are_refused():
    with pytest.raises(TypeError, match=r"^params: must be floating point .* int32 at \['w'\]"):
        search(lambda params, batch: jnp.sum(batch), {"w": jnp.zeros(4, int)}, X, budget=BUDGET)


def test_unpaired_losses_say_how_to_mend_it():
    searcher = ProbeThenDecay((1e-3, 1.0), BUDGET)
    controller = init(searcher)
    request = ask(searcher, controller)
    losses = np.ones((len(request.rates), request.points))
    losses[1] += 0.01
    with pytest.raises(ValueError, match=r"^losses\[:, 0\] .* from 1 to 1.01: .* same batches"):
        tell(searcher, controller, request, losses)
    losses[1] = np.nan  # a candidate that diverged compares with nothing
    tell(searcher, controller, request, losses)


def counting_loss(weights, count, batch):
    return loss_fn(weights, batch), count + 1


@pytest.mark.parametrize("evaluation", ["loop", "map", "sharded"])
def test_a_model_state_follows_the_training_that_is_kept(evaluation):
    found = search(
        counting_loss, ZEROS, DATA, model_state=jnp.int32(5), budget=BUDGET, evaluation=evaluation
    )
    assert found.progress.state.model_state == 5 + found.ledger.kept_steps
    expected = found_in(DATA)
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-3, atol=1e-4)


def test_validation_is_given_the_model_state():
    found = search(
        counting_loss, ZEROS, DATA, model_state=jnp.int32(0), budget=BUDGET,
        searcher=partial(AutoLRS.scaled, first_stage=100, longest_stage=100, candidates=3),
        validation=lambda weights, count: jnp.sum(weights**2) + count,
    )  # fmt: skip
    assert found.ledger.forward_evaluations


def test_an_nnx_model_with_random_streams_of_its_own_is_resumed_bit_for_bit(tmp_path):
    model = nnx.Sequential(
        nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.1, rngs=nnx.Rngs(1)),
        nnx.Linear(4, 1, rngs=nnx.Rngs(2)),
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, batch):
        model = nnx.merge(graph, params, rest)
        found = jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)
        return found, nnx.split(model, nnx.Param, ...)[2]

    path = tmp_path / "search.safetensors"

    def save(progress, request, losses):
        progress.save(path)
        return progress.controller.ledger.kept_steps > 50

    run = partial(search, loss, params, DATA, model_state=rest, budget=BUDGET)
    whole, part = run(), run(callback=save)
    assert part.ledger.kept_steps < whole.ledger.kept_steps
    resumed = run(start=path)
    count = whole.progress.state.model_state["layers"][1]["rngs"]["count"][...]
    assert count == whole.ledger.kept_steps

    def bits(found):
        keep = found.params, found.progress.state.model_state, found.table
        return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                           else x) for x in jax.tree.leaves(keep)]  # fmt: skip

    for a, b in zip(bits(whole), bits(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_among_the_parameters_is_noticed():
    with pytest.warns(UserWarning, match=r"params: .* not depend on \['mean'\], .* model_state"):
        search(
            lambda p, batch: loss_fn(p["w"], batch), {"w": ZEROS, "mean": jnp.zeros(4)}, DATA,
            budget=BUDGET,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "state", "message"),
    [
        (lambda w, batch: (jnp.sum(w), {}), None, "must return a scalar loss; a state"),
        (lambda w, batch: w, None, r"must return a scalar loss; .* got float32\[4\]"),
        (lambda w, n, batch: jnp.sum(w), jnp.int32(0), r"must return \(loss, model_state\)"),
        (
            lambda w, n, batch: (jnp.sum(w), n + 0.5),
            jnp.int32(0),
            r"must .* got \('float32\[\]', 'f",
        ),
    ],
)
def test_losses_of_another_form_are_refused(loss, state, message):
    with pytest.raises(ValueError, match=f"^loss_fn {message}"):
        search(loss, ZEROS, DATA, model_state=state, budget=BUDGET)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "search.safetensors"

    def save(progress, request, losses):
        progress.save(path)
        return True

    return found_in(DATA, callback=save).progress, path


@pytest.mark.parametrize("kind", ["progress", "file"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 900}, r"begun with {'budget': 300} and goes on with that, got {'budget': 900}"),
        ({"searcher": AutoLRS.scaled}, "'ProbeThenDecay'} and goes on with that, got .*'AutoLRS'}"),
        ({"lr_range": (1e-4, 0.1)}, r"begun with {'lr_range': \[1e-05, 1.0\]}"),
    ],
)
def test_a_search_goes_on_with_its_own_constants_only(stopped, kind, options, message):
    start = stopped[kind == "file"]
    with pytest.raises(ValueError, match=f"^start: the search was .*{message}"):
        search(loss_fn, ZEROS, DATA, start=start, **{"budget": BUDGET, **options})


def test_a_file_of_another_search_is_refused(stopped, tmp_path):
    progress, path = stopped
    with pytest.raises(ValueError, match=r"'state/params' is float32\[4\], and float32\[5\]"):
        search(loss_fn, jnp.zeros(5), DATA, start=path, budget=BUDGET)
    with pytest.raises(ValueError, match=r"no array 'state/optimizer_state/0/mu/w'"):
        search(loss_fn, {"w": ZEROS}, DATA, start=path, budget=BUDGET)
    (tmp_path / "text").write_text("no arrays")
    with pytest.raises(ValueError, match="start: 'text' is no safetensors file"):
        found_in(DATA, start=tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        found_in(DATA, start=tmp_path / "nothing")
    resumed, whole = found_in(DATA, start=path), found_in(DATA, start=replace(progress))
    np.testing.assert_array_equal(resumed.params, whole.params)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (optax.adam(1e-3), "0.001"),
        (optax.adamw(1e-3, weight_decay=0.1), "0.001"),
        (optax.sgd(0.1, momentum=0.9), "0.1"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4)), "0.0001"),
        (optax.adamw(1.0, weight_decay=0.1), None),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), None),
        (optax.lamb(1.0), None),
        (optax.rmsprop(1.0), None),
        (optax.adafactor(1.0), None),
        (optax.contrib.muon(1.0), None),
    ],
)
def test_an_optimizer_with_a_rate_of_its_own_is_noticed(optimizer, rate, recwarn):
    from toolkit.lr.running.arguments import warn_of_own_rate

    if rate is None:
        warn_of_own_rate(optimizer)
    else:
        with pytest.warns(UserWarning, match=f"^optimizer: .*about {rate}, "):
            warn_of_own_rate(optimizer)


def test_every_result_says_why():
    def reason(loss=loss_fn, **options):
        return search(loss, ZEROS, DATA, **{"budget": BUDGET, **options}).reason

    assert re.match(r"probes of \d+ steps are best at \S+, of rates from", reason(budget=2000))
    assert reason(budget=20) == "the budget pays for no candidates: the middle of lr_range"
    beyond = reason(lr_range=(1e-6, 1e-5), budget=2000)
    assert "the highest rate tried" in beyond
    assert "may lie beyond" in beyond
    broken = reason(lambda w, batch: jnp.sum(w) * jnp.nan)
    assert broken.startswith("all 5 candidates diverged: the lowest rate; ")
    assert broken.endswith("no training was kept")
    assert reason(searcher=AutoLRS.scaled).startswith("the lowest forecast in each of 2 stages")


def test_nothing_here_is_pickled():
    """Arrays have files of their own; a pickle runs what it holds."""
    folders = ("toolkit", "tests", "notebooks", "tutorials", "docs")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]
    assert len(paths) > 300
    imports = re.compile(r"\b(import|from) +(c?pickle|cloudpickle|dill|joblib|shelve)\b")
    assert [path.name for path in paths if imports.search(path.read_text("utf-8"))] == []


SOURCES = {".py", ".ipynb", ".md"}
