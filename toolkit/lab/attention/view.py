"""The cost of a mixer against context length, modelled from its row of `MIXERS`. Pure functions.

A cost formula gives operations and bytes; a machine's two rates turn them into a time no program
on it can beat: seconds = max(operations / peak rate, bytes / memory bandwidth), the roofline of
Williams, Waterman, Patterson 2009.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from toolkit.attention import Mixer, mixer
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words

MIXER_NAMES = ("full", "window", "gdn")
SHORT_NAMES = {"full": "full softmax", "window": "sliding window", "gdn": "gated delta net"}
PREFILL, DECODE, KEPT = "prefill", "decode", "kept"
CHUNK_OF_THE_KERNEL = 0
# A float32 score written once and read once.
DENSE_BYTES_PER_SCORE = 8
# Two points a doubling draw a smooth line on logarithmic axes.
TOKENS = np.unique(np.geomspace(128, 1 << 20, 27).round().astype(int))


class Counted(NamedTuple):
    """The quantity of a plot, in the names of `Layer.cost` or in seconds, with heading and
    limits."""

    what: str
    unit: str
    heading: str
    limits: tuple[float, float] | None = None


PHASES = {
    PREFILL: Counted(PREFILL, "seconds", "Prefill: reading the context"),
    DECODE: Counted(DECODE, "seconds", "Decode: one more token"),
}
MEMORY = Counted(KEPT, "bytes", "Memory between two tokens")


class Machine(NamedTuple):
    """The two rates that make a roofline."""

    name: str  # with where its rates come from
    flops_per_second: float  # of matrix products
    bytes_per_second: float  # of main memory
    bytes_per_number: int  # of keys and values in the precision the rates are for


@dataclass(frozen=True)
class Point:
    """One time measured here: median and interquartile range, in seconds."""

    mixer: str
    phase: str
    tokens: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Layer:
    """The sizes on which the cost of one layer depends, or of some that are alike."""

    heads: int
    head_size: int
    window: int = 1  # tokens the sliding window sees
    bytes_per_number: int = 2  # of keys and values; recurrent states are float32
    sequences: int = 1
    softmax: str = "blockwise"  # or "dense", whose prefill writes and reads every float32 score
    chunk: int = CHUNK_OF_THE_KERNEL  # tokens the gated delta net's prefill takes at once
    layers: int = 1

    def row(self, name: str) -> Mixer:
        """The row of `MIXERS`, with this window where it has one."""
        row = mixer(name)
        return mixer(name, sliding_window=self.window) if "sliding_window" in row.options else row

    def cost(self, name: str, what: str, unit: str, tokens: int) -> float:
        """`"FLOP"` or `"bytes"` of a prefill or decode step, bytes kept: by its row of `MIXERS`."""
        row = self.row(name)
        sizes = self.sequences, tokens, self.heads, self.head_size, self.head_size
        if unit == "FLOP":
            if what == DECODE:
                return self.layers * row.step_flops(*sizes, **row.options)
            has_chunks = "xla" in row.implementations and self.chunk != CHUNK_OF_THE_KERNEL
            options = {"chunk": self.chunk} if has_chunks else row.options
            return self.layers * row.forward_flops(*sizes, **options)
        formula = {PREFILL: row.forward_bytes, DECODE: row.step_bytes, KEPT: row.state_bytes}[what]
        moved = formula(*sizes, element_bytes=self.bytes_per_number, **row.options)
        if what == PREFILL and self.softmax == "dense" and "dense" in row.implementations:
            moved += DENSE_BYTES_PER_SCORE * self.heads * tokens**2
        return self.layers * moved


@dataclass(frozen=True)
class CostView(View):
    """Curves against context length, one context chosen: a plot or more of several lines."""

    chosen: int  # one of `tokens`
    layer: Layer
    mixers: dict[str, str]  # line -> name in `MIXERS`
    counted: Mapping[str, Counted]  # by plot
    machine: Machine | None = None  # whose roofline, where the unit is seconds
    measured: tuple[Point, ...] = ()

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Line -> its name in words."""
        return {
            line: SHORT_NAMES.get(name, mixer(name).title) for line, name in self.mixers.items()
        }

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The contexts of the curves, the chosen one and those measured among them."""
        return np.unique([*TOKENS, self.chosen, *(point.tokens for point in self.measured)])

    @functools.cached_property
    def curves(self) -> dict[str, dict[str, np.ndarray]]:
        """Plot -> line -> cost at `tokens`."""
        return {
            plot: {
                line: np.array([self._cost(name, counted, int(n)) for n in self.tokens])
                for line, name in self.mixers.items()
            }
            for plot, counted in self.counted.items()
        }

    def _cost(self, name: str, counted: Counted, tokens: int) -> float:
        what, unit, *_ = counted
        if self.machine is None:
            return self.layer.cost(name, what, unit, tokens)
        flop, moved = (self.layer.cost(name, what, unit, tokens) for unit in ("FLOP", "bytes"))
        return max(flop / self.machine.flops_per_second, moved / self.machine.bytes_per_second)

    def cost(self, plot: str, line: str) -> float:
        """The cost at the chosen context."""
        return float(self.curves[plot][line][self.row_of(self.chosen)])

    def row_of(self, tokens: int) -> int:
        """The row of one of `tokens` in the table."""
        return int(np.searchsorted(self.tokens, tokens))

    @property
    def last(self) -> str:
        """The line that the caption compares with softmax attention."""
        return [*self.names][-1]

    def heading(self, plot: str, line: str) -> str:
        """The heading of a curve in the table."""
        return f"{plot}, {self.names[line]}"

    def cell_of(self, plot: str, line: str) -> str:
        """The same as the table has it."""
        return self.row(self.row_of(self.chosen))[self.heading(plot, line)]

    def data(self) -> Data:
        """Modelled costs, then pairs (seconds, error) where there is a measured time."""
        columns: Data = {"tokens": self.tokens}
        for plot, lines in self.curves.items():
            for line, curve in lines.items():
                columns[f"{self.heading(plot, line)} ({self.counted[plot].unit})"] = curve
        found = {(p.phase, p.mixer, p.tokens): (p.seconds, p.spread / 2) for p in self.measured}
        for phase, name in dict.fromkeys((p.phase, p.mixer) for p in self.measured):
            heading = f"{self.heading(phase, name)}, measured (seconds)"
            columns[heading] = [found.get((phase, name, int(n))) for n in self.tokens]
        return columns


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
        markers = "; markers: measured here" if self.measured else ""
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
    *,
    context_length: int,
    machine: Machine,
    unit: str = "seconds",
    measured: tuple[Point, ...] = (),
    mixers: tuple[str, ...] = MIXER_NAMES,
    **sizes: Any,
) -> Costs:
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
    *,
    context_length: int,
    capacity_bytes: float,
    capacity_name: str,
    mixers: tuple[str, ...] = MIXER_NAMES,
    **sizes: Any,
) -> Memory:
    """Bytes that a whole model keeps between tokens; `sizes` are those of a `Layer`."""
    return Memory(
        context_length, Layer(**sizes), dict(zip(mixers, mixers, strict=True)), {KEPT: MEMORY},
        capacity_bytes=capacity_bytes, capacity_name=capacity_name,
    )  # fmt: skip
