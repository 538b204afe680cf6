"""The list of experiments; each is imported on demand."""

import importlib

from toolkit._checks import check_choice, checked
from toolkit.experiments.kit.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "needle": "how far back a window sees, loop by loop",
    "parity": "one flip per token: what negative eigenvalues are for",
    "swaps": "products of swaps in S3: one reflection per token, looped or not",
    "s3": "running products that do not commute: does looping help to track them",
    "words": "parity and S3 at the lengths of their papers, and longer",
    "mqar": "many keys to look up: a fixed state, a window, a hybrid",
    "overflow": "more keys to look up than a state holds: states, attention, a hybrid",
    "convert": "a softmax teacher becomes a hybrid: what is kept, and which layers",
    "language": "text at matched parameters and tokens: plain, looped, linear, hybrid",
    "hybrid": "text, twenty seeds: one attention layer among gated delta nets, or attention alone",
    "latent": "a small DeepSeek cut over devices: what slices of its latents cost, and aligning",
    "sparse": "sparse decoding: needles found, mass kept, bytes read, system by system",
    "gradients": "gradients in fewer bytes: feedback, local steps, sparse rows, greedy choices",
    "serving": "policies of serving: each system's claim on drawn requests, simulated",
    "lr": "learning rates: oracle, tuning-free or searched, at equal gradient evaluations",
    "probes": "what twenty steps tell of a learning rate, and whether to keep them",
    "peaks": "how a learning rate is chosen from its probes: the search's rule beside others",
    "muon": "rates of their own for Muon's parameters and for Adam's: are they worth a search",
    "transfer": "the rate of a small model on a large one: muP, decay, hypersphere, search",
}
"""Name -> summary; the experiment is `EXPERIMENT` of that module of `toolkit.experiments`."""


@checked
def load_experiment(name: str) -> Experiment:
    """Load an experiment by name.

    Args:
        name: one of `EXPERIMENTS`.

    Example:
        >>> sorted(load_experiment("parity").settings)
        ['full attention', 'gdn, beta up to 1', 'gdn, beta up to 2']
    """
    check_choice("experiment", name, EXPERIMENTS)
    return importlib.import_module(f"toolkit.experiments.{name}").EXPERIMENT
