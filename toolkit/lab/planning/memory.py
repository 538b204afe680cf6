"""The memory of one chip in a train step, and its limit."""

from dataclasses import dataclass

from matplotlib.axes import Axes

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.measure.words import counted
from toolkit.planning import Memory, Prediction, Strategy, predict
from toolkit.planning.models import DENSE
from toolkit.planning.strategy import RECOMPUTE

CHUNK = 256  # tokens of a sequence whose logits exist at one time


@dataclass(frozen=True)
class ChipMemoryView(View):
    """A prediction, its memory as a cascade: each category starts where the last one ends."""

    model: str
    prediction: Prediction

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category."""
        return self.prediction.memory._asdict()

    def data(self) -> Data:
        sizes = self.categories | {"total": self.prediction.memory.total}
        return {
            "category, modelled": [*sizes],
            "per chip (bytes)": [*sizes.values()],
            "of the chip's memory (share)": [
                size / self.prediction.limit for size in sizes.values()
            ],
        }

    def sentence(self) -> str:
        found = self.prediction
        largest = sorted(self.categories.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {in_words(size, 'bytes')}" for name, size in largest)
        verdict = "fits" if found.fits else "does not fit"
        return (
            f"{self.model} on {found.cluster.name}, {found.strategy}, "
            f"{counted(found.batch, 'sequence')} of {found.sequence_length:,} tokens: "
            f"{in_words(found.memory.total, 'bytes')} per chip {verdict} "
            f"{in_words(found.limit, 'bytes')}. Largest: {parts}. A step takes "
            f"{in_words(found.step_seconds, 'seconds')}. All modelled, nothing is compiled."
        )

    def footnote(self) -> str:
        found = self.prediction
        return (
            f"{self.model} on {found.cluster.name}: {found.strategy}; {found.batch} x "
            f"{found.sequence_length:,} tokens. Modelled."
        )


def chip_memory(
    *, model: str, chip: str, replicas: int, fsdp: int, tensor: int, pipeline: int,
    shard_optimizer: bool, recompute: str, sequences: int, context: int,
) -> ChipMemoryView:  # fmt: skip
    """The memory of a chip, with as many microbatches as pipeline stages."""
    strategy = Strategy(
        data=replicas, fsdp=fsdp, tensor=tensor, pipeline=pipeline, shard_optimizer=shard_optimizer,
        recompute=recompute, microbatches=pipeline,
        head_chunks=context // CHUNK if context % CHUNK == 0 else 1,
    )  # fmt: skip
    batch = sequences * strategy.batch_shards * pipeline
    chips = f"{chip}:{strategy.chips}"
    return ChipMemoryView(
        model, predict(model, chips, strategy, batch=batch, sequence_length=context)
    )


ROWS = (*Memory._fields, "total")


class CascadePlot(Plot):
    """Each category starts where the last one ends; the total beside the limit."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Bytes on the chip that holds most (modelled)", pad=24)
        axes.grid(False)
        self.name_rows(ROWS)
        # Shares of the longer of total and limit: limits that stay make a redraw cheap.
        axes.set(xticks=[], xlim=(0, 1.1), ylim=(len(ROWS) - 0.5, -0.5))
        axes.spines["bottom"].set_visible(False)
        flat = {"is_flat": True, "color": look("full").colour, "linewidth": 0}
        self.bars = self.bars_at(range(len(ROWS)), 0.62, **flat)
        self._limit = self.line(color=ACCENT, linewidth=2, linestyle="--")
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the limit does not cross
        self._words = [
            self.text(0, row, fontsize=9.5, va="center", bbox=behind) for row in range(len(ROWS))
        ]
        self._limit_words = self.text(
            0, -0.6, va="bottom", fontsize=9.5, color=ACCENT, fontweight="bold"
        )

    def show(self, view: ChipMemoryView) -> None:
        found = view.prediction
        total, limit = found.memory.total, found.limit
        longest, start = max(total, limit), 0
        for bar, words, size in zip(
            self.bars, self._words, [*view.categories.values(), total], strict=True
        ):
            is_total = words is self._words[-1]
            left = 0 if is_total else start
            bar.set(x=left / longest, width=size / longest)
            if is_total:
                bar.set(hatch="" if found.fits else "//", edgecolor="white")
            words.set(
                x=(left + size) / longest + 0.01, text=in_words(size, "bytes"),
                fontweight="bold" if is_total else "normal", color=INK if size else FAINT,
            )  # fmt: skip
            start += size
        self._limit.set_data([limit / longest] * 2, [-0.5, len(ROWS) - 0.5])
        verdict = "fits" if found.fits else "does not fit"
        has = f"the {in_words(limit, 'bytes')} of {found.cluster.chip.name}"
        self._limit_words.set(
            x=limit / longest, text=f"{verdict} {has}",
            ha="right" if limit > longest / 2 else "left",
        )  # fmt: skip


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

    compute = staticmethod(chip_memory)
    places = ((CascadePlot, (0.115, 0.11, 0.865, 0.73)),)
