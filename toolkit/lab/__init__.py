"""Panels to move, pictures to read, notebooks to run.

Instruments for notebooks (imported on first use, because they need the extra `lab`):

* `CostPanel`: what a longer context costs to read and to continue
* `ReadingPanel`: softmax attention and the gated delta net read one sentence
* `MemoryPanel`: what must be kept to write the next token
* `Panel`: the base of every instrument; `Number`, `Choice`, `Words`: its controls

Notebooks:

* `run_notebook`: run a notebook in a fresh kernel, with its time and memory
* `NotebookRun`: what came of it
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.lab.attention_instrument import CostPanel, MemoryPanel
    from toolkit.lab.controls import Choice, Number, Words
    from toolkit.lab.execute import NotebookRun, run_notebook
    from toolkit.lab.panel import Panel
    from toolkit.lab.reading_panel import ReadingPanel

_HOMES = {
    "Choice": "controls",
    "CostPanel": "attention_instrument",
    "MemoryPanel": "attention_instrument",
    "NotebookRun": "execute",
    "Number": "controls",
    "Panel": "panel",
    "ReadingPanel": "reading_panel",
    "Words": "controls",
    "run_notebook": "execute",
}

__all__ = [
    "Choice",
    "CostPanel",
    "MemoryPanel",
    "NotebookRun",
    "Number",
    "Panel",
    "ReadingPanel",
    "Words",
    "run_notebook",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"toolkit.lab.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'toolkit.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
