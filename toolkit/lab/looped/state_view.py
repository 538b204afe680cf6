"""What a looped model carries from loop to loop, and what a loop costs. Pure functions."""

import dataclasses
import functools

import numpy as np

from toolkit.attention import mixer
from toolkit.figures import in_words
from toolkit.lab.kit.table import Table
from toolkit.lab.looped.reader import MAX_LOOPS, loop_gates
from toolkit.lab.looped.view import Reading, in_loops, read, visible
from toolkit.looped import LAYERS, LoopedConfig, cache_bytes_per_sequence
from toolkit.looped.parameters import layer_parameters

SETTLED = 8
"""Bytes at the start of a text that are left out of the mean attention to the first: they have
few others to attend to."""

REFERENCE = "full full"


@dataclasses.dataclass(frozen=True)
class StateView:
    """Arrays have an entry for each of `MAX_LOOPS` loops, `size` one more for the embedding.

    Attributes:
        loops: how many of them are shown.
        here: the byte looked at.
        count: bytes of the text read.
        pattern: the model's layers.
        context: tokens the costs are for.
        size: norm of the hidden state at the byte, [1 + MAX_LOOPS].
        change: norm of what a loop changes in it, [MAX_LOOPS].
        state: norm of the recurrent states there, word and layer number -> [MAX_LOOPS].
        rho: mean of the residual gate over channels, [MAX_LOOPS].
        rho_spread: its standard deviation, [MAX_LOOPS].
        sink: (has output gate, layer number) -> mean attention to the first byte, [MAX_LOOPS].
        even: that of equal weights on all a layer sees.
        operations: multiply-adds times two for a token, all loops so far, [MAX_LOOPS].
        cache: bytes of decode-time state of a sequence, all loops so far, [MAX_LOOPS].
        reference_operations, reference_cache: the same of `REFERENCE`.
    """

    loops: int
    here: str
    count: int
    pattern: str
    context: int
    size: np.ndarray
    change: np.ndarray
    state: dict[str, np.ndarray]
    rho: np.ndarray
    rho_spread: np.ndarray
    sink: dict[tuple[bool, int], np.ndarray]
    even: float
    operations: np.ndarray
    cache: np.ndarray
    reference_operations: np.ndarray
    reference_cache: np.ndarray

    def sentence(self) -> str:
        last = self.loops - 1
        before, change = self.size[last], self.change[last]
        highest = {
            gate: max(
                first[: self.loops].max() for (has, _), first in self.sink.items() if has == gate
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
            f"{in_words(self.operations[last], 'FLOP')} a token and keep "
            f"{in_words(self.cache[last], 'bytes')}; with full attention twice "
            f"{in_words(self.reference_operations[last], 'FLOP')} and "
            f"{in_words(self.reference_cache[last], 'bytes')}."
        )

    def table(self) -> Table:
        numbers = {"size of h": self.size[1:], "change of h": self.change}
        numbers |= {f"state, {name}": norms for name, norms in self.state.items()}
        numbers |= {"rho, mean": self.rho, "rho, spread": self.rho_spread}
        for (gate, layer), sink in self.sink.items():
            numbers[f"first byte, layer {layer}, {'with' if gate else 'without'} gate"] = sink
        rows = []
        for loop in range(self.loops):
            measured = (f"{values[loop]:.3g}" for values in numbers.values())
            modelled = (
                in_words(self.operations[loop], "FLOP"),
                in_words(self.cache[loop], "bytes"),
            )
            rows.append((str(loop + 1), *measured, *modelled))
        return Table(("loop", *numbers, "operations a token", "cache"), rows)


def look_inside(
    text: str,
    *,
    token: int,
    loops: int,
    pattern: str,
    window: int,
    has_output_gate: bool,
    has_residual_gate: bool,
    context: int,
) -> StateView:
    """Read a text with the model and its twin with or without output gate.

    Args:
        text: at least two bytes.
        token: which byte to look at, from 1; more than there are means the last.
        loops: loops to show.
        pattern: a value of `PATTERNS`.
        window: bytes that "window" layers see.
        has_output_gate: which of the two models is looked into.
        has_residual_gate: False sets rho to zero.
        context: tokens to cost.

    Returns:
        A `StateView`.

    Raises:
        ValueError: when the text has fewer than two bytes.

    Cost:
        Two of `read`, both remembered.
    """
    both = {gate: read(text, pattern, window, gate, has_residual_gate) for gate in (False, True)}
    reading = both[has_output_gate]
    at = min(token, len(reading.raw)) - 1
    hidden = np.asarray(reading.seen.hidden[:, at])
    states = np.asarray(reading.seen.inside.state[:, :, at])
    rho = np.asarray(loop_gates(reading.small.model, has_residual_gate))
    config = dataclasses.replace(reading.small.config, sliding_window=window)
    own, reference = (
        _costs(dataclasses.replace(config, pattern=p), context) for p in (pattern, REFERENCE)
    )
    return StateView(
        loops=loops,
        here=visible(reading.raw[at]),
        count=len(reading.raw),
        pattern=pattern,
        context=context,
        size=np.linalg.norm(hidden, axis=-1),
        change=np.linalg.norm(np.diff(hidden, axis=0), axis=-1),
        state={
            f"layer {layer + 1}": states[:, layer]
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
    """Mean attention that the first byte gets from those after the first `SETTLED`.

    Args:
        reading: a text in a model.

    Returns:
        [layers, loops]; NaN for recurrent layers.
    """
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
    """What all loops of a model cost for one more token.

        operations = loops * sum over layers (2 parameters + mixing one token) + 2 vocabulary width

    Args:
        config: a model without prelude and coda.
        context: tokens read already.

    Returns:
        FLOPs of matrix products and mixers (modelled), and bytes of the cache of one sequence.

    Cost:
        Counted on shapes: milliseconds.

    Source:
        `step_flops` of `toolkit.attention.MIXERS`; `toolkit.looped.cache_bytes_per_sequence`.
    """
    heads, _, head_size = config.attention_sizes
    total = 2 * config.vocabulary * config.width
    for word in config.layers:
        matrices = layer_parameters(word, config) + 3 * config.width * config.feed_forward_size
        if word in ("full", "window"):
            options = {"sliding_window": config.sliding_window} if word == "window" else {}
            sizes, row = (heads, head_size, head_size), mixer(word, **options)
        else:
            own = LAYERS[word].sizes_of(config)  # pyright: ignore[reportAttributeAccessIssue]
            sizes, row = (own.value_heads, own.key_size, own.value_size), mixer(word)
        mixing = row.step_flops(1, context, *sizes, **row.options)
        total += config.loops * (2 * matrices + mixing)
    return total, cache_bytes_per_sequence(config, context)
