"""Interactive panels, lessons, notebooks and the tour.

Instruments for notebooks (imported on first use, because they need the extra `lab`):

* `CostPanel`: the cost of reading and of continuing a longer context
* `ReadingPanel`: softmax attention and the gated delta net read one sentence
* `OnlinePanel`: softmax in blocks, whose maximum rises and whose sums are rescaled
* `MemoryPanel`: the state that must be kept to write the next token
* `MixerPanel`: two linear-time mixers on one text: state, effective memory, decay
* `MixerCostPanel`: the cost of one more token for the two and for softmax attention
* `LoopPanel`: the influences on one byte and its prediction after each loop of a small model
* `LoopStatePanel`: what each loop changes, carries and costs in that model
* `SearchPanel`: a learning-rate search round by round: candidates, fits and cost
* `RacePanel`: a schedule drawn by hand compared with tuned, searched and best ones
* `MeshPanel`: the shards of a train step on eight devices, by mesh and scheme
* `StepPanel`: collectives of the compiled step and of the textbook, with their causes
* `DecodePanel`: latent attention on several chips: shards, and the time of a decode step
* `SlicePanel`: a trained latent in slices: each softmax, the true one, and the error
* `ExpertPanel`: the experts of a text's tokens, their loads, and what a capacity drops
* `BalancePanel`: a bias that evens the loads of a trained router's experts, step by step
* `DispatchPanel`: bytes sent for a layer of experts, by way of dispatch
* `LayoutPanel`: experts placed anew by their loads as a text moves on
* `PipelinePanel`: a pipeline schedule that plays, with its memory, bubble, bound and messages
* `CutPanel`: a network's loads and its tightest cut, with a cable slowed or cut
* `ChunksPanel`: a collective chunk by chunk, along rings and along the best trees
* `RingPanel`: a collective on a ring, round by round: messages, sums, bytes
* `SentPanel`: bytes of a gradient by scheme, loads of the owners of rows, loss against bytes
* `LanesPanel`: which gradients are worth compressing, on a timeline, by four searches
* `DropPanel`: sparse decoding of a long text: tokens read and missed, and the cost
* `FitPanel`: Tactic's fit of a / x + b, where it stops, and where it could have stopped
* `CodesPanel`: hash bits and product-quantised codes against true scores
* `SalePanel`: which tiles of a prompt SALE keeps at a threshold, and why
* `StalePanel`: how AdaSpa's map of tiles ages over denoising steps
* `AcceptancePanel`: sparse drafts accepted by the rows of a batch, round by round
* `WritingPanel`: a text written with a small cache: tokens read, kept and evicted, word by word
* `RequestsPanel`: requests on two chips that play: queue, prompts, texts, evictions, pages
* `GoodputPanel`: the share of requests within their bounds by load, and its knee, by policy
* `ChipMemoryPanel`: memory of one chip in a train step, by category
* `FitsPanel`: which models fit how many chips, under six schemes
* `PlanPanel`: the planner's strategies with reasons, its model against compiled programs
* `SpeedupPanel`: recorded times, their rivals, and the bounds of other chips
* `TimelinePanel`: a compiled step in lanes of computation and collectives, on slower links
* `Panel`: the base of every instrument; `Number`, `Choice`, `Words`: its controls

Lessons (`lessons/`):

* `Lesson`: locked predictions, exercises that check themselves, hints, progress kept on disk
* `gather`: one page for a teacher from the learners' exports
* `Room`: the same live, for learners who hand in over the network

Notebooks:

* `run_notebook`: run a notebook in a fresh kernel, with its time and memory
* `NotebookRun`: its result

The tour:

* `run_tour`: train, compare and shard models on this machine, as one page

The functions of `toolkit.language` can be imported from here too.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.lab.notebooks.waiting import show_working

if TYPE_CHECKING:
    from toolkit.lab.attention.instrument import CostPanel, MemoryPanel
    from toolkit.lab.attention.online import OnlinePanel
    from toolkit.lab.attention.reading import ReadingPanel
    from toolkit.lab.collectives.chunks import ChunksPanel
    from toolkit.lab.collectives.cut import CutPanel
    from toolkit.lab.collectives.ring import RingPanel
    from toolkit.lab.experts.balance import BalancePanel
    from toolkit.lab.experts.dispatch import DispatchPanel
    from toolkit.lab.experts.layout import LayoutPanel
    from toolkit.lab.experts.tokens import ExpertPanel
    from toolkit.lab.gradients.lanes import LanesPanel
    from toolkit.lab.gradients.sent import SentPanel
    from toolkit.lab.kit.controls import Choice, Number, Words
    from toolkit.lab.kit.panel import Panel
    from toolkit.lab.latent.decode import DecodePanel
    from toolkit.lab.latent.slice import SlicePanel
    from toolkit.lab.lessons.lesson import Lesson
    from toolkit.lab.lessons.pages import gather
    from toolkit.lab.lessons.room import Room
    from toolkit.lab.looped.panel import LoopPanel
    from toolkit.lab.looped.state import LoopStatePanel
    from toolkit.lab.lr.race import RacePanel
    from toolkit.lab.lr.search_panel import SearchPanel
    from toolkit.lab.mixers.panel import MixerCostPanel, MixerPanel
    from toolkit.lab.notebooks.execute import NotebookRun, run_notebook
    from toolkit.lab.pipelines.pipeline import PipelinePanel
    from toolkit.lab.planning.fits import FitsPanel
    from toolkit.lab.planning.memory import ChipMemoryPanel
    from toolkit.lab.planning.plan import PlanPanel
    from toolkit.lab.planning.timeline import TimelinePanel
    from toolkit.lab.serving.gantt import RequestsPanel
    from toolkit.lab.serving.knee import GoodputPanel
    from toolkit.lab.sharding.mesh import MeshPanel
    from toolkit.lab.sharding.step import StepPanel
    from toolkit.lab.sparsity.acceptance import AcceptancePanel
    from toolkit.lab.sparsity.codes import CodesPanel
    from toolkit.lab.sparsity.drop import DropPanel
    from toolkit.lab.sparsity.fit import FitPanel
    from toolkit.lab.sparsity.sale import SalePanel
    from toolkit.lab.sparsity.stale import StalePanel
    from toolkit.lab.sparsity.writing import WritingPanel
    from toolkit.lab.speedups.speedup import SpeedupPanel
    from toolkit.lab.tour.tour import run_tour

# Where each name is defined, as the imports above say, which do not run.
_HOME_OF = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
_HOME_OF |= dict.fromkeys(
    ("TrainedModel", "TrainingRun", "export_language_model", "load_language_model", "stream_text",
     "train_language_model"), "toolkit.language",
)  # fmt: skip

__all__ = [
    "AcceptancePanel", "BalancePanel", "ChipMemoryPanel", "Choice", "ChunksPanel", "CodesPanel",
    "CostPanel", "CutPanel", "DecodePanel", "DispatchPanel", "DropPanel", "ExpertPanel", "FitPanel",
    "FitsPanel", "GoodputPanel", "LanesPanel", "LayoutPanel", "Lesson", "LoopPanel",
    "LoopStatePanel", "MemoryPanel", "MeshPanel", "MixerCostPanel", "MixerPanel", "NotebookRun",
    "Number", "OnlinePanel", "Panel", "PipelinePanel", "PlanPanel", "RacePanel", "ReadingPanel",
    "RequestsPanel", "RingPanel", "Room", "SalePanel", "SearchPanel", "SentPanel", "SlicePanel",
    "SpeedupPanel", "StalePanel", "StepPanel", "TimelinePanel", "Words", "WritingPanel", "gather",
    "run_notebook", "run_tour",
]  # fmt: skip


LOADING_SECONDS = 3  # for jax and what an instrument needs, on two cores


def __getattr__(name: str) -> Any:
    if home := _HOME_OF.get(name):
        if "toolkit.figures" not in sys.modules:
            show_working(LOADING_SECONDS)
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'toolkit.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
