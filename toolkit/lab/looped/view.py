"""One text read by a small looped model: what it can see and what it would say after each loop.

Pure functions of the controls. The reading of a text is remembered, so moving the token or the
number of loops only looks at another part of it.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from toolkit.lab.kit.table import Table
from toolkit.lab.looped.models import SmallModel, small_model
from toolkit.lab.looped.reader import MAX_TOKENS, Trace, influence, trace
from toolkit.looped import tokens_reached

BEST = 3
"""Likeliest bytes shown for each loop."""

MOST = 0.9
"""The part of the influence that the words and the brackets speak of."""

VISIBLE = "␣"


@dataclasses.dataclass(frozen=True)
class Reading:
    """A text in a model, every loop of `MAX_LOOPS`.

    Attributes:
        small: the model.
        raw: the bytes read, at most `MAX_TOKENS`.
        seen: what the reader kept.
        log_probabilities: of every byte after each loop, [loops, time, vocabulary].
    """

    small: SmallModel
    raw: bytes
    seen: Trace
    log_probabilities: np.ndarray

    def losses(self) -> np.ndarray:
        """Nats of each byte of the text but the first, after each loop: [loops, time - 1]."""
        ahead = np.arange(len(self.raw) - 1)
        return -self.log_probabilities[:, ahead, list(self.raw[1:])]


@dataclasses.dataclass(frozen=True)
class LoopView:
    """What one byte's prediction rests on, loop by loop. Arrays have a row a loop shown.

    Attributes:
        raw: the bytes of the text.
        left_out: how many bytes at the end did not fit.
        token: index of the byte looked at.
        pattern: the model's layers.
        window: bytes a "window" layer sees.
        has_output_gate, has_residual_gate: which gates are on.
        trained_loops: loops the model was trained with.
        share: part of the influence on the prediction at `token` that each byte has,
            [loops, time]; exactly 0 where no path leads.
        reach: bytes, the one looked at included, that a path can lead from; None without limit.
        right: probability of the byte that does follow, [loops, time - 1].
        best: the likeliest bytes at `token` with their probabilities, likeliest first.
        loss: mean over the text, nats a byte, [loops].
        held_out_loss: recorded after training, nats a byte.
    """

    raw: bytes
    left_out: int
    token: int
    pattern: str
    window: int
    has_output_gate: bool
    has_residual_gate: bool
    trained_loops: int
    share: np.ndarray
    reach: tuple[int | None, ...]
    right: np.ndarray
    best: tuple[tuple[tuple[str, float], ...], ...]
    loss: np.ndarray
    held_out_loss: float

    @property
    def loops(self) -> int:
        """Loops shown."""
        return len(self.loss)

    def distance(self, loop: int) -> int:
        """Bytes back within which `MOST` of the influence lies; 0 is the byte itself."""
        return int(np.argmax(np.cumsum(self.share[loop, self.token :: -1]) >= MOST))

    def sentence(self) -> str:
        here = visible(self.raw[self.token])
        reach = self.reach[-1]
        can = "every byte before it" if reach is None else f"{in_bytes(reach)}, itself included"
        byte, chance = self.best[-1][0]
        said = (
            f"At “{here}” (byte {self.token + 1} of {len(self.raw)}), after {in_loops(self.loops)} "
            f"of “{self.pattern}”: the prediction can rest on {can}; {MOST:.0%} of the influence "
            f"comes from it and the {in_bytes(self.distance(-1))} before it. It would write "
            f"“{byte}” ({chance:.0%}). Mean loss of the text after each loop: "
            f"{', '.join(f'{loss:.2f}' for loss in self.loss)} nats a byte. Measured here; the "
            f"reach is modelled. Recorded after training: {self.held_out_loss:.2f} on unseen text."
        )
        if self.loops > self.trained_loops:
            said += f" Trained with {in_loops(self.trained_loops)}: more is new to it."
        if self.left_out:
            said += f" The last {in_bytes(self.left_out)} did not fit and are left out."
        return said

    def table(self) -> Table:
        columns = ["byte", "", *(f"share, loop {loop + 1}" for loop in range(self.loops))]
        columns += [f"next byte, loop {loop + 1}" for loop in range(self.loops)]
        rows = []
        for s, byte in enumerate(self.raw):
            is_last = s == len(self.raw) - 1
            shares = (f"{share:.2g}" for share in self.share[:, s])
            chances = ("" if is_last else f"{chance[s]:.2g}" for chance in self.right)
            rows.append((str(s + 1), visible(byte), *shares, *chances))
        return Table(tuple(columns), rows)


def look(
    text: str,
    *,
    token: int,
    loops: int,
    pattern: str,
    window: int,
    has_output_gate: bool,
    has_residual_gate: bool,
) -> LoopView:
    """Read a text and look back from one byte.

    Args:
        text: at least two bytes; the first `MAX_TOKENS` are read.
        token: which byte to look at, from 1; more than there are means the last.
        loops: loops to show, up to `MAX_LOOPS`.
        pattern: a value of `PATTERNS`.
        window: bytes that "window" layers see.
        has_output_gate: the model that was trained with output gates, or the one without.
        has_residual_gate: False sets rho of the trained model to zero.

    Returns:
        A `LoopView`.

    Raises:
        ValueError: when the text has fewer than two bytes.

    Cost:
        `read` and `influence`: about half a gigaflop with four loops.
    """
    reading = read(text, pattern, window, has_output_gate, has_residual_gate)
    count = len(reading.raw)
    at = min(token, count) - 1
    small, switches = reading.small, reading.small.switches(window, has_residual_gate)
    place, number = jnp.asarray(at), jnp.asarray(loops)
    moved = influence(small.model, reading.seen, place, number, switches)
    share = np.asarray(moved)[:loops, :count]
    chances = np.exp(reading.log_probabilities[:loops, at])
    order = np.argsort(-chances, axis=-1)[:, :BEST]
    losses = reading.losses()[:loops]
    narrowed = dataclasses.replace(small.config, sliding_window=window)
    return LoopView(
        raw=reading.raw,
        left_out=len(text.encode()) - count,
        token=at,
        pattern=pattern,
        window=window,
        has_output_gate=has_output_gate,
        has_residual_gate=has_residual_gate,
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
def read(
    text: str, pattern: str, window: int, has_output_gate: bool, has_residual_gate: bool
) -> Reading:
    """Run a text through `MAX_LOOPS` loops of a small model.

    Args:
        text: as in `look`.
        pattern: as in `look`.
        window: as in `look`.
        has_output_gate: as in `look`.
        has_residual_gate: as in `look`.

    Returns:
        A `Reading`, remembered.

    Raises:
        ValueError: when the text has fewer than two bytes.

    Cost:
        About 0.15 gigaflops; the first use of a kind of model compiles for a second or two.
    """
    raw = text.encode()[:MAX_TOKENS]
    if len(raw) < 2:
        raise ValueError(f"text: got {text!r}, wanted at least two bytes")
    small = small_model(pattern, has_output_gate)
    tokens = jnp.asarray(list(raw.ljust(MAX_TOKENS)), jnp.int32)
    seen = trace(small.model, tokens, small.switches(window, has_residual_gate))
    logits = np.asarray(seen.logits, np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True)) + highest
    return Reading(small, raw, seen, logits - total)


def visible(byte: int) -> str:
    """A byte as one character: itself, or a stand-in for blanks and what has no shape."""
    if byte == ord(" "):
        return VISIBLE
    if byte == ord("\n"):
        return "⏎"
    return chr(byte) if 32 < byte < 127 else "·"


def in_bytes(count: int) -> str:
    """A number of bytes in words: `"1 byte"`, `"12 bytes"`."""
    return f"{count} byte" + ("" if count == 1 else "s")


def in_loops(count: int) -> str:
    """A number of loops in words."""
    return f"{count} loop" + ("" if count == 1 else "s")
