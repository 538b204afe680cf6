"""Panels to move, pictures to read, notebooks to run.

Instruments for notebooks (imported on first use, because they need the extra `lab`):

* `CostPanel`: what a longer context costs to read and to continue
* `ReadingPanel`: softmax attention and the gated delta net read one sentence
* `MemoryPanel`: what must be kept to write the next token
* `MixerPanel`: two linear-time mixers on one text: state, effective memory, decay
* `MixerCostPanel`: what one more token costs the two, beside softmax attention
* `LoopPanel`: what one byte sees and says after each loop of a small trained looped model
* `LoopStatePanel`: what each loop changes, carries and costs there
* `SearchPanel`: a search of the learning rate, round by round: what it tries, thinks and pays
* `RacePanel`: a schedule drawn by hand against tuned, searched and best ones
* `Panel`: the base of every instrument; `Number`, `Choice`, `Words`: its controls

Notebooks:

* `run_notebook`: run a notebook in a fresh kernel, with its time and memory
* `NotebookRun`: what came of it

Language models on text:

* `train_language_model`: train, or go on training, the run in a folder; takes a `TrainingRun`,
  returns a `TrainedModel`
* `load_language_model`: the model with the newest parameters of a run's folder, or of a file
* `export_language_model`: a run's model as one small file, with the record of its making
* `stream_text`: continue a prompt, piece by piece
* `run_tour`: the whole story on this machine, as one page
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.lab.attention_instrument import CostPanel, MemoryPanel
    from toolkit.lab.controls import Choice, Number, Words
    from toolkit.lab.execute import NotebookRun, run_notebook
    from toolkit.lab.export import export_language_model
    from toolkit.lab.language_model import (
        TrainedModel,
        TrainingRun,
        load_language_model,
        stream_text,
        train_language_model,
    )
    from toolkit.lab.looped_panel import LoopPanel
    from toolkit.lab.looped_state_panel import LoopStatePanel
    from toolkit.lab.mixer_cost_panel import MixerCostPanel
    from toolkit.lab.mixer_panel import MixerPanel
    from toolkit.lab.panel import Panel
    from toolkit.lab.race_panel import RacePanel
    from toolkit.lab.reading_panel import ReadingPanel
    from toolkit.lab.search_panel import SearchPanel
    from toolkit.lab.tour import run_tour

_HOMES = {
    "Choice": "controls",
    "CostPanel": "attention_instrument",
    "LoopPanel": "looped_panel",
    "LoopStatePanel": "looped_state_panel",
    "MemoryPanel": "attention_instrument",
    "MixerCostPanel": "mixer_cost_panel",
    "MixerPanel": "mixer_panel",
    "NotebookRun": "execute",
    "Number": "controls",
    "Panel": "panel",
    "RacePanel": "race_panel",
    "ReadingPanel": "reading_panel",
    "SearchPanel": "search_panel",
    "TrainedModel": "language_model",
    "TrainingRun": "language_model",
    "Words": "controls",
    "export_language_model": "export",
    "load_language_model": "language_model",
    "run_notebook": "execute",
    "run_tour": "tour",
    "stream_text": "language_model",
    "train_language_model": "language_model",
}

__all__ = [
    "Choice",
    "CostPanel",
    "LoopPanel",
    "LoopStatePanel",
    "MemoryPanel",
    "MixerCostPanel",
    "MixerPanel",
    "NotebookRun",
    "Number",
    "Panel",
    "RacePanel",
    "ReadingPanel",
    "SearchPanel",
    "TrainedModel",
    "TrainingRun",
    "Words",
    "export_language_model",
    "load_language_model",
    "run_notebook",
    "run_tour",
    "stream_text",
    "train_language_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"toolkit.lab.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'toolkit.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
