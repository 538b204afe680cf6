"""What a search is given: loaders, states, keys, files; and what it must not accept in silence."""

import importlib.util
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
from corruption import assert_none_silent
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
        if not any(
            name in block for name in ("transfer(", "ModelOfWidth")
        ):  # no training situation
            assert len([line for line in block.splitlines() if line]) <= 10
        if any(name in block and not importlib.util.find_spec(name) for name in ("torch", "grain")):
            continue
        exec(compile(block, "lr_search.md", "exec"), scope)
    averages = scope["model"].layers[0].mean[...]
    assert np.abs(averages).max() > 0
    assert int(scope["model"].layers[1].rngs.count[...]) > 0  # dropout drew


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


def test_an_iterator_may_fill_the_same_memory_again():
    def reused():
        batch = jax.tree.map(np.zeros_like, ROWS[0])
        for row in itertools.cycle(ROWS):
            for name, leaf in row.items():
                batch[name][:] = leaf
            yield batch

    expected = found_in(itertools.cycle(ROWS))
    np.testing.assert_array_equal(found_in(reused()).params, expected.params)


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


@pytest.mark.parametrize("evaluation", ["loop", "vmap"])
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
    message = r"params: .* not depend on \['mean'\], .* model_state"
    with pytest.warns(UserWarning, match=message) as caught:
        search(
            lambda p, batch: loss_fn(p["w"], batch), {"w": ZEROS, "mean": jnp.zeros(4)}, DATA,
            budget=BUDGET,
        )  # fmt: skip
    assert caught[0].filename == __file__  # the line of the call, not one of the package


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


def read(path):
    from toolkit.lr.running.files import read_search
    from toolkit.lr.running.fingerprints import FINGERPRINTS
    from toolkit.lr.search import DEFAULT_OPTIMIZER, SearchProgress

    constants = ProbeThenDecay((1e-5, 1.0), BUDGET)
    state = TrainState.create(ZEROS, DEFAULT_OPTIMIZER)
    blank = dict.fromkeys(FINGERPRINTS, np.zeros(0))
    return read_search(path, SearchProgress(init(constants), state, constants, blank))


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
    with pytest.raises(ValueError, match="start: 'text' has no checksum"):
        found_in(DATA, start=tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        found_in(DATA, start=tmp_path / "nothing")
    resumed, whole = found_in(DATA, start=path), found_in(DATA, start=replace(progress))
    np.testing.assert_array_equal(resumed.params, whole.params)


TREE = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}


def grouped(**optimizers):
    return optax.multi_transform(optimizers, {name: name for name in optimizers})


def holding(factors):
    """An optimiser that holds arrays of the parameters' shapes."""
    return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (optax.adam(1e-3), "0.001"),
        (optax.adamw(1e-3, weight_decay=0.1), "0.001"),
        (optax.sgd(0.1, momentum=0.9), "0.1"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4)), "0.0001"),
        (grouped(w=optax.adamw(1e-3), b=optax.sgd(1e-2)), "0.01"),
        (grouped(w=optax.adamw(1e-3), b=optax.set_to_zero()), "0.001"),
        (optax.chain(optax.chain(optax.clip(1.0), optax.chain(optax.adamw(1e-3)))), "0.001"),
        (optax.chain(optax.adamw(1e-3), holding(TREE)), "0.001"),
        (optax.chain(grouped(w=optax.adam(1e-3), b=optax.adam(1e-3))), "0.001"),
        (optax.masked(optax.adam(1e-3), {"w": True, "b": True}), "0.001"),
        (optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(), "0.001"),
        (optax.MultiSteps(optax.adam(1.0), 4).gradient_transformation(), None),
        (grouped(w=optax.sgd(1.0), b=optax.sgd(0.01)), None),
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
        warn_of_own_rate(optimizer, TREE)
    else:
        with pytest.warns(UserWarning, match=f"^optimizer: .*about {rate}, "):
            warn_of_own_rate(optimizer, TREE)


def test_every_result_says_why():
    def reason(loss=loss_fn, **options):
        return search(loss, ZEROS, DATA, **{"budget": BUDGET, **options}).reason

    assert re.match(r"probes of \d+ steps are best at \S+, of rates from", reason(budget=2000))
    with pytest.warns(UserWarning, match="budget 20 is too small for a search") as caught:
        assert reason(budget=20) == "the budget pays for no candidates: the middle of lr_range"
    assert caught[0].filename == __file__
    beyond = reason(lr_range=(1e-6, 1e-5), budget=2000)
    assert "the highest rate tried" in beyond
    assert "may lie beyond" in beyond
    broken = reason(lambda w, batch: jnp.sum(w) * jnp.nan)
    assert re.match(r"all \d candidates diverged: the lowest rate; ", broken)
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


@jax.custom_jvp
def tripled(w):
    """The same value, with three times its gradient."""
    return w


tripled.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))

OTHERS = {
    "an iterator that has advanced": ({"batches": ROWS[1:] + ROWS[:1]}, "batches"),
    "a later batch": ({"batches": iter([*ROWS[:5], *ROWS[4:8], *ROWS * 99])}, "batches"),
    "another gradient": ({"loss_fn": lambda w, batch: loss_fn(tripled(w), batch)}, "loss_fn"),
    "another momentum": ({"optimizer": optax.adamw(1.0, b1=0.8)}, "optimizer"),
    "another loss": ({"loss_fn": lambda w, batch: 1.5 * loss_fn(w, batch)}, "loss_fn"),
    "another validation": ({"validation": lambda w: jnp.sum(w)}, "validation"),
    "the same": ({"optimizer": optax.adamw(1.0), "loss_fn": lambda *a: loss_fn(*a)}, None),
}


@pytest.mark.parametrize("kind", ["progress", "file"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_search_goes_on_with_its_own_data_and_functions_only(other, kind, tmp_path):
    path = tmp_path / "search.safetensors"
    validation = (lambda w: jnp.sum(w**2)) if other == "another validation" else None
    begun = {"loss_fn": loss_fn, "batches": iter(ROWS * 99), "optimizer": optax.adamw(1.0)}
    begun |= {"params": ZEROS, "budget": BUDGET, "validation": validation}
    stopped = search(**begun, callback=lambda progress, *_: progress.save(path) or True)
    start = path if kind == "file" else stopped.progress
    changes, name = OTHERS[other]
    changes = {"batches": iter(ROWS * 99), **changes}
    if name is None:
        resumed = search(**{**begun, **changes}, start=start)
        whole = search(**{**begun, "batches": iter(ROWS * 99)})
        np.testing.assert_array_equal(resumed.params, whole.params)
        return
    with pytest.raises(ValueError, match=f"^start: the search was begun with other {name}; it"):
        search(**{**begun, **changes}, start=start)


@pytest.mark.parametrize("kind", ["arrays", "function", "sample", "constants"])
def test_other_data_is_refused_wherever_it_comes_from(kind, stopped):
    def options(scale):
        x = X.at[5].multiply(scale)  # of a batch that is not the first
        if kind == "arrays":
            return {"batches": {"x": x, "y": X @ WEIGHTS}, "loss_fn": loss_fn}
        row = lambda step: {"x": x[step % 8], "y": (X @ WEIGHTS)[step % 8]}  # noqa: E731
        if kind == "function":
            return {"batches": row, "loss_fn": loss_fn}
        if kind == "sample":
            drawn = lambda data, step: jax.tree.map(lambda leaf: leaf[step % 8], data)  # noqa: E731
            data = {"x": x, "y": X @ WEIGHTS}
            return {"batches": data, "sample": drawn, "loss_fn": loss_fn}
        fixed = np.asarray(x[5])
        inner = jax.jit(lambda w: jnp.sum((jnp.asarray(fixed) @ w) ** 2))
        return {"batches": DATA, "loss_fn": lambda w, batch: loss_fn(w, batch) + inner(w)}

    begun = search(params=ZEROS, budget=BUDGET, callback=lambda *_: True, **options(1.0)).progress
    search(params=ZEROS, budget=BUDGET, callback=lambda *_: True, start=begun, **options(1.0))
    name = "loss_fn" if kind == "constants" else "batches"
    with pytest.raises(ValueError, match=f"^start: the search was begun with other {name}; it"):
        search(params=ZEROS, budget=BUDGET, start=begun, **options(2.0))


def test_every_changed_byte_of_a_search_is_noticed(stopped):
    _, path = stopped
    assert_none_silent(path, lambda: jax.tree.map(np.asarray, read(path)) and True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_file_holds_low_precision(dtype, tmp_path):
    options = {"budget": BUDGET, "params": ZEROS.astype(dtype), "batches": DATA}
    loss = lambda w, batch: loss_fn(w.astype(jnp.float32), batch)  # noqa: E731
    path, count = tmp_path / "file", itertools.count(1)
    search(loss, **options, callback=lambda p, *_: p.save(path) or next(count) == 12)
    resumed, whole = search(loss, **options, start=path), search(loss, **options)
    assert resumed.params.dtype == dtype
    np.testing.assert_array_equal(resumed.params, whole.params)


def test_weakly_typed_parameters_are_resumed_from_a_file(tmp_path):
    options = {"params": jnp.full((4,), 1.0), "batches": DATA, "budget": BUDGET}
    path, count = tmp_path / "file", itertools.count(1)
    search(loss_fn, **options, callback=lambda p, *_: p.save(path) or next(count) == 8)
    resumed, whole = search(loss_fn, **options, start=path), search(loss_fn, **options)
    np.testing.assert_array_equal(resumed.params, whole.params)


def test_a_first_batch_that_is_easy_is_no_scale_for_the_others():
    y = np.ones((60, 1))
    y[0] = 0.01
    loss = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)  # noqa: E731
    for budget in (30, 35):
        with pytest.warns(UserWarning, match="too small for a search"):
            found = search(loss, jnp.zeros(1), (np.ones((60, 1, 1)), y), budget=budget)
        assert found.ledger.kept_steps == budget - found.table["steps"].sum()


def test_ctrl_c_returns_what_there_is():
    count = itertools.count()

    def batches():
        for row in itertools.cycle(ROWS):
            if next(count) == 250:
                raise KeyboardInterrupt
            yield row

    found = found_in(batches(), budget=600)
    assert found.reason.endswith("; stopped by Ctrl-C")
    assert 0 < found.ledger.kept_steps == int(found.progress.state.step) < 300
    resumed = found_in(itertools.cycle(ROWS), budget=600, start=found.progress)
    whole = found_in(itertools.cycle(ROWS), budget=600)
    np.testing.assert_array_equal(resumed.params, whole.params)
    assert "Ctrl-C" not in whole.reason


def test_a_request_is_told_once():
    searcher = ProbeThenDecay((1e-4, 1e-1), 400)
    request = ask(searcher, init(searcher))
    told, _ = tell(searcher, init(searcher), request, np.ones(request.rates.shape))
    with pytest.raises(ValueError, match=r"^request was asked for after 0 .*has 60: it was told"):
        tell(searcher, told, request, np.ones(request.rates.shape))


@pytest.mark.parametrize("every", [1, 4])
def test_gradients_that_are_collected_over_several_steps(every):
    """Two batches in turn, collected, are one batch of both."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), every)
    found = search(loss_fn, ZEROS, DATA, optimizer=optimizer, budget=2000, lr_range=(1e-3, 1.0))
    assert found.ledger.gradient_evaluations == 2000
    np.testing.assert_allclose(found.params, WEIGHTS, atol=1e-2)
    state = found.progress.state.optimizer_state
    assert int(state.gradient_step) == found.ledger.kept_steps // every


def test_validation_batches_without_a_validation_are_refused():
    searcher = partial(ProbeThenDecay, validation_batches=1)
    with pytest.raises(ValueError, match=r"^searcher: has validation_batches, but no"):
        found_in(DATA, searcher=searcher)


def test_unused_validation_is_admitted():
    options = {"validation": lambda w: jnp.sum(w**2)}
    reason = found_in(DATA, **options, validation_batches=90).reason
    assert "the validation loss costs too much of the budget for probes and the run" in reason
    reason = found_in(DATA, **options, budget=100, validation_batches=1).reason
    assert reason.endswith("costs too much of the budget for the run")
    assert "validation loss" not in found_in(DATA, **options, budget=2000).reason
    assert "validation loss" not in found_in(DATA).reason
    late = found_in(DATA, **options, searcher=AutoLRS.scaled, callback=lambda *_: True)
    assert "validation loss" not in late.reason  # stopped before it came to that
    late = found_in(DATA, **options, searcher=AutoLRS.scaled)
    assert "validation loss was not used" in late.reason


def test_fine_tuning_keeps_moments_and_the_place_in_the_data():
    first = found_in(DATA, budget=1000).progress.state
    assert int(first.step) % 8
    for params in (first.params, None):
        tuned = search(loss_fn, params, DATA, start=first, budget=400)
        assert int(tuned.progress.state.step) == int(first.step) + tuned.ledger.kept_steps
        runner = CandidateRunner(loss_fn, optax.adamw(1.0), DATA)
        rates = np.asarray(jax.vmap(tuned.schedule)(np.arange(tuned.ledger.kept_steps)))[None]
        expected, _ = runner.run(first, Request("train", rates))
        np.testing.assert_array_equal(tuned.params, expected.params)
    fresh = found_in(DATA, budget=400)
    assert not np.array_equal(fresh.params, tuned.params)
    with pytest.raises(ValueError, match=r"^params: differs from that of start"):
        search(loss_fn, ZEROS, DATA, start=first)
    with pytest.raises(ValueError, match=r"^start: its optimizer_state must be that of optimizer"):
        search(loss_fn, None, DATA, start=first, optimizer=optax.sgd(1.0))
