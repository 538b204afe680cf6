"""The panels that the site replays, their settings, and the notebook cells that show them.

None of them measures times, which would be those of another machine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import toolkit.lab
from toolkit.lab.kit.panel import Panel
from toolkit.lab.site.replay import Values


@dataclass(frozen=True)
class Replayed:
    """A panel of the site."""

    page: str  # its notebook, such as `"notebooks/mixers"`
    cell: str  # the beginning of a line in the cell that shows it
    panel: str  # its name in `toolkit.lab`
    grid: Mapping[str, Values]  # control -> its values; other controls are fixed
    # Initial values that differ from those of a new panel
    start: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None  # function to call on the panel before recording

    def make(self) -> Panel:
        """The panel as it starts."""
        panel = getattr(toolkit.lab, self.panel)(**self.start)
        if self.prepare is not None:
            self.prepare(panel)
        return panel


def _search_all(panel: Any) -> None:
    """Run the search by every method, and look at the last round of the first."""
    for method in ("probe", "robust", "autolrs"):
        panel.method = method
        panel.run()


_SHAPES = {
    "constant": lambda peak: ((0.0, peak), (1.0, peak)),
    "to zero in a line": lambda peak: ((0.0, peak), (1.0, 0.0)),
    "held, then to zero": lambda peak: ((0.0, peak), (0.6, peak), (1.0, 0.0)),
    "warmed up, then to zero": lambda peak: ((0.0, 0.0), (0.1, peak), (1.0, 0.0)),
    "a tenth after half": lambda peak: (
        (0.0, peak), (0.5, peak), (0.51, peak / 10), (1.0, peak / 10),
    ),
}  # fmt: skip
_SCHEDULES = {
    f"{peak:.0%} of the largest rate, {shape}": points(peak)
    for peak in (1.0, 0.5, 0.2)
    for shape, points in _SHAPES.items()
}  # fmt: skip

REPLAYED: dict[str, Replayed] = {
    "attention-costs": Replayed(
        "notebooks/attention", "costs = CostPanel(", "CostPanel",
        {
            "context_length": None, "head_size": (64, 128), "window": (512, 4096), "unit": None,
            "machine": ("h100", "tpu v6e"),
        },
        {"heads": 4, "head_size": 64, "window": 512, "machine": "h100"},
    ),
    "attention-reading": Replayed(
        "notebooks/attention", "reading = ReadingPanel(", "ReadingPanel",
        {
            "token": range(1, 17),
            "window": (4, 8, 24),
            "keep": (0.7, 0.8, 0.9, 0.95, 1.0),
        },
    ),
    "attention-memory": Replayed(
        "notebooks/attention", "memory = MemoryPanel(", "MemoryPanel",
        {
            "context_length": None, "layers": (16, 32, 80), "sequences": (1, 8, 64), "device": None,
        },
        {"context_length": 32768},
    ),
    "collectives-cut": Replayed(
        "notebooks/collectives", 'CutPanel(network="torus:4x4"', "CutPanel",
        {
            "network": ("mesh:3x3", "torus:4x4"), "schedule": None, "cable": (2, 3, 5, 9),
            "speed": (0.0, 0.25, 0.5, 1.0, 2.0),
        },
        {"network": "torus:4x4", "cable": 5, "speed": 0.25, "schedule": "rings"},
    ),
    "collectives-ring": Replayed(
        "tutorials/05_ring", "RingPanel(", "RingPanel",
        {"devices": (2, 3, 4, 6, 8, 12, 16), "collective": None, "ways": None},
        {"collective": "all-gather"},
    ),
    "experts-text": Replayed(
        "notebooks/experts", 'ExpertPanel(model="balanced"', "ExpertPanel",
        {"model": None, "layer": None, "capacity": (1.0, 1.25, 1.5, 2.0, 4.0), "devices": (1, 4)},
        {"model": "balanced", "layer": 2, "capacity": 1.0, "devices": 4},
    ),
    "experts-bias": Replayed(
        "notebooks/experts", "balance = BalancePanel(", "BalancePanel",
        {"model": None, "rate": None, "step": (0, 20, 40, 60, 100, 200, 400)},
    ),
    "experts-bytes": Replayed(
        "notebooks/experts", 'DispatchPanel(model="qwen3"', "DispatchPanel",
        {"model": None, "devices": None, "capacity": (1.0, 1.25, 2.0)},
    ),
    "experts-layout": Replayed(
        "notebooks/experts", 'LayoutPanel(model="plain"', "LayoutPanel",
        {"model": None, "layer": None, "node": None, "step": None},
    ),
    "latent-decode": Replayed(
        "notebooks/latent", 'DecodePanel(model="deepseek_v3", degree=8', "DecodePanel",
        {
            "degree": None,
            "slices": (2, 4),
            "batch": (1, 16, 64, 256),
            "context": (2048, 8192, 32768, 131072),
        },
        {"degree": 8, "slices": 4, "context": 131072, "chip": 1},
    ),
    "latent-slices": Replayed(
        "notebooks/latent", 'SlicePanel(basis="hadamard"', "SlicePanel",
        {"basis": None, "norm": None, "slices": None, "head": None},
    ),
    "looped-bytes": Replayed(
        "notebooks/looped", 'LoopPanel(pattern="gdn full"', "LoopPanel",
        {"loops": None, "token": (16, 28, 40, 53), "pattern": None},
        {"pattern": "gdn full", "loops": 6, "token": 53},
    ),
    "looped-states": Replayed(
        "notebooks/looped", "states = LoopStatePanel(", "LoopStatePanel",
        {"loops": None, "context_length": (64, 1024, 16384, 262144), "pattern": None},
    ),
    "mixers": Replayed(
        "notebooks/mixers", 'MixerPanel(left="retention", right="gdn", token=19', "MixerPanel",
        {
            "token": (4, 9, 14, 19, 24),
            "left": ("linear", "retention", "mamba2"),
            "head": None,
            "decay_strength": (0.0, 1.0, 4.0),
        },
        {"token": 19, "head": 3, "decay_strength": 0, "write_strength": 1},
    ),
    "mixers-as-begun": Replayed(
        "notebooks/mixers", "panel = MixerPanel(", "MixerPanel",
        {"token": (4, 9, 14, 19, 24), "left": ("linear", "retention", "mamba2"), "head": None},
        {"token": 19},
    ),
    "mixer-costs": Replayed(
        "notebooks/mixers", "costs = MixerCostPanel(", "MixerCostPanel",
        {
            "context_length": None,
            "left": ("linear", "retention", "mamba2"),
            "right": ("gdn", "kda"),
            "head_size": (64, 128, 256),
        },
    ),
    "search": Replayed(
        "notebooks/lr_search", 'whole = SearchPanel(', "SearchPanel",
        {"method": None, "round": range(1, 46)},
        {"problem": "quadratic 10", "method": "autolrs", "proposals": "sequential"},
        _search_all,
    ),
    "race": Replayed(
        "notebooks/lr_search", "race = RacePanel(", "RacePanel",
        {
            "points": _SCHEDULES,
            "problem": ("quadratic 10", "quadratic 100"),
            "budget": (1000, 4000),
        },
    ),
    "pipelines": Replayed(
        "notebooks/pipelines", "hands = PipelinePanel(", "PipelinePanel",
        {
            "schedule": None, "slow": (0, 2), "times": (1.0, 1.5, 2.0, 3.0),
            "delay": (0.0, 0.5, 1.0), "device": (0, 3),
        },
        {"times": 1.0, "delay": 0.5},
    ),
    "pipelines-microbatches": Replayed(
        "notebooks/pipelines", 'PipelinePanel(schedule="ZB-V"', "PipelinePanel",
        {"schedule": None, "microbatches": (4, 8, 16, 32)},
        {"schedule": "ZB-V", "times": 1.0, "delay": 0.25},
    ),
    "sharding-mesh": Replayed(
        "notebooks/sharding", 'MeshPanel(mesh="2x4", scheme="zero3+tensor"', "MeshPanel",
        {"mesh": None, "scheme": None, "device": None},
        {"mesh": "2x4", "scheme": "zero3+tensor", "device": 6},
    ),
    "sharding-step": Replayed(
        "notebooks/sharding", "step = StepPanel(", "StepPanel",
        {"mesh": None, "scheme": None, "collective": None},
    ),
    "sparsity": Replayed(
        "notebooks/sparsity", 'DropPanel(system="hata"', "DropPanel",
        {"system": None, "budget": (64, 256, 1024), "context": None},
        {"system": "hata", "budget": 64, "context": 4096, "question": 3},
    ),
    "speedups": Replayed(
        "notebooks/speedups", "reader = SpeedupPanel(", "SpeedupPanel",
        {"method": None, "work": None, "batch": (0, 64), "chip": ("h100", "tpu v6e")},
        {"chip": "tpu v6e", "work": "step", "batch": 64},
    ),
    "planning-memory": Replayed(
        "notebooks/planning", 'ChipMemoryPanel(model="llama-3-8b"', "ChipMemoryPanel",
        {
            "model": ("llama-3.2-1b", "llama-3-8b", "llama-3-70b"), "fsdp": (1, 8, 64),
            "recompute": None, "context": (1024, 4096, 16384, 65536), "chip": ("h100", "v5e"),
        },
        {"recompute": "layer"},
    ),
    "planning-fits": Replayed(
        "notebooks/planning", "FitsPanel(", "FitsPanel",
        {"chip": ("a10g", "h100", "v5p"), "scheme": None, "context": (4096,)},
    ),
    "planning-plan": Replayed(
        "notebooks/planning", "PlanPanel(", "PlanPanel",
        {"model": ("llama-3.2-1b", "llama-3-8b", "llama-3-70b"), "chip": ("h100", "v5p"),
         "chips": (8, 64, 128)},
    ),
}  # fmt: skip

ELSEWHERE: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("notebooks/collectives", 'Lesson("collectives").predict('): (
        "collectives-cut",
        {"network": "mesh 3 x 3", "schedule": "the best trees", "cable": "3", "speed": "0.5"},
    ),
    ("notebooks/experts", 'Lesson("experts").predict('): (
        "experts-text", {"model": "without a balance loss", "devices": "1"},
    ),
    ("tutorials/13_who_goes_where", 'lesson.predict("fullest", ExpertPanel'): (
        "experts-text", {"model": "without a balance loss", "capacity": "1.25", "devices": "1"},
    ),
    ("tutorials/13_who_goes_where", 'lesson.predict("pairs_moved", BalancePanel'): (
        "experts-bias", {},
    ),
    ("notebooks/latent", 'Lesson("latent").predict('): (
        "latent-decode", {"degree": "2", "slices": "g = 2", "context": "32,768"},
    ),
    ("notebooks/looped", 'Lesson("looped").predict('): (
        "looped-bytes", {"loops": "4", "pattern": "two sliding windows"},
    ),
    ("notebooks/lr_search", 'Lesson("lr_search").predict('): ("search", {"round": "6"}),
    ("notebooks/pipelines", 'Lesson("pipelines").predict('): (
        "pipelines", {"delay": "0", "times": "2"},
    ),
    ("notebooks/planning", 'Lesson("planning").predict('): (
        "planning-memory", {"recompute": "none"},
    ),
    ("notebooks/sharding", 'Lesson("sharding").predict('): (
        "sharding-mesh", {"scheme": "zero1", "device": "3"},
    ),
    ("notebooks/sparsity", 'Lesson("sparsity").predict('): (
        "sparsity", {"system": "quest", "context": "1,024 tokens"},
    ),
    ("notebooks/speedups", 'Lesson("speedups").predict('): (
        "speedups",
        {"method": "Gated DeltaNet", "work": "forward and backward", "batch": "every batch"},
    ),
    ("tutorials/04_meshes", "MeshPanel("): ("sharding-mesh", {"scheme": "tensor"}),
    ("tutorials/06_shard_transformer", "StepPanel("): ("sharding-step", {"scheme": "tensor"}),
    ("tutorials/07_pipeline", "PipelinePanel("): (
        "pipelines", {"schedule": "ZB-V", "times": "1", "delay": "0.5"},
    ),
    ("tutorials/11_skip_and_compress", 'lesson.predict("cut_latent", SlicePanel'): (
        "latent-slices", {},
    ),
    ("tutorials/18_known_rates", 'lesson.predict("horizon", RacePanel'): ("race", {}),
    ("tutorials/01_attention_cost", 'lesson.predict("doubling", CostPanel'): (
        "attention-costs", {},
    ),
    ("tutorials/10_attention_memory", 'lesson.predict("same_key", MixerPanel'): (
        "mixers-as-begun", {"token": "24"},
    ),
}  # fmt: skip
"""More cells that show one of them, and where its controls start there, in words."""


def shown_in(page: str, source: str) -> tuple[str, dict[str, str]]:
    """The name of the panel that a cell of a page shows, empty if none, and where it starts."""
    lines = f"\n{source}"
    for name, replay in REPLAYED.items():
        if replay.page == page and f"\n{replay.cell}" in lines:
            return name, {}
    for (other, cell), found in ELSEWHERE.items():
        if other == page and f"\n{cell}" in lines:
            return found
    return "", {}
