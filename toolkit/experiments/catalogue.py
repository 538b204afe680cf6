"""The experiments there are; each is imported when it is wanted."""

import importlib

from toolkit.experiments.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "needle": "how far back a window sees, loop by loop",
    "lr": "learning rates: oracle, tuning-free or searched, at equal gradient evaluations",
}
"""Name -> summary. The experiment is `EXPERIMENT` of the module of that name in this room."""


def load_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Args:
        name: one of `EXPERIMENTS`.

    Returns:
        The experiment.

    Raises:
        ValueError: for an unknown name.

    Cost:
        Imports flax, optax and what the experiment needs.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment: got {name!r}, wanted one of {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"toolkit.experiments.{name}").EXPERIMENT
