"""The decisions of probe-then-decay, with losses made up: stages, budget, divergence, resuming."""

import itertools

import jax
import numpy as np
import pytest
from lr_driver import drive

from toolkit.lr import ProbeThenDecay
from toolkit.lr.fits.overfitting import overfits_since
from toolkit.lr.fits.peak import PeakRate, curve_ends, find_peak, peak_at, sureness, tail_scores
from toolkit.lr.probe_then_decay import RATIO
from toolkit.lr.reasons import reason_of

LR_RANGE = (1e-3, 1.0)


def losses_of(request, best=3e-2, noise=0.0):
    """Curves that fall to a floor, lowest for the peak `best`."""
    points = request.points
    floors = 1 + 0.3 * np.log10(request.rates.max(1, keepdims=True) / best) ** 2
    common = noise * np.random.default_rng(0).normal(size=points)
    return floors + np.exp(-np.arange(points) / max(points / 8, 1)) + common


def run(searcher, losses_of=losses_of, controller=None, most=None):
    return drive(searcher, losses_of, controller, most)


def test_probes_around_the_middle_then_beyond_the_best_then_the_run():
    searcher = ProbeThenDecay(LR_RANGE, 4000)
    controller, requests = run(searcher, lambda request: losses_of(request, 2e-1))
    probes = [r for r, _ in requests if r.kind == "probe"]
    assert [r.rates.shape for r in probes] == [(3, 120), (1, 120)]
    rates = np.concatenate([probe.rates.max(1) for probe in probes])
    np.testing.assert_allclose(rates, np.sqrt(1e-3) * RATIO ** np.arange(-1, 3), rtol=1e-6)
    for probe in probes:  # a rise, then a fall to almost nothing
        assert (np.diff(probe.rates[:, : round(0.2 * probe.rates.shape[1])]) > 0).all()
        assert (probe.rates[:, -1] < 0.2 * probe.rates.max(1)).all()
    assert controller.ledger.gradient_evaluations == 4000
    assert controller.ledger.kept_steps == len(controller.rates) == 4000 - 4 * 120
    assert controller.ledger.sequential_depth == 4000 - 2 * 120
    assert all(is_kept == (r.kind == "train") for r, is_kept in requests)
    usual = 2e-1 * (300 / controller.ledger.kept_steps) ** 0.2
    assert controller.rates.max() == pytest.approx(usual, rel=0.25)
    assert controller.rates[-1] < 0.01 * controller.rates.max()


@pytest.mark.parametrize(("budget", "steps"), [(90, 7), (240, 20), (600, 20), (4000, 120)])
def test_a_probe_has_twenty_steps_or_what_the_budget_bears(budget, steps):
    request, _ = run(ProbeThenDecay(LR_RANGE, budget), most=1)[1][0]
    assert request.rates.shape == (3, steps)


@pytest.mark.parametrize("budget", [1, 3, 99, 400, 951, 4001])
@pytest.mark.parametrize("options", [{}, {"shape": "linear"}])
@pytest.mark.parametrize("validation_batches", [0, 3])
def test_the_budget_is_kept_to_the_step(budget, options, validation_batches):
    searcher = ProbeThenDecay(
        LR_RANGE, budget, shortest_probe=2, validation_batches=validation_batches, **options
    )
    controller, requests = run(searcher)
    checks = 20 * validation_batches / 3 * searcher.is_watched
    assert budget - 1 - 0.1 * checks < controller.ledger.spent <= budget
    assert sum(r.rates.size for r, _ in requests) == controller.ledger.gradient_evaluations
    assert requests[-1][0].kind == "train"
    assert controller.rates[-1] <= controller.rates.max() / (1 if budget < 3 else 2)


def test_a_budget_too_small_to_probe_takes_the_middle():
    controller, requests = run(ProbeThenDecay(LR_RANGE, 30))
    assert all(r.kind == "train" for r, _ in requests)
    assert controller.rates.max() == pytest.approx(np.sqrt(1e-3))


@pytest.mark.parametrize("best", [1e-5, 1e-4, 20.0])
def test_the_interval_is_extended_at_its_edges_and_charged(best):
    whole, _ = run(ProbeThenDecay(LR_RANGE, 20_000), lambda r: losses_of(r, best))
    tried = whole.table["rate"]
    assert tried.min() < 1e-3 or tried.max() > 1.0
    assert whole.extended > 0
    assert whole.ledger.gradient_evaluations == 20_000
    inside, _ = run(ProbeThenDecay(LR_RANGE, 20_000, extensions=0), lambda r: losses_of(r, best))
    assert 0.999e-3 < inside.table["rate"].min() <= inside.table["rate"].max() < 1.001
    distance, kept_inside = (abs(np.log(c.rates.max() / best)) for c in (whole, inside))
    assert distance < kept_inside


def test_short_probes_that_like_the_lowest_rate_are_not_followed_out_of_the_interval():
    def noise(request):
        return losses_of(request, best=1e-9)

    controller, requests = run(ProbeThenDecay(LR_RANGE, 150), noise)
    assert max(r.rates.shape[1] for r, _ in requests if r.kind == "probe") < 20
    assert controller.extended == 0
    assert controller.table["rate"].min() >= LR_RANGE[0]
    assert controller.rates.max() > LR_RANGE[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_diverged_probes_are_never_followed(bad):
    def diverging(request):
        losses = losses_of(request)
        if request.kind == "probe":
            losses[request.rates.max(1) > 1e-2, -1] = bad
        return losses

    controller, _ = run(ProbeThenDecay(LR_RANGE, 4000), diverging)
    assert np.isinf(controller.table["forecast"]).any()
    assert controller.rates.max() <= 1e-2
    assert controller.ledger.gradient_evaluations == 4000


@pytest.mark.parametrize("how", ["nan", "blown up"])
def test_a_run_that_diverges_goes_back_a_piece_and_lower(how):
    def diverging(request):
        losses = losses_of(request)
        if request.kind == "train" and request.rates.max() > 5e-3:
            losses[0, -1] = np.nan
            if how == "blown up":
                losses[:] = 100.0
        return losses

    controller, requests = run(ProbeThenDecay(LR_RANGE, 4000), diverging)
    lost = [r.rates.shape[1] for r, is_kept in requests if r.kind == "train" and not is_kept]
    assert 0 < len(lost) < 20
    assert max(lost) <= 4000 // 20
    assert controller.rates.max() <= 5e-3
    assert controller.ledger.gradient_evaluations == 4000
    assert controller.rates[-1] < 0.02 * controller.rates.max()


def test_what_is_lost_and_validated_keeps_the_budget():
    """A piece made again is validated again."""

    def losses(request):
        is_high = request.kind == "train" and request.rates.max() > 1e-3
        return losses_of(request) * np.linspace(1.0, 10.0 if is_high else 1.0, request.points)

    controller, requests = run(ProbeThenDecay(LR_RANGE, 4000, validation_batches=20), losses)
    assert sum(not is_kept for _, is_kept in requests) >= 5
    assert controller.ledger.forward_evaluations >= 20 * (20 + 4)
    assert 3900 < controller.ledger.spent <= 4000


def a_run_that_rises(when):
    """Losses that fall to a tenth, and rise to a half within a piece in which `when` holds."""

    def losses_along(request):
        losses = losses_of(request)
        if request.kind == "train":
            losses = 0.1 + 0.01 * np.random.default_rng(0).normal(size=losses.shape)
            if when(request.rates.max()):
                losses += np.linspace(0.0, 0.4, losses.shape[1])
        return losses

    controller, requests = run(ProbeThenDecay(LR_RANGE, 4000), losses_along)
    assert controller.ledger.gradient_evaluations == 4000
    return controller, [is_kept for r, is_kept in requests if r.kind == "train"].count(False)


def test_a_run_that_breaks_down_goes_back_a_piece_and_lower():
    healthy, none_lost = a_run_that_rises(lambda rate: False)
    assert none_lost == 0
    broken, lost = a_run_that_rises(lambda rate: rate > 0.8 * healthy.rates.max())
    assert lost == 1
    assert broken.lost_at < 4000
    assert broken.rates[-2000:].max() == pytest.approx(0.7 * healthy.rates.max(), rel=0.01)


def test_batches_whose_losses_rise_at_every_rate_cost_one_piece():
    """As where examples are sorted by how hard they are."""
    controller, lost = a_run_that_rises(lambda rate: True)
    assert lost == 1
    assert controller.lost_at >= 4000


@pytest.mark.parametrize(
    ("pieces", "lost"),
    [
        ({2: "rise"}, []),  # to the noise of the highest rate
        ({10: "rise"}, [10]),
        ({19: "rise"}, []),  # its rates are low already
        ({0: "nan", 1: "rise", 10: "rise"}, [0, 10]),
        ({8: "rise", 9: "rise", 12: "nan", 15: "rise"}, [8, 12]),  # 9 is 8 made again
    ],
)
def test_which_pieces_are_made_again(pieces, lost):
    count = itertools.count()

    def losses_along(request):
        losses = losses_of(request)
        if request.kind == "train":
            happens = pieces.get(next(count))
            losses = 0.1 + 0.01 * np.random.default_rng(0).normal(size=losses.shape)
            losses += np.linspace(0.0, 0.4, losses.shape[1]) * (happens == "rise")
            losses[:, -1] += np.nan if happens == "nan" else 0.0
        return losses

    _, requests = run(ProbeThenDecay(LR_RANGE, 4000), losses_along)
    kept = [is_kept for request, is_kept in requests if request.kind == "train"]
    assert [at for at, is_kept in enumerate(kept) if not is_kept] == lost


@pytest.mark.parametrize(("budget", "most"), [(300, 0), (1000, 3)])
def test_noise_is_seldom_taken_for_a_break_down(budget, most):
    random, lost = np.random.default_rng(0), 0
    for _ in range(100):

        def noisy(request):
            noise = random.normal(size=request.points)
            return losses_of(request) + noise * (request.kind == "train")

        lost += run(ProbeThenDecay(LR_RANGE, budget), noisy)[0].lost_at >= 0
    assert lost <= most


def test_a_constant_in_the_loss_changes_nothing():
    def rates(offset):
        def losses(request):
            rises = 0.3 * np.linspace(0, 1, request.points) * (request.kind == "train")
            return losses_of(request) + rises * (request.rates.max() > 0.8 * 2e-2) + offset

        return run(ProbeThenDecay(LR_RANGE, 4000), losses)[0].rates

    np.testing.assert_array_equal(rates(0.0), rates(-100.0))


def test_everything_diverged_still_ends_at_the_budget():
    controller, _ = run(
        ProbeThenDecay(LR_RANGE, 1000), lambda r: np.full((len(r.rates), r.points), np.nan)
    )
    assert controller.ledger.gradient_evaluations == 1000
    assert controller.ledger.kept_steps == len(controller.rates) == 0


def run_validated(validation_of, fall=0.01):
    """A run of 1,000 steps, and what its validation losses were made to be."""
    searcher = ProbeThenDecay(LR_RANGE, 1000, validation_batches=2)

    def falling(request):
        return losses_of(request) - fall * len(seen.append(request) or seen)

    seen = []
    return drive(searcher, falling, validation_of=validation_of)[0]


def test_a_run_that_overfits_ends_early_and_says_so():
    noise = np.random.default_rng(0).normal(size=2000)
    rises = lambda step: 1 + (step - 300) ** 2 * 1e-6 + 3e-4 * noise[step]  # noqa: E731
    overfitted = run_validated(rises)
    assert overfits_since(overfitted.checks) == pytest.approx(300, abs=100)
    assert overfitted.ledger.kept_steps < 0.75 * 850
    assert overfitted.rates[-1] < 0.02 * overfitted.rates.max()
    # Later checks may look like noise again, and a late rise ends nothing: the reason knows both.
    for turn, is_early in ((300, True), (500, True), (700, False)):
        rising = run_validated(lambda step, at=turn: rises(step + 300 - at) - 3e-4 * noise[step])
        searcher = ProbeThenDecay(LR_RANGE, 1000, validation_batches=2)
        assert ("so that the run was ended early" in reason_of(searcher, rising)) == is_early
        assert (rising.ledger.spent < 990) == is_early
    # Controls: a validation loss that falls, one that is only noise, a training loss that rises.
    for validation_of, fall in (
        (lambda step: 2 - step * 1e-4 + 3e-4 * noise[step], 0.01),
        (lambda step: 1 + 3e-2 * noise[step], 0.01),
        (rises, -0.01),
    ):
        whole = run_validated(validation_of, fall)
        assert overfits_since(whole.checks) is None
        assert 990 < whole.ledger.spent <= 1000


@pytest.mark.parametrize(("kind", "least", "most"), [("flat", 0, 0.08), ("falls", 0, 0.08),
                                                     ("rises", 0.9, 1)])  # fmt: skip
def test_few_runs_end_early_by_noise_and_most_that_overfit(kind, least, most):
    steps, random, ended = np.arange(20.0), np.random.default_rng(0), []
    true = {"flat": 0 * steps, "falls": -0.1 * steps, "rises": abs(steps - 8.0)}[kind]
    for _ in range(200):
        checks = np.stack([steps, -steps, true + random.normal(size=20)], 1)
        ended.append(any(overfits_since(checks[:end]) is not None for end in range(1, 19)))
    assert least <= np.mean(ended) <= most


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_controller_resumes_from_its_arrays(cut):
    searcher = ProbeThenDecay(LR_RANGE, 8000)
    whole, _ = run(searcher)
    part, _ = run(searcher, most=cut)
    resumed, _ = run(searcher, controller=jax.tree.map(np.array, part))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_the_peak_of_a_parabola_and_of_a_cliff():
    rates = np.geomspace(1e-3, 1.0, 7)
    middle = np.log(rates[3])
    peak = lambda losses: find_peak(rates, losses[:, None], middle)  # noqa: E731
    exact = peak((np.log(rates) - np.log(2e-2)) ** 2)
    assert np.exp(exact.log_rate) == pytest.approx(2e-2)
    assert exact.edge == 0
    cliff = np.array([7.0, 6, 5, 4, 3, np.inf, np.inf])
    found = peak(cliff)
    assert rates[3] < np.exp(found.log_rate) <= rates[4]
    assert peak(np.full(7, np.inf)) is None
    for above in (2.0, np.inf):  # a lower rate diverged: the best as it is
        found = find_peak(rates[:3], np.array([[np.inf], [1.0], [above]]), middle)
        assert (found.log_rate, found.edge) == (np.log(rates[1]), 0)
    assert peak(rates).edge == -1
    broken_down = np.array([7.0, 6, 5, 6, 8, 4.5, 4.9])
    assert rates[1] < np.exp(peak(broken_down).log_rate) < rates[3]
    assert peak(-rates).edge == 1


def test_a_rise_within_the_noise_of_the_differences_does_not_stop_the_search():
    rates, noise = np.geomspace(1e-3, 1.0, 4), np.array([[1.0, -1, 1, -1]])
    middle = np.log(rates[2])
    rising = np.array([[5.0], [5.1], [4.0], [6.0]])  # the lowest is a little better by chance
    unsure = rising + noise * np.array([[0.0], [1.0], [0.0], [0.0]])
    assert np.exp(find_peak(rates, unsure, middle).log_rate) == pytest.approx(rates[2], rel=1.0)
    assert find_peak(rates, rising + 0 * noise, middle).edge == -1  # the control: it surely rises
    shared = rising + 100 * noise  # noise of the batches is in all alike
    assert find_peak(rates, shared, middle).edge == -1


@pytest.mark.parametrize("slope", [0.0, -6.0, 6.0])
def test_an_edge_is_believed_where_another_rate_is_surely_worse(slope):
    """By noise alone the best of three is often an edge, and that of four the next; losses that
    rise or fall with the rate are followed (the control)."""
    random, middle, ratios = np.random.default_rng(0), np.prod(LR_RANGE) ** 0.5, []
    for _ in range(100):

        def noisy(request):
            level = 10 + slope * np.log10(request.rates.max(1, keepdims=True))
            return level + random.normal(size=request.rates.shape)

        controller = run(ProbeThenDecay(LR_RANGE, budget=300), noisy)[0]
        ratios.append(controller.rates.max() / middle)
    share = np.mean(np.abs(np.log(ratios)) > np.log(RATIO) - 1e-3)
    assert share < 0.25 if slope == 0 else share > 0.9


@pytest.mark.parametrize("points", [1, 3])
def test_equal_losses_are_no_rise(points):
    """Of losses in bfloat16 a low rate changes none."""
    rates = np.geomspace(1e-3, 1.0, 4)
    ends = np.repeat([[2.0], [2.0], [1.0], [1.5]], points, axis=1)
    assert find_peak(rates, ends, np.log(rates[2])).edge == 0
    higher = np.add(ends, [[0.0], [0.1], [0.0], [0.0]])
    assert find_peak(rates, higher, np.log(rates[2])).edge == -1  # the control


def test_the_best_is_drawn_to_the_middle_as_far_as_it_is_not_surely_better():
    rates, noise = np.geomspace(1e-4, 1e-1, 4), np.array([1.0, -1, 1, -1])
    levels = np.array([[4.0], [3.0], [2.1], [2.0]])
    places = []
    for size in (0.04, 0.08, 0.4):
        ends = levels + size * noise * np.array([[0.0], [0.0], [0.0], [1.0]])
        found = find_peak(rates, ends, np.log(rates[1]))
        assert (found.edge, found.is_open) == ((1, False) if size == 0.04 else (0, True))
        places.append(found.log_rate)
    assert np.log(rates[3]) == places[0] > places[1] > places[2] > np.log(rates[2])
    shared = levels + 0.4 * noise  # the control: noise of the batches is in all alike
    assert find_peak(rates, shared, np.log(rates[1])).edge == 1


def test_of_two_middles_the_one_nearer_to_the_best_counts():
    """Their distances from the middle differ by rounding alone."""
    for low in np.geomspace(1e-6, 1e-2, 20):
        rates = np.geomspace(low, 1e3 * low, 4)
        found = find_peak(rates, np.ones((4, 6)), np.log(rates).mean())
        assert found.log_rate == pytest.approx(np.log(rates[1]))


def test_a_best_rate_between_two_that_diverged_is_taken_as_it_is_or_higher():
    rates, ends = np.geomspace(1e-3, 1.0, 4), np.array([[np.inf], [1.0], [0.5], [np.inf]])
    found = find_peak(rates, np.repeat(ends, 6, axis=1), np.log(rates).mean())
    assert np.log(rates[1]) < found.log_rate < np.log(rates[3])


def test_only_a_long_run_wants_a_lower_peak_than_its_probes():
    probed = PeakRate(0.0, 0)
    assert peak_at(250, probed, 20) == peak_at(300, probed, 80) == 1.0
    assert peak_at(9600, probed, 20) == peak_at(9600, probed, 80) == pytest.approx(0.5)
    assert peak_at(64_000, probed, 2000) == pytest.approx(0.5)


@pytest.mark.parametrize("points", [2, 3, 6, 16])
def test_sureness_is_the_statistic_of_the_paired_t_test(points):
    stats = pytest.importorskip("scipy.stats")
    losses, others = np.random.default_rng(points).normal(size=(2, points))
    known = stats.ttest_rel(losses, others).statistic
    assert sureness(losses, others) == pytest.approx(known, rel=1e-12)
    assert sureness(losses[:1], losses[:1] - 1) == np.inf
    assert sureness(losses[:1], losses[:1] + 1) == sureness(losses, losses) == 0


def test_noise_that_candidates_share_is_none_between_them():
    common = np.random.default_rng(0).normal(size=50)
    losses = np.array([1.0 + common, 1.01 + common, np.full(50, np.nan)])
    means, variances = tail_scores(curve_ends(losses))
    assert means[1] - means[0] == pytest.approx(0.01)
    assert means[2] == np.inf
    np.testing.assert_allclose(variances, 0.0, atol=1e-20)
    alone = losses + 0.1 * np.random.default_rng(1).normal(size=losses.shape)
    assert (tail_scores(curve_ends(alone))[1][:2] > 1e-5).all()  # the control


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lr_range": (1.0, 1e-3)}, "lr_range"),
        ({"budget": 0}, "budget"),
        ({"candidates": 2}, "candidates"),
        ({"search_fraction": 1.0}, "search_fraction"),
        ({"shape": "cubic"}, "cubic"),
        ({"extensions": -1}, "extensions"),
        ({"shortest_probe": 0}, "shortest_probe"),
    ],
)
def test_wrong_constants_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        ProbeThenDecay(**{"lr_range": LR_RANGE, "budget": 5000, **changes})
