"""Times of the mixers on this machine, in pieces short enough to stop between.

Nothing is timed before every mixer has agreed with its own reference, in both phases.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import Mixer, draw_inputs
from toolkit.lab.attention.view import DECODE, MIXER_NAMES, PREFILL, Point, mixer_row
from toolkit.measure import time_contenders

# The menu of context lengths: each shape is compiled once, whatever the sliders do.
LENGTHS = (256, 4096)
# More than a chunk of the gated delta net, and not a whole number of them.
CHECKED_TOKENS = 40
# Largest difference from the reference, relative to its largest entry, in float32.
TOLERANCE = 1e-4
ROUNDS = 5
# Lengths whose dense scores would not fit a small machine are left out.
MAX_SCORE_BYTES = 300e6

Piece = tuple[int, int, str, list[Point]]
Sizes = tuple[int, int, int, str]  # heads, head size, window, softmax implementation


def measure_pieces(
    sizes: Sizes, *, lengths: tuple[int, ...] = LENGTHS, mixers: tuple[str, ...] = MIXER_NAMES
) -> Iterator[Piece]:
    """Check every mixer, then time prefill and decode at each length, one piece at a time.

    Yields (pieces done, pieces in all, what was just done, new points); a piece takes a second or
    two, nearly all of it compilation.
    """
    heads, head_size, window, softmax = sizes
    if softmax == "dense":
        lengths = tuple(n for n in lengths if 4 * heads * n**2 <= MAX_SCORE_BYTES)
    total = 1 + 2 * len(lengths)
    check_window = min(window, CHECKED_TOKENS // 2)
    for name in mixers:
        check_against_reference(name, (heads, head_size, check_window, softmax))
    yield 1, total, "checked against the references", []
    done = 1
    for tokens in lengths:
        for phase, prepare in ((PREFILL, prefill_call), (DECODE, decode_call)):
            calls = {name: prepare(name, tokens, sizes) for name in mixers}
            points = [
                Point(name, phase, tokens, timing.median, timing.spread)
                for name, timing in time_contenders(calls, rounds=ROUNDS).items()
            ]
            done += 1
            yield done, total, f"{phase} at {tokens:,} tokens", points


def check_against_reference(name: str, sizes: Sizes) -> None:
    """Refuse a mixer whose prefill, or whose last token decoded, is not what its equation says."""
    heads, head_size, window, softmax = sizes
    row = mixer_row(name, window)
    inputs = _inputs(row, CHECKED_TOKENS, heads, head_size)

    @jax.jit
    def prefill_and_decode(*inputs):
        before, last = [x[:, :-1] for x in inputs], [x[:, -1] for x in inputs]
        implementation = _implementation(row, softmax)
        prefilled = row.function(*inputs, implementation=implementation, **row.options)[0]
        state = row.empty_state(
            1, heads, head_size, head_size, CHECKED_TOKENS, jnp.float32, **row.options
        )
        _, state = row.function(*before, initial_state=state, **row.options)
        return prefilled, row.step(*last, state, **row.options)[0]

    # The references loop over tokens in Python, so compiling them would take minutes.
    expected = row.reference(*inputs, **row.options)[0]
    prefilled, decoded = prefill_and_decode(*inputs)
    pairs = {PREFILL: (prefilled, expected), DECODE: (decoded, expected[:, -1])}
    for phase, (ours, theirs) in pairs.items():
        error = float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))
        if not error < TOLERANCE:
            raise RuntimeError(
                f"{row.title}, {phase}: differs from its reference by {error:.1e}, "
                f"wanted less than {TOLERANCE:.0e}; nothing is timed"
            )


def _inputs(row: Mixer, tokens: int, heads: int, head_size: int) -> list[jax.Array]:
    return draw_inputs(row, tokens, batch=1, heads=heads, key=head_size, value=head_size)


def _implementation(row: Mixer, softmax: str) -> str | None:
    return softmax if softmax in row.implementations else None


def prefill_call(name: str, tokens: int, sizes: Sizes) -> Callable[[], Any]:
    """A function of no arguments in which a mixer reads a context and returns the outputs."""
    heads, head_size, window, softmax = sizes
    row = mixer_row(name, window)
    inputs = _inputs(row, tokens, heads, head_size)
    options = {**row.options, "implementation": _implementation(row, softmax)}
    function = jax.jit(lambda *arrays: row.function(*arrays, **options)[0])
    return lambda: function(*inputs)


def decode_call(name: str, tokens: int, sizes: Sizes) -> Callable[[], Any]:
    """A function of no arguments in which a mixer writes the last token of a context.

    Always at the same place; its state is updated in place.
    """
    heads, head_size, window, _ = sizes
    row = mixer_row(name, min(window, tokens))
    token = [array[:, 0] for array in _inputs(row, 1, heads, head_size)]
    random = np.random.default_rng(1)
    empty = row.empty_state(1, heads, head_size, head_size, tokens, jnp.float32, **row.options)
    state = jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32)) if x.ndim else x, empty
    )

    def step(state: Any) -> tuple[Any, Any]:
        if hasattr(state, "length"):  # full to the last slot, whatever the step before wrote
            state = replace(state, length=jnp.int32(tokens - 1))
        return row.step(*token, state, **row.options)

    jitted, held = jax.jit(step, donate_argnums=0), [state]

    def call() -> Any:
        out, held[0] = jitted(held[0])
        return out

    return call
