"""Read, run, measure and move with a slider the ideas that make large models fast.

Rooms, each imported on first use, so that `import toolkit` costs nothing:

* `toolkit.attention`: token mixers as pure functions of arrays
* `toolkit.experts`: mixtures of experts as pure functions of arrays
* `toolkit.figures`: the visual language of every figure
* `toolkit.measure`: timers, compiled-program reader, hardware, provenance of numbers
* `toolkit.parallel`: meshes and layouts
* `toolkit.schedules`: pipeline schedules and collectives as data, checked and simulated
* `toolkit.lr`: learning-rate schedules and their search
* `toolkit.looped`: looped language models (flax nnx)
* `toolkit.testing`: the contract of token mixers, for those written elsewhere
* `toolkit.training`: data, train step, loop, checkpoints, metrics
* `toolkit.conversion`: a trained looped softmax model becomes a hybrid
* `toolkit.language`: train, load, export, continue a language model on text
* `toolkit.planning`: what fits a cluster and how fast, before anything is compiled
* `toolkit.serving`: an engine that batches requests as they come
* `toolkit.eject`: one mixer as one file, to paste into another code base
* `toolkit.lab`: panels with sliders, notebooks, the tour
* `toolkit.bench`: contenders side by side
* `toolkit.experiments`: claims about small models, each tested by one command

Inside `toolkit.checking()`, for debugging, every call looks at the values that it is given, too.
"""

import importlib
import warnings
from typing import Any

from toolkit._same_name import hidden

__version__ = "0.1.0"

_ROOMS = (
    "attention",
    "bench",
    "conversion",
    "eject",
    "experiments",
    "experts",
    "figures",
    "lab",
    "language",
    "looped",
    "lr",
    "measure",
    "parallel",
    "planning",
    "schedules",
    "serving",
    "testing",
    "training",
)
__all__ = ["__version__", "checking", *_ROOMS]  # pyright: ignore[reportUnsupportedDunderAll]

if (_message := hidden()) is not None:
    warnings.warn(_message, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"toolkit.{name}")
    if name == "checking":
        return importlib.import_module("toolkit._checks").checking
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
