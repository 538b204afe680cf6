"""One text read by a small looped model: influences and predictions after each loop.

Pure functions of the controls. The reading of a text is cached, so that moving the token or the
number of loops computes nothing anew.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from toolkit.lab.kit.text import MOST, TextView, back_to_most, looked_at
from toolkit.lab.kit.view import Data
from toolkit.lab.looped.models import SmallModel, small_model
from toolkit.lab.looped.reader import MAX_TOKENS, Switches, Trace, influence, trace
from toolkit.looped import LoopedConfig, tokens_reached
from toolkit.measure.words import counted

BEST = 3
"""Likeliest bytes shown for each loop."""

STAND_INS = {" ": "␣", "\n": "⏎"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """A text in a model, every loop of `MAX_LOOPS`."""

    small: SmallModel
    config: LoopedConfig  # with the window it was read with
    switches: Switches
    raw: bytes  # those read, at most `MAX_TOKENS`
    seen: Trace
    log_probabilities: np.ndarray  # of every byte after each loop, [loops, time, vocabulary]


@dataclasses.dataclass(frozen=True)
class LoopView(TextView):
    """The influences on one byte's prediction. Arrays have a row per displayed loop."""

    unit = "byte"
    reading: Reading
    share: np.ndarray  # of the influence on the prediction, [loops, time]; 0 where no path leads
    reach: tuple[int | None, ...]  # bytes a path can lead from, itself included; None: all

    @property
    def loops(self) -> int:
        """Loops shown."""
        return len(self.reach)

    @property
    def held_out_loss(self) -> float:
        """Recorded after training: nats per byte on unseen text."""
        return self.reading.small.record["result"]["held_out_loss"]

    @functools.cached_property
    def losses(self) -> np.ndarray:
        """Nats of each byte but the first, [loops, time - 1]."""
        known, following = self.reading.log_probabilities, self.reading.raw[1:]
        return -known[: self.loops, np.arange(len(following)), [*following]]

    @property
    def loss(self) -> np.ndarray:
        """Mean over the text, nats per byte."""
        return self.losses.mean(axis=1)

    @property
    def chances(self) -> np.ndarray:
        """The probability of each byte given those before it, [loops, time]; NaN for the first."""
        return np.pad(np.exp(-self.losses), ((0, 0), (1, 0)), constant_values=np.nan)

    @functools.cached_property
    def best(self) -> list[list[tuple[str, float]]]:
        """The likeliest next bytes with their probabilities, the likeliest first."""
        rows = np.exp(self.reading.log_probabilities[: self.loops, self.token])
        best = np.argsort(-rows, axis=-1)[:, :BEST]
        return [
            [(visible(int(byte)), float(row[byte])) for byte in bytes_]
            for row, bytes_ in zip(rows, best, strict=True)
        ]

    def distance(self, loop: int) -> int:
        """Bytes back within which `MOST` of the influence lies; 0 is the byte itself."""
        return back_to_most(self.share[loop], self.token)

    def data(self) -> Data:
        """A column per loop; a row per number of the loop, then one per byte of the text."""
        loops, ranks = range(self.loops), enumerate(("likeliest", "second", "third"))
        rows = [
            ("loss of the text, nats per byte", "", self.loss),
            ("reach in bytes, modelled", "", [reach or "all" for reach in self.reach]),
            (f"bytes back to {MOST:.0%} of influence", "", [self.distance(n) for n in loops]),
            *(
                (what, "", [row[n][part] for row in self.best])
                for n, rank in ranks
                for part, what in enumerate((f"{rank} next byte", "its chance"))
            ),
        ]
        for what, values in (("share of influence", self.share), ("chance it had", self.chances)):
            named = (f"{at} {byte}" for at, byte in enumerate(self.words, 1))
            rows += zip([what] * len(self.words), named, values.T, strict=True)
        what, byte, values = zip(*rows, strict=True)
        columns = {f"loop {n + 1}": [row[n] for row in values] for n in loops}
        return {"what": what, "byte": byte, **columns}

    def footnote(self) -> str:
        return (
            "Red line: as far as a path can lead (modelled), in bytes; grey beyond it. Dashed: "
            f"{MOST:.0%} of the influence lies to its right. Measured here."
        )

    def sentence(self) -> str:
        reach, small = self.reach[-1], self.reading.small
        can = f"{counted(reach, 'byte')}, itself included" if reach else "every byte before it"
        byte, chance = self.best[-1][0]
        caption = (
            f"{self.place_in_words}, after {counted(self.loops, 'loop')} of "
            f"“{small.config.pattern}”: the prediction can rest on {can}; {MOST:.0%} of the "
            f"influence comes from it and the {counted(self.distance(-1), 'byte')} before it. It "
            f"would write “{byte}” ({chance:.0%}). Mean loss of the text after each loop: "
            f"{', '.join(f'{loss:.2f}' for loss in self.loss)} nats per byte. Measured here; the "
            f"reach is modelled. Recorded after training: {self.held_out_loss:.2f} on unseen text."
        )
        if self.loops > small.config.loops:
            caption += f" Trained with {counted(small.config.loops, 'loop')}: more is new to it."
        return caption + self.left_out_in_words


def look(text: str, *, token: int, loops: int, **model: Any) -> LoopView:
    """Read a text as `read` does, and look back from byte `token`, from 1."""
    reading, given = read(text, **model), byte_looked_at(text, token)
    places = jnp.asarray(given["token"]), jnp.asarray(loops)
    moved = influence(reading.small.model, reading.seen, *places, reading.switches)
    share = np.asarray(moved)[:loops, : len(reading.raw)]
    share = share / share.sum(1, keepdims=True)
    reach = (tokens_reached(dataclasses.replace(reading.config, loops=n + 1)) for n in range(loops))
    return LoopView(**given, reading=reading, share=share, reach=tuple(reach))


@functools.lru_cache(maxsize=32)
def read(text: str, pattern: str, window: int, output_gate: bool, residual_gate: bool) -> Reading:
    """Run a text (at least two bytes) through `MAX_LOOPS` loops of a small model; remembered.

    `window` is what "window" layers see; `output_gate` picks the model that was trained with
    output gates; without `residual_gate` rho of the trained model is zero.
    """
    from scipy.special import log_softmax

    raw = text.encode()[:MAX_TOKENS]
    if len(raw) < 2:
        raise ValueError(f"text: got {text!r}, wanted at least two bytes")
    small = small_model(pattern, output_gate)
    switches = small.switches(window, residual_gate)
    seen = trace(small.model, jnp.asarray(list(raw.ljust(MAX_TOKENS)), jnp.int32), switches)
    logits = np.asarray(seen.logits, np.float64)
    config = small.config.with_options(window={"sliding_window": window})
    return Reading(small, config, switches, raw, seen, log_softmax(logits, axis=-1))


def byte_looked_at(text: str, token: int) -> dict[str, Any]:
    """The fields of a `TextView` of bytes."""
    return looked_at([*map(visible, text.encode())], token, MAX_TOKENS)


def visible(byte: int) -> str:
    """A byte as one character: itself, or a stand-in for blanks and what has no shape."""
    return STAND_INS.get(chr(byte), chr(byte) if 32 < byte < 127 else "·")
