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
* `MeshPanel`: who holds what of a train step on eight devices, by mesh and scheme
* `StepPanel`: what the compiled step sends, beside the textbook, each collective with its blame
* `DecodePanel`: latent attention on several chips: who holds what, what a decode step takes
* `SlicePanel`: a trained latent cut in slices: each softmax beside the true one, and the error
* `DropPanel`: sparse decoding of a long text: what is read, what is missed, what it costs
* `FitPanel`: Tactic's fit of a / x + b, where it stops, and where it might have
* `CodesPanel`: hash bits and product-quantised codes against true scores, and one token's own
* `SalePanel`: which tiles of a prompt SALE keeps at a threshold, and why
* `StalePanel`: how long AdaSpa's map of tiles stays good from one denoising step to the next
* `AcceptancePanel`: which sparse drafts the rows of a batch keep, round by round
* `ChipMemoryPanel`: what one chip holds in a train step, by category, against its memory
* `FitsPanel`: which models fit how many chips, under six schemes
* `PlanPanel`: the planner's strategies with reasons, its model against compiled programs
* `SpeedupPanel`: every recorded time beside its rivals and what other chips could do
* `TimelinePanel`: a compiled step in lanes of computing and collectives, on slower links
* `Panel`: the base of every instrument; `Number`, `Choice`, `Words`: its controls

Lessons (`lessons/`):

* `Lesson`: locked predictions, exercises that check themselves, hints, progress kept on disk
* `gather`: one page for a teacher from what learners handed in

Notebooks:

* `run_notebook`: run a notebook in a fresh kernel, with its time and memory
* `NotebookRun`: what came of it

The tour:

* `run_tour`: the whole story on this machine, as one page

What trains and writes language models is found here too; it stands in `toolkit.language`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.lab.attention.instrument import CostPanel, MemoryPanel
    from toolkit.lab.attention.reading_panel import ReadingPanel
    from toolkit.lab.kit.controls import Choice, Number, Words
    from toolkit.lab.kit.panel import Panel
    from toolkit.lab.latent.decode_panel import DecodePanel
    from toolkit.lab.latent.slice_panel import SlicePanel
    from toolkit.lab.lessons.lesson import Lesson
    from toolkit.lab.lessons.pages import gather
    from toolkit.lab.looped.panel import LoopPanel, LoopStatePanel
    from toolkit.lab.lr.race_panel import RacePanel
    from toolkit.lab.lr.search_panel import SearchPanel
    from toolkit.lab.mixers.panel import MixerCostPanel, MixerPanel
    from toolkit.lab.notebooks.execute import NotebookRun, run_notebook
    from toolkit.lab.planning.fits_panel import FitsPanel
    from toolkit.lab.planning.memory_panel import ChipMemoryPanel
    from toolkit.lab.planning.plan_panel import PlanPanel
    from toolkit.lab.planning.timeline_panel import TimelinePanel
    from toolkit.lab.sharding.mesh_panel import MeshPanel
    from toolkit.lab.sharding.step_panel import StepPanel
    from toolkit.lab.sparsity.acceptance_panel import AcceptancePanel
    from toolkit.lab.sparsity.codes_panel import CodesPanel
    from toolkit.lab.sparsity.drop_panel import DropPanel
    from toolkit.lab.sparsity.fit_panel import FitPanel
    from toolkit.lab.sparsity.sale_panel import SalePanel
    from toolkit.lab.sparsity.stale_panel import StalePanel
    from toolkit.lab.speedups.panel import SpeedupPanel
    from toolkit.lab.tour.tour import run_tour

_HOMES = {
    "toolkit.lab.attention.instrument": ("CostPanel", "MemoryPanel"),
    "toolkit.lab.attention.reading_panel": ("ReadingPanel",),
    "toolkit.lab.kit.controls": ("Choice", "Number", "Words"),
    "toolkit.lab.kit.panel": ("Panel",),
    "toolkit.lab.latent.decode_panel": ("DecodePanel",),
    "toolkit.lab.latent.slice_panel": ("SlicePanel",),
    "toolkit.lab.lessons.lesson": ("Lesson",),
    "toolkit.lab.lessons.pages": ("gather",),
    "toolkit.lab.looped.panel": ("LoopPanel", "LoopStatePanel"),
    "toolkit.lab.lr.race_panel": ("RacePanel",),
    "toolkit.lab.lr.search_panel": ("SearchPanel",),
    "toolkit.lab.mixers.panel": ("MixerCostPanel", "MixerPanel"),
    "toolkit.lab.notebooks.execute": ("NotebookRun", "run_notebook"),
    "toolkit.lab.planning.fits_panel": ("FitsPanel",),
    "toolkit.lab.planning.memory_panel": ("ChipMemoryPanel",),
    "toolkit.lab.planning.plan_panel": ("PlanPanel",),
    "toolkit.lab.planning.timeline_panel": ("TimelinePanel",),
    "toolkit.lab.sharding.mesh_panel": ("MeshPanel",),
    "toolkit.lab.sharding.step_panel": ("StepPanel",),
    "toolkit.lab.sparsity.acceptance_panel": ("AcceptancePanel",),
    "toolkit.lab.sparsity.codes_panel": ("CodesPanel",),
    "toolkit.lab.sparsity.drop_panel": ("DropPanel",),
    "toolkit.lab.sparsity.fit_panel": ("FitPanel",),
    "toolkit.lab.sparsity.sale_panel": ("SalePanel",),
    "toolkit.lab.sparsity.stale_panel": ("StalePanel",),
    "toolkit.lab.speedups.panel": ("SpeedupPanel",),
    "toolkit.lab.tour.tour": ("run_tour",),
    "toolkit.language": (
        "TrainedModel", "TrainingRun", "export_language_model", "load_language_model",
        "stream_text", "train_language_model",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AcceptancePanel",
    "ChipMemoryPanel",
    "Choice",
    "CodesPanel",
    "CostPanel",
    "DecodePanel",
    "DropPanel",
    "FitPanel",
    "FitsPanel",
    "Lesson",
    "LoopPanel",
    "LoopStatePanel",
    "MemoryPanel",
    "MeshPanel",
    "MixerCostPanel",
    "MixerPanel",
    "NotebookRun",
    "Number",
    "Panel",
    "PlanPanel",
    "RacePanel",
    "ReadingPanel",
    "SalePanel",
    "SearchPanel",
    "SlicePanel",
    "SpeedupPanel",
    "StalePanel",
    "StepPanel",
    "TimelinePanel",
    "Words",
    "gather",
    "run_notebook",
    "run_tour",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'toolkit.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
