"""The state that a looped model carries between loops, and the cost of a loop. Pure functions."""

import dataclasses
import functools
from typing import Any

import numpy as np

from toolkit.lab.kit.text import TextView
from toolkit.lab.kit.view import Data
from toolkit.lab.looped.reader import MAX_LOOPS, loop_gates
from toolkit.lab.looped.view import Reading, byte_looked_at, read
from toolkit.looped import LoopedConfig, cache_bytes_per_sequence
from toolkit.looped.parameters import token_flops
from toolkit.measure.words import counted, in_words

SETTLED = 8
"""Bytes at the start of a text that are left out of the mean attention to the first: they have
few others to attend to."""

REFERENCE = "full full"
EVEN = "first byte, even share (share)"


@dataclasses.dataclass(frozen=True)
class StateView(TextView):
    """Values of all `MAX_LOOPS` loops, of which the first `loops` are shown."""

    loops: int
    pattern: str
    context: int  # tokens the costs are for
    columns: Data  # heading -> numbers of each loop
    everywhere: dict[str, np.ndarray]  # those that depend on the byte, of all bytes: [loops, time]

    def data(self) -> Data:
        return {heading: values[: self.loops] for heading, values in self.columns.items()}

    def footnote(self) -> str:
        return (
            "Measured here, at the byte looked at; cost is modelled. Bars at rho: one deviation "
            "over channels. Dotted: where the loops of training end."
        )

    def sentence(self) -> str:
        data, last = self.data(), {name: cells[-1] for name, cells in self.cells().items()}
        share = in_words(data["change of h"][-1] / data["size of h"][-1], "share")
        here, sink = self.words[self.token], "The windows have moved past the first byte."
        if data[EVEN][-1]:
            without, with_gate = (
                in_words(max(data[name].max() for name in data if name.endswith(end)), "share")
                for end in (" without gate (share)", " with gate (share)")
            )
            sink = (
                f"The first byte gets at most {without} of the attention without output gate and "
                f"{with_gate} with it; an even share is {last['first byte, even share']}."
            )
        return (
            f"At “{here}”, loop {self.loops} of “{self.pattern}” changes the hidden state by "
            f"{last['change of h']}, {share} of the norm of {last['size of h']} that it then has; "
            f"its residual gate has mean {last['rho, mean']}, spread {last['rho, spread']}. {sink} "
            f"Measured here. Modelled at {self.context:,} tokens: {counted(self.loops, 'loop')} "
            f"take {last['operations per token']} per token and keep {last['cache']}; with full "
            f"attention twice {last['operations per token, full attention twice']} and "
            f"{last['cache, full attention twice']}."
        )


def sink_heading(has_gate: bool, layer: int) -> str:
    """The heading of the attention to the first byte in a layer."""
    return f"first byte, layer {layer}, {'with' if has_gate else 'without'} gate (share)"


def look_inside(
    text: str, *, token: int, loops: int, output_gate: bool, context_length: int, **model: Any
) -> StateView:
    """Read a text as `read` does with a model and its twin with or without output gate.

    `output_gate` says which of the two is looked into, `context_length` how many tokens to cost.
    """
    both = {gate: read(text, output_gate=gate, **model) for gate in (False, True)}
    reading = both[output_gate]
    config, pattern, count = reading.config, reading.config.pattern, len(reading.raw)
    given = byte_looked_at(text, token)
    at = given["token"]
    hidden = np.asarray(reading.seen.hidden)[:, :count]
    rho = np.asarray(loop_gates(reading.small.model, reading.switches.has_residual_gate))
    everywhere = {
        "size of h": np.linalg.norm(hidden[1:], axis=-1),
        "change of h": np.linalg.norm(np.diff(hidden, axis=0), axis=-1),
    }
    states = np.asarray(reading.seen.inside.state)[:, :, :count]
    for layer in range(len(config.layers)):
        if not np.isnan(states[:, layer]).any():
            everywhere[f"state, layer {layer + 1}"] = states[:, layer]
    columns = {"loop": np.arange(MAX_LOOPS) + 1}
    columns |= {heading: values[:, at] for heading, values in everywhere.items()}
    columns |= {"rho, mean": rho.mean(axis=-1), "rho, spread": rho.std(axis=-1)}
    for gate, seen in both.items():
        for layer, first in enumerate(first_byte(seen), 1):
            if not np.isnan(first).any():
                columns[sink_heading(gate, layer)] = first
    even = _even_share(count, None if "full" in config.layers else config.window.sliding_window)
    columns[EVEN] = np.full(MAX_LOOPS, even)
    for layers, what in ((pattern, ""), (REFERENCE, ", full attention twice")):
        operations, cache = _costs(dataclasses.replace(config, pattern=layers), context_length)
        columns |= {f"operations per token{what} (FLOP)": operations, f"cache{what} (bytes)": cache}
    shown = {"loops": loops, "pattern": pattern, "context": context_length}
    return StateView(**given, **shown, columns=columns, everywhere=everywhere)


def first_byte(reading: Reading) -> np.ndarray:
    """Mean attention to the first byte after the first `SETTLED`: [layers, loops], NaN for none."""
    count = len(reading.raw)
    start = min(SETTLED, count - 1)
    return np.asarray(reading.seen.inside.first)[:, :, start:count].mean(axis=-1).T


def _even_share(count: int, window: int | None) -> float:
    """The same if every layer weighed all it sees alike; windows move past the first byte."""
    seen = np.arange(min(SETTLED, count - 1), count) + 1
    return float(np.mean(np.where(seen > (window or count), 0.0, 1 / seen)))


@functools.lru_cache(maxsize=64)
def _costs(config: LoopedConfig, context: int) -> np.ndarray:
    """FLOPs of one more token and bytes of the cache with 1, 2, ... loops: [2, MAX_LOOPS]."""
    every = (dataclasses.replace(config, loops=loop + 1) for loop in range(MAX_LOOPS))
    both = token_flops, cache_bytes_per_sequence
    return np.array([[cost(word, context) for cost in both] for word in every]).T
