"""The claim on hybrids: its judge and control on numbers made up."""

import numpy as np

from toolkit.experiments import load_experiment
from toolkit.experiments.hybrid import ATTENTION, HYBRID, SEEDS, SHORT
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import power
from toolkit.experiments.language import PERPLEXITY

EXPERIMENT = load_experiment("hybrid")


def verdict(gain, short):
    noise = 0.1 * np.random.default_rng(0).normal(size=(3, SEEDS))
    means = {ATTENTION: 3.9, HYBRID: 3.9 - gain, SHORT: short}
    outcomes = {
        label: {seed: {PERPLEXITY: mean + row[seed]} for seed in range(SEEDS)}
        for row, (label, mean) in zip(noise, means.items(), strict=True)
    }
    return EXPERIMENT.verdicts(Results(outcomes))[0].word


def test_the_claim_on_hybrids_is_judged_with_its_control():
    assert verdict(0.2, 5.0) == "seen"
    assert verdict(-0.2, 5.0) == "contradicted"
    assert verdict(0.2, 3.5) == "void", "a model of a third of the steps is not worse"
    assert power(SEEDS, 0.81) > 0.9
