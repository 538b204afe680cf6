"""The cost of reading, continuing and storing a context, for softmax and the delta rule."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.bench.mixers.layer_costs import (
    CHUNK_OF_THE_KERNEL,
    DECODE,
    KEPT,
    MIXER_NAMES,
    PREFILL,
    Layer,
    Point,
    measure_pieces,
)
from toolkit.figures import ACCENT, INK
from toolkit.lab.attention.cost_curves import (
    BEHIND_WORDS,
    MEMORY,
    PHASES,
    CostCurves,
    CostView,
    Machine,
)
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.measure import Peak, hardware, in_words, published_peak

HERE = "here"
# Published machines to compare with, by the names `published_peak` knows them by.
_ACCELERATORS: dict[str, Peak] = {
    key: peak for key in ("h100", "h200", "tpu v6e") if (peak := published_peak(key)) is not None
}
DOTTED = (0, (1, 2))
PRECISION = {"float32": 4, "bfloat16": 2, "8 bit": 1}
HEAD_SIZES = {str(size): size for size in (32, 64, 128, 256)}
CONTEXT = Number(
    "Context (tokens)", 16384, low=128, high=1 << 20, powers_of_two=True,
    explanation="Tokens already read; the slider doubles, the box takes any number",
)  # fmt: skip
WINDOW = Number(
    "Window (tokens)", 1024, low=16, high=1 << 16, powers_of_two=True,
    explanation="What the sliding window sees",
)  # fmt: skip


@functools.cache
def this_machine() -> Machine:
    """The roofline of this machine, in a second and once per process; float32 only on a CPU."""
    found = hardware(measure=True)
    assert found.matmul_flops_per_second is not None
    assert found.memory_bytes_per_second is not None
    return Machine(
        f"this machine, {found.name}, rates measured here",
        found.matmul_flops_per_second,
        found.memory_bytes_per_second,
        4 if found.platform == "cpu" else 2,
    )


class Costs(CostView):
    """What reading a context costs, and one more token."""

    def sentence(self) -> str:
        parts = []
        for phase, what in ((PREFILL, "reading them"), (DECODE, "writing the next one")):
            ratio = self.cost(phase, "full") / self.cost(phase, self.last)
            parts.append(
                f"{what} costs {self.cell_of(phase, 'full')} with full softmax and "
                f"{self.cell_of(phase, self.last)} with the {self.names[self.last]} "
                f"({in_words(ratio, 'times')} as much)"
            )
        where = f" Modelled for {self.machine.name}." if self.machine else " Modelled."
        return f"At {self.chosen:,} tokens {parts[0]}; {parts[1]}.{where}{self._measured_words()}"

    def footnote(self) -> str:
        whose = f" for {self.machine.name}" if self.machine else ""
        markers = ".\nMarkers: measured here" if self.measured else ""
        # Seconds of a roofline: a token on a large GPU takes less than a program takes to start.
        launch = ", without the time to launch a program" if self.machine else ""
        return f"Lines: modelled{whose}{launch}{markers}. One layer, one sequence."

    def _measured_words(self) -> str:
        if not self.measured:
            return ""
        longest = max(point.tokens for point in self.measured)
        row, parts = self.row(self.row_of(longest)), []
        for phase in (PREFILL, DECODE):
            ours, peer = (
                row.get(f"{self.heading(phase, name)}, measured") for name in (self.last, "full")
            )
            if ours and peer:
                parts.append(f"{phase} {peer} against {ours}")
        return f" Measured here at {longest:,} tokens: {', '.join(parts)}."


def costs(
    *, context_length: int, machine: Machine, unit: str = "seconds",
    measured: tuple[Point, ...] = (), mixers: tuple[str, ...] = MIXER_NAMES, **sizes: Any,
) -> Costs:  # fmt: skip
    """Cost of one attention layer, one sequence: reading a context, and one token after it.

    `unit` is `"seconds"` (roofline on `machine`), `"FLOP"` or `"bytes"`; `measured` are times with
    these very sizes, those of a `Layer`; `mixers` are `"full"` and any other rows.
    """
    layer, is_time = Layer(bytes_per_number=machine.bytes_per_number, **sizes), unit == "seconds"
    return Costs(
        context_length, layer, dict(zip(mixers, mixers, strict=True)),
        {phase: counted._replace(unit=unit) for phase, counted in PHASES.items()},
        machine if is_time else None, measured if is_time else (),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Memory(CostView):
    """What a model keeps to write its next token, beside the memory of a device."""

    capacity_bytes: float
    capacity_name: str

    def sentence(self) -> str:
        layer = self.layer
        cache, state = (self.cost(KEPT, name) for name in ("full", self.last))
        words = ("the cache", "the state") if cache >= state else ("the state", "the cache")
        ratio = in_words(max(cache, state) / min(cache, state), "times")
        caption = (
            f"At {self.chosen:,} tokens the key-value cache holds {self.cell_of(KEPT, 'full')}, "
            f"the {self.names[self.last]}'s state {self.cell_of(KEPT, self.last)}: {words[0]} is "
            f"{ratio} {words[1]} (modelled; {layer.layers} layers, {layer.heads} heads of "
            f"{layer.head_size}, {layer.sequences} at once)."
        )
        share = cache / self.capacity_bytes
        if share >= 1:
            caption += f" The cache no longer fits one {self.capacity_name}."
        elif share >= 0.01:
            caption += f" The cache fills {share:.0%} of one {self.capacity_name}."
        return caption


def decode_memory(
    *, context_length: int, capacity_bytes: float, capacity_name: str,
    mixers: tuple[str, ...] = MIXER_NAMES, **sizes: Any,
) -> Memory:  # fmt: skip
    """Bytes that a whole model keeps between tokens; `sizes` are those of a `Layer`."""
    return Memory(
        context_length, Layer(**sizes), dict(zip(mixers, mixers, strict=True)), {KEPT: MEMORY},
        capacity_bytes=capacity_bytes, capacity_name=capacity_name,
    )  # fmt: skip


class CostPanel(Panel):
    """Cost of reading a context and of one more token: full softmax, sliding window, delta rule.

    Attributes:
        points: times measured so far, by the sizes they were measured with.

    Example:
        >>> panel = CostPanel(machine="h100", unit="FLOP")
        >>> panel.context_length = 4096
        >>> panel.view.sentence()[:15]
        'At 4,096 tokens'
    """

    title = "What does a longer context cost?"
    figure_size = (9.6, 4.9)
    button = "Measure here"

    context_length = CONTEXT
    heads = Number("Heads", 4, low=1, high=64)
    head_size = Choice("Head size", 64, HEAD_SIZES)
    window = WINDOW
    softmax = Choice(
        "Softmax prefill", "blockwise", {"in blocks": "blockwise", "scores in memory": "dense"},
        explanation="In blocks, a score never leaves the processor",
    )  # fmt: skip
    chunk = Choice(
        "Delta chunk", CHUNK_OF_THE_KERNEL,
        {"as the kernel does": CHUNK_OF_THE_KERNEL, **{str(n): n for n in (16, 32, 64, 128, 256)}},
        explanation="Tokens the gated delta net turns into one matrix product (modelled only)",
    )  # fmt: skip
    unit = Choice(
        "Show", "seconds", {"time": "seconds", "operations": "FLOP", "bytes moved": "bytes"}
    )
    machine = Choice(
        "Machine", HERE,
        {"this machine": HERE} | {f"{p.name} (published)": k for k, p in _ACCELERATORS.items()},
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self.points: dict[Layer, tuple[Point, ...]] = {}
        self._all_measured: set[Layer] = set()
        super().__init__(**values)

    def measure(self) -> None:
        """Measure with the current sizes, as the button does; results are kept.

        Raises:
            ValueError: when a mixer disagrees with its reference; nothing is timed then.
        """
        self.page.job.run()

    def compute(self, *, machine: str, **state: Any) -> Costs:
        if peak := _ACCELERATORS.get(machine):
            rates = peak.flops_per_second, peak.bytes_per_second
            return costs(machine=Machine(f"one {peak.name}, published rates", *rates, 2), **state)
        measured = self.points.get(measured_layer(**state), ())
        return costs(machine=this_machine(), measured=measured, **state)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.76, bottom=0.18, wspace=0.28)
        both = zip(figure.subplots(1, 2), PHASES.items(), strict=True)
        return [CostCurves(figure, axes, *plot) for axes, plot in both]

    def pieces(self) -> Iterator[Progress]:
        layer = measured_layer(**self.state)
        if layer in self._all_measured:
            yield 1, 1, "already measured with these sizes"
            return
        found: list[Point] = []
        for done, total, what, new in measure_pieces(layer):
            found += new
            self.points[layer] = tuple(found)
            if done == total:  # a stopped measurement keeps its points and can be taken up again
                self._all_measured.add(layer)
            yield done, total, what


def measured_layer(
    *, heads: int, head_size: int, window: int, softmax: str, **others: Any
) -> Layer:
    """The controls of a `CostPanel` on which a measurement depends."""
    return Layer(heads, head_size, window, softmax=softmax)


class MemoryPanel(Panel):
    """Bytes kept between tokens: the key-value cache against the recurrent state.

    Example:
        >>> panel = MemoryPanel(layers=32, sequences=8)
        >>> panel.context_length = 4096
        >>> [*panel.data()][:2]
        ['tokens', 'kept, full softmax (bytes)']
    """

    title = "What must be kept to write the next token?"
    figure_size = (9.6, 4.4)

    context_length = CONTEXT
    heads = Number("Key-value heads", 8, low=1, high=64)
    head_size = Choice("Head size", 128, HEAD_SIZES)
    window = WINDOW
    layers = Number("Layers", 32, low=1, high=128)
    sequences = Number("Sequences", 8, low=1, high=256, powers_of_two=True)
    bytes_per_number = Choice("Cache precision", 2, PRECISION)
    device = Choice("Compare with", "h100", {p.name: k for k, p in _ACCELERATORS.items()})

    def compute(self, *, device: str, **state: Any) -> Memory:
        peak = _ACCELERATORS[device]
        return decode_memory(capacity_bytes=peak.memory_bytes, capacity_name=peak.name, **state)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.83, bottom=0.14)
        return [MemoryPlot(figure, figure.subplots())]


class MemoryPlot(CostCurves):
    """Bytes kept, the memory of a device, and how many times larger the cache is."""

    def __init__(self, figure: Figure, axes: Axes) -> None:
        super().__init__(figure, axes, KEPT, MEMORY, columns=3)
        self._capacity = self.moving(axes.axhline(1, color=INK, linewidth=1.3, linestyle=DOTTED))
        self._capacity_name = self.text(
            0.012, 1, fontsize=9.5, va="center", bbox=BEHIND_WORDS,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        arrow = {"arrowstyle": "<->", "color": ACCENT, "lw": 2}
        self._gap = self.moving(axes.annotate("", (1, 1), (1, 1), arrowprops=arrow))
        self._ratio = self.text(
            1, 1, color=ACCENT, fontweight="bold", va="center", fontsize=13, bbox=BEHIND_WORDS
        )

    def show(self, view: Memory) -> None:
        super().show(view)
        self._capacity.set_ydata([view.capacity_bytes] * 2)
        # A device far larger than all curves is named at the top.
        top = self.axes.get_ylim()[1]
        name = f"memory of one {view.capacity_name}: {view.capacity_bytes / 1e9:.0f} GB"
        self._capacity_name.set_y(min(view.capacity_bytes, top / 2))
        self._capacity_name.set_text(name if view.capacity_bytes < top else f"{name} ↑")
        cache, state = (view.cost(KEPT, name) for name in ("full", "gdn"))
        self._gap.xy, self._gap.xyann = (view.chosen, cache), (view.chosen, state)
        is_left = view.chosen < 1 << 17
        beside = view.chosen * (1.15 if is_left else 0.87)
        self._ratio.set_position((beside, (cache * state) ** 0.5))
        self._ratio.set_horizontalalignment("left" if is_left else "right")
        self._ratio.set_text(in_words(cache / state, "times"))
        for artist in (self._gap, self._ratio):
            artist.set_visible(max(cache / state, state / cache) > 4)
