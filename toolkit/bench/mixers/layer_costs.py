"""What one layer costs: modelled from a mixer's row of `MIXERS`, and measured on this machine.

Measuring comes in pieces short enough to stop between. Nothing is timed before every mixer has
agreed with its own reference, in both phases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import Mixer, mixer
from toolkit.bench.agreement import agree
from toolkit.bench.harness import bound, in_place
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs
from toolkit.measure import time_contenders

MIXER_NAMES = ("full", "window", "gdn")
PREFILL, DECODE, KEPT = "prefill", "decode", "kept"
CHUNK_OF_THE_KERNEL = 0
# A float32 score written once and read once.
DENSE_BYTES_PER_SCORE = 8


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


# The menu of context lengths: each shape is compiled once, whatever the sliders do.
LENGTHS = {PREFILL: (256, 4096), DECODE: (256, 4096)}
# More than one chunk of Gated DeltaNet, and not a whole number of chunks.
CHECKED_TOKENS = 40
# Largest difference from the reference, relative to its largest entry, in float32.
TOLERANCE = 1e-4
# Lengths whose dense scores would not fit a small machine are left out.
MAX_SCORE_BYTES = 300e6

Piece = tuple[int, int, str, list[Point]]


def measure_pieces(
    layer: Layer, *, lengths: Mapping[str, Sequence[int]] = LENGTHS,
    mixers: tuple[str, ...] = MIXER_NAMES, rounds: int = 5,
) -> Iterator[Piece]:  # fmt: skip
    """Check every mixer, then time each phase at its lengths.

    Yields (pieces done, pieces in all, what was just done, new points); a piece takes a second or
    two, nearly all of it compilation.
    """
    scores = MAX_SCORE_BYTES / 4 / layer.heads
    most = scores**0.5 if layer.softmax == "dense" else np.inf
    every = ((n, phase) for phase, contexts in lengths.items() for n in contexts if n <= most)
    places = sorted(every, key=lambda place: place[0])
    for name in mixers:
        check_against_reference(name, replace(layer, window=min(layer.window, CHECKED_TOKENS // 2)))
    yield 1, 1 + len(places), "checked against the references", []
    for done, (tokens, phase) in enumerate(places, 2):
        prepare = prefill_call if phase == PREFILL else decode_call
        calls = {name: prepare(name, tokens, layer) for name in mixers}
        points = [
            Point(name, phase, tokens, timing.median, timing.spread)
            for name, timing in time_contenders(calls, rounds=rounds).items()
        ]
        yield done, 1 + len(places), f"{phase} at {tokens:,} tokens", points


def check_against_reference(name: str, layer: Layer) -> None:
    """Refuse a mixer whose prefill or last decoded token differs from its reference."""
    row = layer.row(name)
    inputs = _inputs(row, CHECKED_TOKENS, layer)

    @jax.jit
    def prefill_and_decode(*inputs):
        before, last = [x[:, :-1] for x in inputs], [x[:, -1] for x in inputs]
        prefilled = _prefill(row, layer)(*inputs)
        state = _empty_state(row, CHECKED_TOKENS, layer)
        _, state = row.function(*before, initial_state=state, **row.options)
        return prefilled, row.step(*last, state, **row.options)[0]

    # The references loop over tokens in Python, so compiling them would take minutes.
    expected = row.reference(*inputs, **row.options)[0]
    checked = prefill_and_decode(*inputs), (expected, expected[:, -1])
    for phase, ours, theirs in zip((PREFILL, DECODE), *checked, strict=True):
        agree(TOLERANCE)({"its reference": theirs, f"{row.title}, {phase}": ours})


def prefill_call(name: str, tokens: int, layer: Layer) -> Callable[[], Any]:
    """A mixer that reads a context and returns the outputs."""
    row = layer.row(name)
    return bound(jax.jit(_prefill(row, layer)), tuple(_inputs(row, tokens, layer)))


def decode_call(name: str, tokens: int, layer: Layer) -> Callable[[], Any]:
    """A call that decodes the last token of a context, repeatedly."""
    row = replace(layer, window=min(layer.window, tokens)).row(name)
    token = [array[:, 0] for array in _inputs(row, 1, layer)]
    random = np.random.default_rng(1)

    def filled(x: jax.Array) -> jax.Array:
        is_float = x.dtype.kind == "f"
        return jnp.asarray(random.standard_normal(x.shape, np.float32)) if is_float else x

    def step(state: Any, *token: jax.Array) -> tuple[Any, Any]:
        if hasattr(state, "length"):  # full to the last slot, independent of the previous step
            state = replace(state, length=jnp.full_like(state.length, tokens - 1))
        return row.step(*token, state, **row.options)

    return in_place(step, jax.tree.map(filled, _empty_state(row, tokens, layer)), *token)


def _inputs(row: Mixer, tokens: int, layer: Layer) -> list[jax.Array]:
    return mixer_inputs(row, tokens, layer.heads, layer.head_size)


def _empty_state(row: Mixer, tokens: int, layer: Layer) -> Any:
    sizes = layer.heads, layer.head_size, layer.head_size
    return row.empty_state(1, *sizes, tokens, jnp.float32, **row.options)


def _prefill(row: Mixer, layer: Layer) -> Callable[..., jax.Array]:
    form = layer.softmax if layer.softmax in row.implementations else None
    return mixer_form(row, form, backward=False)
