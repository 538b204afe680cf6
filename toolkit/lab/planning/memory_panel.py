"""The memory of one chip in a train step, and its limit."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.memory_plots import CascadePlot
from toolkit.lab.planning.memory_view import ChipMemoryView, chip_memory
from toolkit.planning.models import DENSE
from toolkit.planning.strategy import RECOMPUTE

CHIPS = ("a10g", "a100", "h100", "h200", "b200", "v5e", "v6e", "v5p")
CHIP = Choice(
    "Chip", "h100", {f"TPU {name}" if name[0] == "v" else name.upper(): name for name in CHIPS}
)


def _degree(label: str, default: int, high: int, explanation: str) -> Choice:
    degrees = [1 << power for power in range(high.bit_length())]
    return Choice(
        label, default, {str(degree): degree for degree in degrees}, explanation=explanation
    )


class ChipMemoryPanel(Panel):
    """The memory of the fullest chip in one train step, by category, and its limit.

    Example:
        >>> panel = ChipMemoryPanel(model="llama-3-8b", fsdp=8, recompute="layer")
        >>> panel.view.prediction.fits
        True
    """

    title = "What does one chip hold?"
    figure_size = (9.6, 4.2)

    model = Choice("Model", "llama-3-8b", {name: name for name in DENSE})
    chip = CHIP
    replicas = _degree("Data", 1, 64, "Replicas of the parameters")
    fsdp = _degree("FSDP", 8, 256, "Shards of parameters, gradients and optimiser state (ZeRO-3)")
    tensor = _degree("Tensor", 1, 8, "Shards of heads, hidden units and vocabulary")
    pipeline = _degree("Pipeline", 1, 8, "Stages of layers; as many microbatches as stages")
    shard_optimizer = Choice(
        "Optimiser", False, {"whole in every replica": False, "sharded over data (ZeRO-1)": True}
    )
    recompute = Choice(
        "Recompute", "none", {name: name for name in RECOMPUTE},
        explanation="What the backward pass computes anew",
    )  # fmt: skip
    sequences = Number(
        "Sequences", 1, low=1, high=32, powers_of_two=True,
        explanation="Of each replica or FSDP shard, per microbatch",
    )  # fmt: skip
    context = Number(
        "Context length", 4096, low=1024, high=131_072, powers_of_two=True,
        explanation="Tokens per sequence",
    )  # fmt: skip

    def compute(self, **state: Any) -> ChipMemoryView:
        return chip_memory(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [CascadePlot(figure.add_axes((0.115, 0.11, 0.865, 0.73)))]
