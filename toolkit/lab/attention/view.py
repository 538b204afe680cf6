"""What a mixer costs as the context grows: modelled from its row of `MIXERS`. Pure functions.

A cost formula gives operations and bytes; a machine's two rates turn them into a time no program
on it can beat (the roofline): seconds = max(operations / peak rate, bytes / memory bandwidth).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Machine:
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
    """The sizes on which the cost of one layer depends."""

    heads: int
    head_size: int
    window: int = 1  # tokens the sliding window sees
    bytes_per_number: int = 2  # of keys and values; recurrent states are float32
    sequences: int = 1
    softmax: str = "blockwise"  # or "dense", whose prefill writes and reads every float32 score
    chunk: int = CHUNK_OF_THE_KERNEL  # tokens the gated delta net's prefill takes at once

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
                return row.step_flops(*sizes, **row.options)
            has_chunks = "xla" in row.implementations and self.chunk != CHUNK_OF_THE_KERNEL
            options = {"chunk": self.chunk} if has_chunks else row.options
            return row.forward_flops(*sizes, **options)
        formula = {PREFILL: row.forward_bytes, DECODE: row.step_bytes, KEPT: row.state_bytes}[what]
        moved = formula(*sizes, element_bytes=self.bytes_per_number, **row.options)
        if what == PREFILL and self.softmax == "dense" and "dense" in row.implementations:
            moved += DENSE_BYTES_PER_SCORE * self.heads * tokens**2
        return moved


@dataclass(frozen=True)
class CostView(View):
    """Curves against context length, one context chosen: a plot or more of several lines."""

    chosen: int  # one of `tokens`
    tokens: np.ndarray
    units: dict[str, str]  # plot -> "seconds", "FLOP" or "bytes"
    names: dict[str, str]  # line -> its name in words
    curves: dict[str, dict[str, np.ndarray]]  # plot -> line -> cost at `tokens`
    measured: tuple[Point, ...]

    @property
    def at_chosen(self) -> dict[str, dict[str, Any]]:
        """plot -> line -> cost at the chosen context."""
        row = self._chosen_row
        return {
            plot: {line: curve[row] for line, curve in lines.items()}
            for plot, lines in self.curves.items()
        }

    @property
    def _chosen_row(self) -> int:
        return int(np.searchsorted(self.tokens, self.chosen))

    @property
    def last(self) -> str:
        """The line that the sentence compares with softmax attention."""
        return [*self.names][-1]

    def heading(self, plot: str, line: str) -> str:
        """The heading of a curve in the table."""
        return f"{plot}, {self.names[line]}"

    def said(self, plot: str, line: str) -> str:
        """The cost at the chosen context, as the table has it."""
        return self.row(self._chosen_row)[self.heading(plot, line)]

    def data(self) -> Data:
        """Modelled costs, then pairs (seconds, error) where there is a measured time."""
        columns: Data = {"tokens": self.tokens}
        for plot, lines in self.curves.items():
            for line, curve in lines.items():
                columns[f"{self.heading(plot, line)} ({self.units[plot]})"] = curve
        found = {(p.phase, p.mixer, p.tokens): (p.seconds, p.spread / 2) for p in self.measured}
        for phase, name in dict.fromkeys((p.phase, p.mixer) for p in self.measured):
            heading = f"{self.heading(phase, name)}, measured (seconds)"
            columns[heading] = [found.get((phase, name, int(n))) for n in self.tokens]
        return columns


def at_contexts(
    cost: Callable[[str, str, int], float],
    units: dict[str, str],
    names: dict[str, str],
    chosen: int,
    measured: tuple[Point, ...] = (),
) -> dict[str, Any]:
    """The fields of a `CostView`, from the cost of (plot, line, tokens)."""
    tokens = np.unique([*TOKENS, chosen, *(point.tokens for point in measured)])
    curves = {
        plot: {line: np.array([cost(plot, line, int(n)) for n in tokens]) for line in names}
        for plot in units
    }
    return {
        "chosen": chosen, "tokens": tokens, "units": units, "names": names, "curves": curves,
        "measured": measured,
    }  # fmt: skip


@dataclass(frozen=True)
class Costs(CostView):
    """What reading a context costs, and one more token."""

    machine: Machine | None  # whose roofline, None unless the unit is seconds

    def sentence(self) -> str:
        parts = []
        for phase, what in ((PREFILL, "reading them"), (DECODE, "writing the next one")):
            ratio = self.at_chosen[phase]["full"] / self.at_chosen[phase][self.last]
            parts.append(
                f"{what} costs {self.said(phase, 'full')} with full softmax and "
                f"{self.said(phase, self.last)} with the {self.names[self.last]} "
                f"({in_words(ratio, 'times')} as much)"
            )
        where = f" Modelled for {self.machine.name}." if self.machine else " Modelled."
        return f"At {self.chosen:,} tokens {parts[0]}; {parts[1]}.{where}{self._measured_words()}"

    def footnote(self) -> str:
        whose = f" for {self.machine.name}" if self.machine else ""
        markers = "; markers: measured here" if self.measured else ""
        return f"Lines: modelled{whose}{markers}. One layer, one sequence."

    def _measured_words(self) -> str:
        if not self.measured:
            return ""
        longest = max(point.tokens for point in self.measured)
        row, parts = self.row(int(np.searchsorted(self.tokens, longest))), []
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

    Source:
        The cost formulas of `toolkit.attention.MIXERS`; Williams, Waterman, Patterson 2009,
        "Roofline", for the time.
    """
    layer = Layer(bytes_per_number=machine.bytes_per_number, **sizes)

    def cost(phase: str, name: str, tokens: int) -> float:
        if unit != "seconds":
            return layer.cost(name, phase, unit, tokens)
        flop, moved = (layer.cost(name, phase, one, tokens) for one in ("FLOP", "bytes"))
        return max(flop / machine.flops_per_second, moved / machine.bytes_per_second)

    units, is_time = {PREFILL: unit, DECODE: unit}, unit == "seconds"
    shown = measured if is_time else ()
    return Costs(
        **at_contexts(cost, units, _short_names(mixers), context_length, shown),
        machine=machine if is_time else None,
    )


@dataclass(frozen=True)
class Memory(CostView):
    """What a model keeps to write its next token, beside the memory of a device."""

    capacity_bytes: float
    capacity_name: str
    described: str  # the sizes in words

    def sentence(self) -> str:
        cache, state = (self.at_chosen[KEPT][name] for name in ("full", self.last))
        words = ("the cache", "the state") if cache >= state else ("the state", "the cache")
        ratio = in_words(max(cache, state) / min(cache, state), "times")
        said = (
            f"At {self.chosen:,} tokens the key-value cache holds {self.said(KEPT, 'full')}, the "
            f"{self.names[self.last]}'s state {self.said(KEPT, self.last)}: {words[0]} is {ratio} "
            f"{words[1]} (modelled; {self.described})."
        )
        share = cache / self.capacity_bytes
        if share >= 1:
            said += f" The cache no longer fits one {self.capacity_name}."
        elif share >= 0.01:
            said += f" The cache fills {share:.0%} of one {self.capacity_name}."
        return said


def decode_memory(
    *,
    context_length: int,
    layers: int,
    capacity_bytes: float,
    capacity_name: str,
    mixers: tuple[str, ...] = MIXER_NAMES,
    **sizes: Any,
) -> Memory:
    """Bytes kept between tokens by a whole model; `sizes` are those of a `Layer`."""
    layer = Layer(**sizes)

    def kept(_: str, name: str, tokens: int) -> float:
        return float(layers * layer.cost(name, KEPT, "bytes", tokens))

    return Memory(
        **at_contexts(kept, {KEPT: "bytes"}, _short_names(mixers), context_length),
        capacity_bytes=capacity_bytes,
        capacity_name=capacity_name,
        described=f"{layers} layers, {layer.heads} heads of {layer.head_size}, "
        f"{layer.sequences} at once",
    )


def _short_names(mixers: tuple[str, ...]) -> dict[str, str]:
    return {name: SHORT_NAMES.get(name, mixer(name).title) for name in mixers}
