"""One text read by a small looped model: what it can see and what it would say after each loop.

Pure functions of the controls. The reading of a text is remembered, so moving the token or the
number of loops only looks at another part of it.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from toolkit.lab.kit.view import Data, View
from toolkit.lab.looped.models import SmallModel, small_model
from toolkit.lab.looped.reader import MAX_TOKENS, Trace, influence, trace
from toolkit.looped import tokens_reached
from toolkit.measure.words import counted

BEST = 3
"""Likeliest bytes shown for each loop."""

MOST = 0.9
"""The part of the influence that the words and the brackets speak of."""

STAND_INS = {" ": "␣", "\n": "⏎"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """A text in a model, every loop of `MAX_LOOPS`."""

    small: SmallModel
    raw: bytes  # those read, at most `MAX_TOKENS`
    seen: Trace
    log_probabilities: np.ndarray  # of every byte after each loop, [loops, time, vocabulary]

    def losses(self) -> np.ndarray:
        """Nats of each byte of the text but the first, after each loop: [loops, time - 1]."""
        ahead = np.arange(len(self.raw) - 1)
        return -self.log_probabilities[:, ahead, list(self.raw[1:])]


@dataclasses.dataclass(frozen=True)
class LoopView(View):
    """What one byte's prediction rests on, loop by loop. Arrays have a row per loop shown."""

    raw: bytes
    left_out: int  # bytes at the end that did not fit
    token: int  # index of the byte looked at
    pattern: str
    trained_loops: int
    share: np.ndarray  # of the influence on the prediction, [loops, time]; 0 where no path leads
    reach: tuple[int | None, ...]  # bytes a path can lead from, itself included; None: all
    right: np.ndarray  # probability of the byte that does follow, [loops, time - 1]
    best: tuple[tuple[tuple[str, float], ...], ...]  # likeliest next bytes, with probabilities
    loss: np.ndarray  # mean over the text, nats per byte
    held_out_loss: float  # recorded after training, nats per byte

    @property
    def loops(self) -> int:
        """Loops shown."""
        return len(self.loss)

    def distance(self, loop: int) -> int:
        """Bytes back within which `MOST` of the influence lies; 0 is the byte itself."""
        return int(np.argmax(np.cumsum(self.share[loop, self.token :: -1]) >= MOST))

    def data(self) -> Data:
        right = np.pad(self.right, ((0, 0), (0, 1)), constant_values=np.nan)
        return {
            "byte": np.arange(len(self.raw)) + 1,
            "character": [visible(byte) for byte in self.raw],
            **{f"share, loop {loop + 1}": row for loop, row in enumerate(self.share)},
            **{f"next byte, loop {loop + 1}": row for loop, row in enumerate(right)},
        }

    def sentence(self) -> str:
        reach = self.reach[-1]
        can = "every byte before it" if reach is None else f"{in_bytes(reach)}, itself included"
        byte, chance = self.best[-1][0]
        said = (
            f"At “{visible(self.raw[self.token])}” (byte {self.token + 1} of {len(self.raw)}), "
            f"after {in_loops(self.loops)} of “{self.pattern}”: the prediction can rest on {can}; "
            f"{MOST:.0%} of the influence comes from it and the {in_bytes(self.distance(-1))} "
            f"before it. It would write “{byte}” ({chance:.0%}). Mean loss of the text after each "
            f"loop: {', '.join(f'{loss:.2f}' for loss in self.loss)} nats per byte. Measured here; "
            f"the reach is modelled. Recorded after training: {self.held_out_loss:.2f} on unseen "
            "text."
        )
        if self.loops > self.trained_loops:
            said += f" Trained with {in_loops(self.trained_loops)}: more is new to it."
        if self.left_out:
            said += f" The last {in_bytes(self.left_out)} did not fit and are left out."
        return said


def look(
    text: str,
    *,
    token: int,
    loops: int,
    pattern: str,
    window: int,
    output_gate: bool,
    residual_gate: bool,
) -> LoopView:
    """Read a text (at least two bytes) with a small model and look back from byte `token`, from 1.

    `window` is what "window" layers see; `output_gate` picks the model that was trained with
    output gates; without `residual_gate` rho of the trained model is zero.
    """
    reading = read(text, pattern, window, output_gate, residual_gate)
    count = len(reading.raw)
    at = min(token, count) - 1
    small, switches = reading.small, reading.small.switches(window, residual_gate)
    place, number = jnp.asarray(at), jnp.asarray(loops)
    moved = influence(small.model, reading.seen, place, number, switches)
    share = np.asarray(moved)[:loops, :count]
    chances = np.exp(reading.log_probabilities[:loops, at])
    order = np.argsort(-chances, axis=-1)[:, :BEST]
    losses = reading.losses()[:loops]
    narrowed = small.config.with_options(window={"sliding_window": window})
    return LoopView(
        raw=reading.raw,
        left_out=len(text.encode()) - count,
        token=at,
        pattern=pattern,
        trained_loops=narrowed.loops,
        share=share / share.sum(axis=1, keepdims=True),
        reach=tuple(
            tokens_reached(dataclasses.replace(narrowed, loops=loop + 1)) for loop in range(loops)
        ),
        right=np.exp(-losses),
        best=tuple(
            tuple((visible(int(byte)), float(row[byte])) for byte in bytes_)
            for row, bytes_ in zip(chances, order, strict=True)
        ),
        loss=losses.mean(axis=1),
        held_out_loss=small.held_out_loss,
    )


@functools.lru_cache(maxsize=32)
def read(text: str, pattern: str, window: int, output_gate: bool, residual_gate: bool) -> Reading:
    """Run a text through `MAX_LOOPS` loops of a small model; arguments as `look`, remembered."""
    raw = text.encode()[:MAX_TOKENS]
    if len(raw) < 2:
        raise ValueError(f"text: got {text!r}, wanted at least two bytes")
    small = small_model(pattern, output_gate)
    tokens = jnp.asarray(list(raw.ljust(MAX_TOKENS)), jnp.int32)
    seen = trace(small.model, tokens, small.switches(window, residual_gate))
    logits = np.asarray(seen.logits, np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True)) + highest
    return Reading(small, raw, seen, logits - total)


def visible(byte: int) -> str:
    """A byte as one character: itself, or a stand-in for blanks and what has no shape."""
    return STAND_INS.get(chr(byte), chr(byte) if 32 < byte < 127 else "·")


def in_bytes(count: int) -> str:
    """A number of bytes in words."""
    return counted(count, "byte")


def in_loops(count: int) -> str:
    """A number of loops in words."""
    return counted(count, "loop")
