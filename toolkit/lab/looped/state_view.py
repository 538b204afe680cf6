"""What a looped model carries from loop to loop, and what a loop costs. Pure functions."""

import dataclasses
import functools
from typing import Any

import numpy as np

from toolkit.attention import mixer
from toolkit.figures import in_words
from toolkit.lab.kit.view import Data, View
from toolkit.lab.looped.reader import MAX_LOOPS, loop_gates
from toolkit.lab.looped.view import Reading, in_loops, read, visible
from toolkit.looped import LAYERS, LoopedConfig, cache_bytes_per_sequence
from toolkit.looped.parameters import layer_parameters

SETTLED = 8
"""Bytes at the start of a text that are left out of the mean attention to the first: they have
few others to attend to."""

REFERENCE = "full full"


@dataclasses.dataclass(frozen=True)
class StateView(View):
    """Arrays have an entry for each of `MAX_LOOPS` loops, `size` one more for the embedding."""

    loops: int  # how many of them are shown
    here: str  # the byte looked at
    count: int  # bytes of the text read
    pattern: str
    context: int  # tokens the costs are for
    size: np.ndarray  # norm of the hidden state at the byte
    change: np.ndarray  # norm of what a loop changes in it
    state: dict[int, np.ndarray]  # layer number -> norm of its recurrent state there
    rho: np.ndarray  # mean of the residual gate over channels
    rho_spread: np.ndarray  # its standard deviation
    sink: dict[tuple[bool, int], np.ndarray]  # (output gate, layer) -> attention to the first byte
    even: float  # that of equal weights on all a layer sees
    operations: np.ndarray  # FLOPs per token, all loops so far
    cache: np.ndarray  # bytes of decode-time state of a sequence, all loops so far
    reference_operations: np.ndarray  # those of `REFERENCE`
    reference_cache: np.ndarray

    def data(self) -> Data:
        columns = {
            "loop": np.arange(MAX_LOOPS) + 1,
            "size of h": self.size[1:],
            "change of h": self.change,
            **{f"state, layer {layer}": norms for layer, norms in self.state.items()},
            "rho, mean": self.rho,
            "rho, spread": self.rho_spread,
            **{sink_heading(*which): share for which, share in self.sink.items()},
            "first byte, even share": np.full(MAX_LOOPS, self.even),
            "operations per token (FLOP)": self.operations,
            "cache (bytes)": self.cache,
            "operations per token, full attention twice (FLOP)": self.reference_operations,
            "cache, full attention twice (bytes)": self.reference_cache,
        }
        return {heading: values[: self.loops] for heading, values in columns.items()}

    def sentence(self) -> str:
        last = self.loops - 1
        before, change = self.size[last], self.change[last]
        highest = {
            gate: max(
                share[: self.loops].max() for (has, _), share in self.sink.items() if has == gate
            )
            for gate in (False, True)
        }
        sink = (
            f"The first byte gets at most {highest[False]:.1%} of the attention without output "
            f"gate and {highest[True]:.1%} with it; an even share is {self.even:.1%}."
            if self.even
            else "The windows have moved past the first byte."
        )
        return (
            f"At “{self.here}”, loop {self.loops} of “{self.pattern}” changes a hidden state of "
            f"norm {before:.3g} by {change:.3g} ({change / before:.0%}); its residual gate has "
            f"mean {self.rho[last]:.3f}, spread {self.rho_spread[last]:.3f}. {sink} Measured here. "
            f"Modelled at {self.context:,} tokens: {in_loops(self.loops)} take "
            f"{in_words(self.operations[last], 'FLOP')} per token and keep "
            f"{in_words(self.cache[last], 'bytes')}; with full attention twice "
            f"{in_words(self.reference_operations[last], 'FLOP')} and "
            f"{in_words(self.reference_cache[last], 'bytes')}."
        )


def sink_heading(has_gate: bool, layer: int) -> str:
    """The heading of the attention to the first byte in a layer."""
    return f"first byte, layer {layer}, {'with' if has_gate else 'without'} gate"


def look_inside(
    text: str,
    *,
    token: int,
    loops: int,
    pattern: str,
    window: int,
    output_gate: bool,
    residual_gate: bool,
    context_length: int,
) -> StateView:
    """Read a text with a model and its twin with or without output gate; arguments as `look`.

    `output_gate` says which of the two is looked into, `context_length` how many tokens to cost.
    """
    both = {gate: read(text, pattern, window, gate, residual_gate) for gate in (False, True)}
    reading = both[output_gate]
    at = min(token, len(reading.raw)) - 1
    hidden = np.asarray(reading.seen.hidden[:, at])
    states = np.asarray(reading.seen.inside.state[:, :, at])
    rho = np.asarray(loop_gates(reading.small.model, residual_gate))
    config = reading.small.config.with_options(window={"sliding_window": window})
    own, reference = (
        _costs(dataclasses.replace(config, pattern=p), context_length) for p in (pattern, REFERENCE)
    )
    return StateView(
        loops=loops,
        here=visible(reading.raw[at]),
        count=len(reading.raw),
        pattern=pattern,
        context=context_length,
        size=np.linalg.norm(hidden, axis=-1),
        change=np.linalg.norm(np.diff(hidden, axis=0), axis=-1),
        state={
            layer + 1: states[:, layer]
            for layer in range(len(config.layers))
            if not np.isnan(states[0, layer])
        },
        rho=rho.mean(axis=-1),
        rho_spread=rho.std(axis=-1),
        sink={
            (gate, layer + 1): first
            for gate, one in both.items()
            for layer, first in enumerate(first_byte(one))
            if not np.isnan(first).any()
        },
        even=_even_share(len(reading.raw), window if "full" not in config.layers else None),
        operations=own[0],
        cache=own[1],
        reference_operations=reference[0],
        reference_cache=reference[1],
    )


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
    """`loop_costs` of 1, 2, ... loops: [2, MAX_LOOPS]."""
    every = (dataclasses.replace(config, loops=loop + 1) for loop in range(MAX_LOOPS))
    return np.array([loop_costs(one, context) for one in every]).T


def loop_costs(config: LoopedConfig, context: int) -> tuple[int, int]:
    """FLOPs of all loops of a model for one more token (modelled), and bytes of its cache.

    operations = loops * sum over layers (2 parameters + mixing one token) + 2 vocabulary width
    """
    total = 2 * config.vocabulary * config.width
    for word in config.layers:
        matrices = layer_parameters(word, config) + 3 * config.width * config.feed_forward_size
        own: Any = LAYERS[word].sizes_of(config)
        if word in ("full", "window"):
            heads, _, size = own
            window = LAYERS[word].window_of(config)
            sizes = heads, size, size
            row = mixer(word, sliding_window=window) if window else mixer(word)
        else:
            _, *sizes = own
            row = mixer(word)
        mixing = row.step_flops(1, context, *sizes, **row.options)
        total += config.loops * (2 * matrices + mixing)
    return total, cache_bytes_per_sequence(config, context)
