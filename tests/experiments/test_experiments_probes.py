"""What probes are worth: the judges on losses made up, and one short run."""

from pathlib import Path

import numpy as np
import pytest

from toolkit.experiments import load_experiment, probes
from toolkit.experiments.kit.experiment import Workspace
from toolkit.experiments.kit.records import read_runs, results_of
from toolkit.experiments.kit.results import Results
from toolkit.experiments.probes import ANEW, EARLY, ENDS, KEPT, RATES, SHORT, WHOLE, WORKLOADS

EXPERIMENT = load_experiment("probes")


def made_up(kept=1.1, slope=0.1, probe_best=6, early_best=6):
    """Valleys around a best rate; a run anew has a factor of 2."""
    places, noise = np.arange(len(RATES)), 1e-4 * np.random.default_rng(0).normal(size=5)

    def valley(lowest, best):
        return list(lowest + slope * abs(places - best))

    run = {WHOLE: valley(1.0, 6), SHORT: valley(1.2, 6), ANEW: valley(1.1, 6),
           ENDS: valley(2.0, probe_best), EARLY: valley(3.0, early_best)}  # fmt: skip
    runs = {seed: {**run, KEPT: valley(kept + shift, 6)} for seed, shift in enumerate(noise)}
    return Results(dict.fromkeys(WORKLOADS, runs))


def test_claims_on_probes_are_judged_by_factors():
    words = [verdict.word for verdict in EXPERIMENT.verdicts(made_up())]
    assert words == ["no difference that matters", "seen", "seen"]
    assert EXPERIMENT.verdicts(made_up(kept=1.05))[0].word == "seen"
    assert EXPERIMENT.verdicts(made_up(kept=1.15))[0].word == "contradicted"
    # The controls: rates that are all alike, and probes that mislead.
    assert EXPERIMENT.verdicts(made_up(slope=1e-9))[0].word == "void"
    misled = EXPERIMENT.verdicts(made_up(probe_best=10, early_best=1))
    assert [verdict.word for verdict in misled[1:]] == ["contradicted", "contradicted"]


def test_what_the_page_on_searches_says_of_the_record():
    path = Path(__file__).parents[2] / "data/experiments/probes.jsonl"
    results = results_of(read_runs(path, EXPERIMENT), EXPERIMENT)
    gains = [
        4
        ** np.subtract(*(probes._log_factors(results, name, label) for name in (ANEW, KEPT))).mean()
        for label in WORKLOADS
    ]
    assert gains[:3] == pytest.approx([0.99, 0.99, 1.06], abs=0.007)
    assert EXPERIMENT.verdicts(results)[0].word == "not shown"
    shares = {}
    for name in (ANEW, ENDS):
        losses = results.curves("adding", name).mean(0)
        shares[name] = (losses - losses.min()) / np.ptp(losses)
    ours, right = (share.argmin() for share in (shares[ENDS], shares[ANEW]))
    assert RATES[ours] / RATES[right] == pytest.approx(4.6, abs=0.05)
    assert shares[ANEW][ours] == pytest.approx(0.41, abs=0.005)
    assert shares[ENDS][right] == pytest.approx(0.01, abs=0.005)
    assert {len(results.samples(name, ANEW)) for name in WORKLOADS} == {5}
    assert len(WORKLOADS) == 4
    margins, _ = probes._halving(results)
    assert 100 * (margins + 0.5).mean() == pytest.approx(95)
    assert (probes.PROBE, probes.RUN) == (20, 240)
    assert probes.PROBE - probes.THIRD == 13  # of one candidate of three


@pytest.mark.nightly
def test_a_short_run_has_a_loss_for_every_rate(tmp_path):
    workspace = Workspace(tmp_path, lambda share: None)
    outcome = probes.execute(probes.ProbeSetting("tabular", steps=40), 1, workspace)
    assert {len(losses) for losses in outcome.values()} == {len(RATES)}
    assert outcome[WHOLE].min() < outcome[SHORT].min()
