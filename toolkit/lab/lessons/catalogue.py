"""The list of lessons and instruments; a lesson is imported on demand."""

import importlib

from toolkit.lab.lessons import instruments
from toolkit.lab.lessons.outline import Outline

LESSONS = (
    "attention_cost",
    "honest_benchmark",
    "pipeline",
    "memory_ledger",
    "attention_memory",
    "meshes",
    "ring",
    "shard_transformer",
    "cluster_plan",
    "kill_worker",
    "skip_and_compress",
    "causality_trap",
    "who_goes_where",
    "pipeline_on_devices",
    "trees_and_cuts",
    "four_bits",
    "first_token",
    "known_rates",
    "own_kernel",
    "real_trace",
    "fewer_bits",
)
_FOLDERS = {
    "causality_trap": "models",
    "known_rates": "models",
    "own_kernel": "programs",
    "real_trace": "programs",
    "fewer_bits": "programs",
}
INSTRUMENTS = (
    "collectives",
    "experts",
    "gradients",
    "latent",
    "looped",
    "lr_search",
    "mixers",
    "pipelines",
    "planning",
    "serving",
    "sharding",
    "sparsity",
    "speedups",
)  # notebooks that are not lessons but lock their first picture


def load_outline(name: str) -> Outline:
    """Load the questions and exercises of a lesson from its module."""
    if name not in (*LESSONS, *INSTRUMENTS):
        wanted = ", ".join((*LESSONS, *INSTRUMENTS))
        raise ValueError(f"name: got {name!r}, wanted one of {wanted}")
    if name in INSTRUMENTS:
        return instruments.OUTLINES[name]
    module = f"{_FOLDERS[name]}.{name}" if name in _FOLDERS else name
    return importlib.import_module(f"toolkit.lab.lessons.subjects.{module}").OUTLINE
