"""What a mixer costs as the context grows: modelled from its row of `MIXERS`. Pure functions.

A cost formula gives operations and bytes; a machine's two rates turn them into a time no program
on it can beat (the roofline): seconds = max(operations / peak rate, bytes / memory bandwidth).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.attention import Mixer, mixer
from toolkit.figures import in_words
from toolkit.lab.kit.view import Data, View

MIXER_NAMES = ("full", "window", "gdn")
SHORT_NAMES = {"full": "full softmax", "window": "sliding window", "gdn": "gated delta net"}
PREFILL, DECODE = "prefill", "decode"
KEPT = "kept"
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
class CostView(View):
    """Curves against context length, the chosen context marked: a plot or more of several lines."""

    chosen: int
    units: dict[str, str]  # plot -> "seconds", "FLOP" or "bytes"
    names: dict[str, str]  # line -> its name in words
    curves: dict[str, dict[str, np.ndarray]]  # plot -> line -> cost at `TOKENS`
    at_chosen: dict[str, dict[str, float]]  # plot -> line -> cost at `chosen`
    measured: tuple[Point, ...] = field(default=(), kw_only=True)

    @property
    def last(self) -> str:
        """The line that the sentence compares with softmax attention."""
        return [*self.names][-1]

    def data(self) -> Data:
        return {"tokens": TOKENS} | {
            f"{plot}, {self.names[line]} ({self.units[plot]})": curve
            for plot, lines in self.curves.items()
            for line, curve in lines.items()
        }


def at_every_context(
    cost: Callable[[str, str, int], float], plots: Iterable[str], lines: Iterable[str], chosen: int
) -> dict[str, Any]:
    """`curves` and `at_chosen` of a `CostView`, from the cost of (plot, line, tokens)."""
    places = dict.fromkeys(plots, lines)

    def each(get: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
        return {plot: {line: get(plot, line) for line in lines} for plot, lines in places.items()}

    return {
        "chosen": chosen,
        "curves": each(lambda plot, line: np.array([cost(plot, line, int(n)) for n in TOKENS])),
        "at_chosen": each(lambda plot, line: cost(plot, line, chosen)),
    }


@dataclass(frozen=True)
class Costs(CostView):
    """What reading a context costs, and one more token."""

    unit: str
    machine: Machine | None  # whose roofline, None unless the unit is seconds

    def sentence(self) -> str:
        parts = []
        for phase, what in ((PREFILL, "reading them"), (DECODE, "writing the next one")):
            full, other = (self.at_chosen[phase][name] for name in ("full", self.last))
            parts.append(
                f"{what} costs {in_words(full, self.unit)} with full softmax and "
                f"{in_words(other, self.unit)} with the {self.names[self.last]} "
                f"({ratio_in_words(full, other)})"
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
        seconds = {(p.phase, p.mixer): p.seconds for p in self.measured if p.tokens == longest}
        parts = (
            f"{phase} {in_words(seconds[phase, 'full'], 'seconds')} against "
            f"{in_words(seconds[phase, self.last], 'seconds')}"
            for phase in (PREFILL, DECODE)
            if (phase, "full") in seconds
        )
        return f" Measured here at {longest:,} tokens: {', '.join(parts)}."

    def data(self) -> Data:
        """Modelled costs, and beside them pairs (seconds, error) where there is a measured time."""
        found = {(p.phase, p.mixer, p.tokens): (p.seconds, p.spread / 2) for p in self.measured}
        tokens = np.union1d(TOKENS, [p.tokens for p in self.measured]).astype(int)
        columns: Data = {"tokens": tokens}
        for heading, curve in list(super().data().items())[1:]:
            columns[heading] = np.full(len(tokens), np.nan)
            columns[heading][np.isin(tokens, TOKENS)] = curve
        for phase, name in dict.fromkeys((p.phase, p.mixer) for p in self.measured):
            heading = f"{phase}, {self.names[name]}, measured (seconds)"
            columns[heading] = [found.get((phase, name, int(n))) for n in tokens]
        return columns


def costs(
    *,
    context_length: int,
    heads: int,
    head_size: int,
    window: int,
    softmax: str = "blockwise",
    chunk: int = CHUNK_OF_THE_KERNEL,
    unit: str = "seconds",
    machine: Machine,
    measured: tuple[Point, ...] = (),
    mixers: tuple[str, ...] = MIXER_NAMES,
) -> Costs:
    """Cost of one attention layer, one sequence: reading a context, and one token after it.

    `softmax` is `"blockwise"`, or `"dense"`, whose prefill writes every float32 score to memory
    and reads it back; `chunk` is what the gated delta net holds, `CHUNK_OF_THE_KERNEL` for its
    own; `unit` is `"seconds"` (roofline on `machine`), `"FLOP"` or `"bytes"`; `measured` are times
    with these very sizes; `mixers` are `"full"` and any other rows.

    Source:
        The cost formulas of `toolkit.attention.MIXERS`; Williams, Waterman, Patterson 2009,
        "Roofline", for the time.
    """

    def cost(phase: str, name: str, tokens: int) -> float:
        row = mixer_row(name, window)
        sizes = (1, tokens, heads, head_size, head_size)
        number = machine.bytes_per_number
        if phase == PREFILL:
            has_chunks = "xla" in row.implementations and chunk != CHUNK_OF_THE_KERNEL
            options = {"chunk": chunk} if has_chunks else dict(row.options)
            flop = row.forward_flops(*sizes, **options)
            moved = row.forward_bytes(*sizes, element_bytes=number, **row.options)
            if softmax == "dense" and softmax in row.implementations:
                moved += DENSE_BYTES_PER_SCORE * heads * tokens**2
        else:
            flop = row.step_flops(*sizes, **row.options)
            moved = row.step_bytes(*sizes, element_bytes=number, **row.options)
        if unit == "seconds":
            return max(flop / machine.flops_per_second, moved / machine.bytes_per_second)
        return flop if unit == "FLOP" else moved

    return Costs(
        **at_every_context(cost, (PREFILL, DECODE), mixers, context_length),
        units={PREFILL: unit, DECODE: unit},
        names=_short_names(mixers),
        unit=unit,
        machine=machine if unit == "seconds" else None,
        measured=measured if unit == "seconds" else (),
    )


@dataclass(frozen=True)
class Memory(CostView):
    """What a model keeps to write its next token, beside the memory of a device."""

    capacity_bytes: float
    capacity_name: str
    described: str  # the sizes in words

    def sentence(self) -> str:
        cache, state = (self.at_chosen[KEPT][name] for name in ("full", self.last))
        larger = (
            f"the cache is {plain(cache / state)}× the state"
            if cache >= state
            else f"the state is {plain(state / cache)}× the cache"
        )
        said = (
            f"At {self.chosen:,} tokens the key-value cache holds {in_words(cache, 'bytes')}, the "
            f"{self.names[self.last]}'s state {in_words(state, 'bytes')}: {larger} (modelled; "
            f"{self.described})."
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
    heads: int,
    head_size: int,
    window: int,
    layers: int,
    sequences: int,
    bytes_per_number: int,
    capacity_bytes: float,
    capacity_name: str,
    mixers: tuple[str, ...] = MIXER_NAMES,
) -> Memory:
    """Bytes kept between tokens by a whole model: the mixer's state, times layers and sequences.

    `bytes_per_number` is of cached keys and values; the recurrent state stays in float32.
    """

    def kept(_: str, name: str, tokens: int) -> float:
        row = mixer_row(name, window)
        sizes = (sequences, tokens, heads, head_size, head_size)
        return float(
            layers * row.state_bytes(*sizes, element_bytes=bytes_per_number, **row.options)
        )

    return Memory(
        **at_every_context(kept, (KEPT,), mixers, context_length),
        units={KEPT: "bytes"},
        names=_short_names(mixers),
        capacity_bytes=capacity_bytes,
        capacity_name=capacity_name,
        described=f"{layers} layers, {heads} heads of {head_size}, {sequences} at once",
    )


def mixer_row(name: str, window: int) -> Mixer:
    """The row of `MIXERS`, with this window where it has one."""
    row = mixer(name)
    return mixer(name, sliding_window=window) if "sliding_window" in row.options else row


def _short_names(mixers: tuple[str, ...]) -> dict[str, str]:
    return {name: SHORT_NAMES.get(name, mixer(name).title) for name in mixers}


def ratio_in_words(ours: float, peer: float) -> str:
    """How many times as much, as a reader would say it: "12× as much", "1/4 of it"."""
    ratio = ours / peer
    return f"1/{plain(1 / ratio)} of it" if ratio < 1 else f"{plain(ratio)}× as much"


def plain(ratio: float) -> str:
    """A ratio in two digits, or whole."""
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.2g}"
