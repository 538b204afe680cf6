"""What a mixer costs as the context grows: modelled from its row of `MIXERS`. Pure functions.

A cost formula gives operations and bytes; a machine's two rates turn them into a time no program
on it can beat (the roofline): seconds = max(operations / peak rate, bytes / memory bandwidth).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.attention import Mixer, mixer
from toolkit.figures import in_words
from toolkit.lab.kit.table import Table

MIXER_NAMES = ("full", "window", "gdn")
SHORT_NAMES = {"full": "full softmax", "window": "sliding window", "gdn": "gated delta net"}
PREFILL, DECODE = "prefill", "decode"
CHUNK_OF_THE_KERNEL = 0
# A float32 score written once and read once.
DENSE_BYTES_PER_SCORE = 8
# Two points a doubling draw a smooth line on logarithmic axes.
TOKENS = np.unique(np.geomspace(128, 1 << 20, 27).round().astype(int))


@dataclass(frozen=True)
class Machine:
    """The two rates that make a roofline.

    Attributes:
        name: what to call it, with where its rates come from.
        flops_per_second: rate of matrix products.
        bytes_per_second: rate of main memory.
        bytes_per_number: of keys and values in the precision the rates are for.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    bytes_per_number: int


@dataclass(frozen=True)
class Point:
    """One time measured here.

    Attributes:
        mixer: a key of `MIXERS`.
        phase: `"prefill"` or `"decode"`.
        tokens: context length.
        seconds: median over the rounds.
        spread: interquartile range in seconds.
    """

    mixer: str
    phase: str
    tokens: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Costs:
    """Curves against context length, the chosen context marked.

    Attributes:
        unit: `"seconds"`, `"FLOP"` or `"bytes"`.
        machine: whose roofline, None unless the unit is seconds.
        chosen: the context length marked.
        tokens: horizontal axis, [points].
        curves: phase -> mixer -> cost at `tokens`, [points].
        at_chosen: phase -> mixer -> cost at `chosen`.
        measured: points to draw beside the curves.
    """

    unit: str
    machine: Machine | None
    chosen: int
    tokens: np.ndarray
    curves: dict[str, dict[str, np.ndarray]]
    at_chosen: dict[str, dict[str, float]]
    measured: tuple[Point, ...]

    def sentence(self) -> str:
        parts = []
        for phase, what in ((PREFILL, "reading them"), (DECODE, "writing the next one")):
            cost = self.at_chosen[phase]
            parts.append(
                f"{what} costs {in_words(cost['full'], self.unit)} with full softmax and "
                f"{in_words(cost['gdn'], self.unit)} with the gated delta net "
                f"({ratio_in_words(cost['full'], cost['gdn'])})"
            )
        where = f" Modelled for {self.machine.name}." if self.machine else " Modelled."
        return f"At {self.chosen:,} tokens {parts[0]}; {parts[1]}.{where}{self._measured_words()}"

    def _measured_words(self) -> str:
        if not self.measured:
            return ""
        longest = max(point.tokens for point in self.measured)
        seconds = {(p.phase, p.mixer): p.seconds for p in self.measured if p.tokens == longest}
        parts = (
            f"{phase} {in_words(seconds[phase, 'full'], 'seconds')} against "
            f"{in_words(seconds[phase, 'gdn'], 'seconds')}"
            for phase in (PREFILL, DECODE)
            if (phase, "full") in seconds
        )
        return f" Measured here at {longest:,} tokens: {', '.join(parts)}."

    def table(self) -> Table:
        places = [(phase, name) for phase in self.curves for name in MIXER_NAMES]
        header = ("tokens", *(f"{phase}, {SHORT_NAMES[name]}" for phase, name in places))
        rows = [
            (f"{n:,}", *(in_words(self.curves[phase][m][i], self.unit) for phase, m in places))
            for i, n in enumerate(self.tokens)
            if i % 2 == 0
        ]
        measured = {(p.tokens, p.phase, p.mixer): p for p in self.measured}
        for tokens in sorted({p.tokens for p in self.measured}):
            found = (measured.get((tokens, *place)) for place in places)
            cells = (
                f"{in_words(p.seconds, 'seconds')} ± {in_words(p.spread / 2, 'seconds')}"
                if p
                else "not measured"
                for p in found
            )
            rows.append((f"{tokens:,} (measured here)", *cells))
        return Table(header, rows)


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
) -> Costs:
    """Cost of one attention layer, one sequence: reading a context, and one token after it.

    Args:
        context_length: the context to mark.
        heads: query, key and value heads.
        head_size: key and value size of a head.
        window: tokens a sliding window sees.
        softmax: `"blockwise"`, or `"dense"`, whose prefill writes every float32 score to memory
            and reads it back: 8 bytes a pair of tokens and head.
        chunk: tokens a chunk of the gated delta net holds; `CHUNK_OF_THE_KERNEL` for its own.
        unit: `"seconds"` (roofline on `machine`), `"FLOP"` or `"bytes"`.
        machine: its rates, and its bytes a number.
        measured: times measured with these very sizes.

    Returns:
        A `Costs`.

    Cost:
        A few hundred calls of arithmetic.

    Source:
        The cost formulas of `toolkit.attention.MIXERS`; Williams, Waterman, Patterson 2009,
        "Roofline", for the time.
    """

    def cost(name: str, phase: str, tokens: int) -> float:
        row = mixer_row(name, window)
        sizes = (1, tokens, heads, head_size, head_size)
        number = machine.bytes_per_number
        if phase == PREFILL:
            of_kernel = name != "gdn" or chunk == CHUNK_OF_THE_KERNEL
            options = dict(row.options) if of_kernel else {"chunk": chunk}
            flop = row.forward_flops(*sizes, **options)
            moved = row.forward_bytes(*sizes, element_bytes=number, **row.options)
            if softmax == "dense" and name != "gdn":
                moved += DENSE_BYTES_PER_SCORE * heads * tokens**2
        else:
            flop = row.step_flops(*sizes, **row.options)
            moved = row.step_bytes(*sizes, element_bytes=number, **row.options)
        if unit == "seconds":
            return max(flop / machine.flops_per_second, moved / machine.bytes_per_second)
        return flop if unit == "FLOP" else moved

    def for_all(get: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
        return {p: {name: get(name, p) for name in MIXER_NAMES} for p in (PREFILL, DECODE)}

    return Costs(
        unit=unit,
        machine=machine if unit == "seconds" else None,
        chosen=context_length,
        tokens=TOKENS,
        curves=for_all(lambda name, p: np.array([cost(name, p, int(n)) for n in TOKENS])),
        at_chosen=for_all(lambda name, p: cost(name, p, context_length)),
        measured=measured if unit == "seconds" else (),
    )


@dataclass(frozen=True)
class Memory:
    """What a model keeps to write its next token.

    Attributes:
        chosen: the context length marked.
        tokens: horizontal axis, [points].
        curves: mixer -> bytes at `tokens`.
        at_chosen: mixer -> bytes at `chosen`.
        capacity_bytes: memory of a device, drawn as a line.
        capacity_name: which device.
        described: the sizes in words.
    """

    chosen: int
    tokens: np.ndarray
    curves: dict[str, np.ndarray]
    at_chosen: dict[str, float]
    capacity_bytes: float
    capacity_name: str
    described: str

    def sentence(self) -> str:
        cache, state = self.at_chosen["full"], self.at_chosen["gdn"]
        said = (
            f"At {self.chosen:,} tokens the key-value cache holds {in_words(cache, 'bytes')}, the "
            f"gated delta net's state {in_words(state, 'bytes')}: "
            f"{_times_as_large(cache, state)} (modelled; {self.described})."
        )
        share = cache / self.capacity_bytes
        if share >= 1:
            said += f" The cache no longer fits one {self.capacity_name}."
        elif share >= 0.01:
            said += f" The cache fills {share:.0%} of one {self.capacity_name}."
        return said

    def table(self) -> Table:
        rows = [
            (f"{n:,}", *(in_words(self.curves[m][i], "bytes") for m in MIXER_NAMES))
            for i, n in enumerate(self.tokens)
            if i % 2 == 0
        ]
        return Table(("tokens", *(SHORT_NAMES[m] for m in MIXER_NAMES)), rows)


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
) -> Memory:
    """Bytes kept between tokens by a whole model: the mixer's state, times layers and sequences.

    Args:
        context_length: the context to mark.
        heads: key-value heads.
        head_size: key and value size of a head.
        window: tokens a sliding window sees.
        layers: layers that each keep a state.
        sequences: sequences served at once.
        bytes_per_number: of cached keys and values; the recurrent state stays in float32.
        capacity_bytes: memory of a device, to compare with.
        capacity_name: which device.

    Returns:
        A `Memory`.

    Cost:
        A hundred calls of arithmetic.

    Source:
        `state_bytes` of the rows of `toolkit.attention.MIXERS`.
    """

    def kept(name: str, tokens: int) -> float:
        row = mixer_row(name, window)
        sizes = (sequences, tokens, heads, head_size, head_size)
        return float(
            layers * row.state_bytes(*sizes, element_bytes=bytes_per_number, **row.options)
        )

    return Memory(
        chosen=context_length,
        tokens=TOKENS,
        curves={name: np.array([kept(name, int(n)) for n in TOKENS]) for name in MIXER_NAMES},
        at_chosen={name: kept(name, context_length) for name in MIXER_NAMES},
        capacity_bytes=capacity_bytes,
        capacity_name=capacity_name,
        described=f"{layers} layers, {heads} heads of {head_size}, {sequences} at once",
    )


def mixer_row(name: str, window: int) -> Mixer:
    """The row of `MIXERS`, with this window where it has one.

    Args:
        name: a key of `MIXERS`.
        window: tokens a sliding window sees.

    Returns:
        A `Mixer`.

    Raises:
        ValueError: for an unknown name.

    Cost:
        A dictionary look-up.
    """
    return mixer(name, sliding_window=window) if name == "window" else mixer(name)


def ratio_in_words(ours: float, peer: float) -> str:
    """How many times as much, as a reader would say it.

    Args:
        ours: first number, above 0.
        peer: what it is compared with, above 0.

    Returns:
        `"12× as much"`, `"1.3× as much"`, or `"1/4 as much"`-like words below one.

    Cost:
        None worth naming.
    """
    ratio = ours / peer
    if ratio < 1:
        return f"1/{_plain(1 / ratio)} of it"
    return f"{_plain(ratio)}× as much"


def _times_as_large(cache: float, state: float) -> str:
    if cache >= state:
        return f"the cache is {_plain(cache / state)}× the state"
    return f"the state is {_plain(state / cache)}× the cache"


def _plain(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.2g}"
