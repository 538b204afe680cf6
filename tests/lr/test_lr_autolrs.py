"""The decisions of AutoLRS, with losses made up: stages, budget, divergence, resuming."""

import jax
import numpy as np
import pytest
from lr_driver import drive

from toolkit.lr import AutoLRS, Controller, ask, init, tell

LR_RANGE = (1e-3, 1e-1)


def losses_of(request, best=1e-2):
    """Curves that fall to a floor, lowest for the rate `best`."""
    points = request.rates.shape[1] // (request.validate_every or 1)
    floors = 1 + np.log10(request.rates[:, :1] / best) ** 2
    return floors + np.exp(-np.arange(points) / max(points / 8, 1))


def run(searcher, losses_of=losses_of, controller=None, most=None):
    return drive(searcher, losses_of, controller, most)


def test_stages_of_the_paper():
    controller, requests = run(AutoLRS.paper(LR_RANGE, 60_000))
    lengths = [len(r.rates[0]) for r, _ in requests if r.kind == "train"]
    assert lengths == [1000, 2000, 4000, 8000, 8000, 7000]
    probes = [len(r.rates[0]) for r, _ in requests if r.kind == "probe"]
    assert probes == [n for n in (100, 200, 400, 800, 800, 700) for _ in range(10)]
    assert controller.ledger.gradient_evaluations == 60_000
    assert controller.ledger.kept_steps == len(controller.rates) == 30_000
    assert all(is_kept == (r.kind != "probe") for r, is_kept in requests)
    assert all(len(set(r.rates[0])) == 1 for r, _ in requests)


@pytest.mark.parametrize(("preset", "first_validated"), [(AutoLRS.paper, 3), (AutoLRS.code, 4)])
def test_when_validation_losses_begin(preset, first_validated):
    controller, requests = run(preset(LR_RANGE, 62_270, validation_batches=1, proposals="together"))
    every = [r.validate_every for r, _ in requests if r.kind == "probe"]
    assert every == [0] * first_validated + [50] * (6 - first_validated)
    assert controller.ledger.forward_evaluations == 16 * 10 * (6 - first_validated)
    assert not any(r.validate_every for r, _ in requests if r.kind == "train")


def test_presets():
    assert AutoLRS.paper(LR_RANGE, 10).kappa == 1e3
    assert AutoLRS.code(LR_RANGE, 10).kappa == 1e6
    assert AutoLRS.code(LR_RANGE, 10, kappa=2.0).kappa == 2.0


@pytest.mark.parametrize("proposals", ["sequential", "together"])
@pytest.mark.parametrize("forecast", ["published", "robust"])
def test_the_best_candidate_is_trained(proposals, forecast):
    searcher = AutoLRS(
        LR_RANGE, 4000, first_stage=200, longest_stage=400, proposals=proposals, forecast=forecast
    )
    controller, requests = run(searcher)
    table = controller.table
    for stage in range(int(table["stage"].max()) + 1):
        rows = np.flatnonzero(table["stage"] == stage)
        assert len(rows) == searcher.candidates
        assert len(set(table["rate"][rows])) == searcher.candidates  # no proposal is a repeat
        assert table["rate"][rows].min() < 2e-3
        assert table["rate"][rows].max() > 5e-2
        train = [r for r, _ in requests if r.kind == "train"][stage]
        best = table["rate"][rows][np.argmin(table["forecast"][rows])]
        assert train.rates[0, 0] == np.float32(best)
        assert abs(np.log10(best / 1e-2)) < 0.2
    depth = controller.ledger.sequential_depth
    assert (depth == 4000) if proposals == "sequential" else (2000 <= depth < 2500)


@pytest.mark.parametrize("budget", [1, 7, 99, 400, 401, 2001])
@pytest.mark.parametrize("final_decay", [0.0, 0.2])
def test_budget_is_kept_to_the_step_and_never_ends_in_a_probe(budget, final_decay):
    searcher = AutoLRS.scaled(LR_RANGE, budget, final_decay=final_decay)
    controller, requests = run(searcher)
    assert controller.ledger.gradient_evaluations == budget
    assert sum(r.rates.size for r, _ in requests) == budget
    assert requests[-1][0].kind == ("decay" if searcher.decay_steps else "train")
    rates = controller.rates
    assert ((rates > 0) & (rates <= np.float32(LR_RANGE[1]))).all()
    if searcher.decay_steps > 1:
        decay = rates[-searcher.decay_steps :]
        np.testing.assert_allclose(decay, decay[0] * np.linspace(1, 0, len(decay) + 1)[:-1], 1e-5)


def test_warmup_rises_and_is_not_searched():
    searcher = AutoLRS.scaled(LR_RANGE, 500, warmup_steps=4, warmup_rate=0.02)
    controller, requests = run(searcher)
    assert requests[0][0].kind == "warmup"
    np.testing.assert_allclose(controller.rates[:4], [0.005, 0.01, 0.015, 0.02], rtol=1e-6)
    with pytest.raises(ValueError, match="warmup_rate"):
        tell(searcher, init(searcher), ask(searcher, init(searcher)), np.full((1, 4), np.nan))


@pytest.mark.parametrize(
    ("bad", "proposals"),
    [(np.nan, "sequential"), (np.nan, "together"), (np.inf, "together"), (-np.inf, "together")],
)
def test_diverged_candidates_are_never_chosen(bad, proposals):
    def diverging(request):
        losses = losses_of(request)
        losses[request.rates[:, 0] > 5e-3, -1] = bad
        return losses

    searcher = AutoLRS.scaled(LR_RANGE, 2000, proposals=proposals)
    controller, requests = run(searcher, diverging)
    assert all(r.rates.max() <= 5e-3 for r, is_kept in requests if is_kept)
    assert np.isinf(controller.table["forecast"]).any()
    assert controller.ledger.gradient_evaluations == 2000


def test_everything_diverged_still_ends_at_the_budget():
    controller, requests = run(
        AutoLRS.scaled(LR_RANGE, 1000), lambda r: np.full((len(r.rates), r.rates.shape[1]), np.nan)
    )
    assert controller.ledger.gradient_evaluations == 1000
    assert controller.ledger.kept_steps == len(controller.rates) == 0
    trained = [r.rates.max() for r, _ in requests if r.kind == "train"]
    assert set(trained) == {np.float32(LR_RANGE[0])}


def test_training_that_diverges_is_taken_back_and_the_next_best_rate_trained():
    def diverging_later(request):
        losses = losses_of(request)
        if request.kind == "train" and request.rates[0, 0] > 5e-3:
            losses[0, -1] = np.nan
        return losses

    controller, requests = run(AutoLRS.scaled(LR_RANGE, 4000), diverging_later)
    trained = [(r.rates[0, 0], is_kept) for r, is_kept in requests if r.kind == "train"]
    assert any(not is_kept for _, is_kept in trained)
    assert all(is_kept == (rate <= 5e-3) for rate, is_kept in trained)
    assert controller.rates.max() <= 5e-3
    assert controller.ledger.gradient_evaluations == 4000


@pytest.mark.parametrize("cut", [11])
@pytest.mark.parametrize("proposals", ["sequential", "together"])
def test_a_controller_resumes_from_its_arrays(cut, proposals):
    searcher = AutoLRS.scaled(LR_RANGE, 2000, proposals=proposals)
    whole, _ = run(searcher)
    part, _ = run(searcher, most=cut)
    resumed, _ = run(searcher, controller=jax.tree.map(np.array, part))
    assert isinstance(resumed, Controller)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_asking_twice_gives_the_same_answer():
    searcher = AutoLRS.paper(LR_RANGE, 4000)
    controller, _ = run(searcher, most=3)
    first, second = ask(searcher, controller), ask(searcher, controller)
    np.testing.assert_array_equal(first.rates, second.rates)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lr_range": (1e-1, 1e-3)}, "lr_range"),
        ({"lr_range": (0.0, 1e-3)}, "lr_range"),
        ({"budget": 0}, "budget"),
        ({"candidates": 0}, "candidates"),
        ({"longest_stage": 10}, "longest_stage"),
        ({"kappa": -1.0}, "kappa"),
        ({"proposals": "random"}, "random"),
        ({"forecast": "oracle"}, "oracle"),
        ({"final_decay": 1.0}, "final_decay"),
        ({"warmup_steps": 10}, "warmup_rate"),
        ({"warmup_steps": 6000, "warmup_rate": 0.1}, "budget"),
        ({"validation_points": 0}, "validation_points"),
    ],
)
def test_wrong_constants_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        AutoLRS(**{"lr_range": LR_RANGE, "budget": 5000, **changes})


def test_losses_of_another_shape_are_refused():
    searcher = AutoLRS.scaled(LR_RANGE, 2000)
    controller = init(searcher)
    with pytest.raises(ValueError, match="losses"):
        tell(searcher, controller, ask(searcher, controller), np.zeros((1, 3)))


def test_a_stale_first_step_after_each_restore_as_published():
    """The public client loads the optimiser and with it the old rate, for one step."""
    options = {"candidates": 3, "first_stage": 100}
    _, requests = run(AutoLRS(LR_RANGE, 390, stale_rate=0.5, **options))
    first, *rows = [request.rates[0] for request, _ in requests]
    assert all(len(set(row)) == 1 for row in (first, *(row[1:] for row in rows)))
    kept = rows[2][-1]  # of the first stage, saved with its state
    assert [row[0] for row in rows] == [np.float32(0.5)] * 3 + [kept] * (len(rows) - 3)
    _, exact = run(AutoLRS(LR_RANGE, 390, **options))
    assert all(len(set(request.rates[0])) == 1 for request, _ in exact)
    with pytest.raises(ValueError, match="stale_rate"):
        AutoLRS(LR_RANGE, 600, first_stage=10, stale_rate=0.5)
