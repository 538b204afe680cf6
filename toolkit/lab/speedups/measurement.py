"""The chosen work done here, in pieces short enough to stop between; checked before it is timed."""

from collections.abc import Iterator

import jax

from toolkit.attention import mixer
from toolkit.bench.agreement import agree
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs, output_weight
from toolkit.lab.speedups.recorded import FORWARD, GRADIENT, Time
from toolkit.measure import record, time_contenders
from toolkit.measure.timing import PASSED

CHECKED_TOKENS = 40  # more than a chunk, and not a whole number of them
TOLERANCE = 1e-3  # relative to the largest entry, float32
ROUNDS = 5
MOST_TOKENS = 8192  # a minute of a small machine, and 900 MB


def can_measure(time: Time | None) -> bool:
    """Whether the button can do this work: a mixer's sequence, not too long for a notebook."""
    return (
        time is not None
        and time.work in (FORWARD, GRADIENT)
        and None not in (time.tokens, time.heads, time.size)
        and (time.tokens or 0) <= MOST_TOKENS
    )


def measure_here(time: Time) -> Iterator[tuple[int, int, str, Time | None]]:
    """Check this package's form against the equation, compile it, time it in rounds.

    Yields (pieces done, pieces in all, what was just done, the time once it is known).
    """
    row, is_gradient = mixer(time.method), time.work == GRADIENT
    total = 3
    assert time.tokens is not None

    def call(tokens: int):
        arrays = mixer_inputs(row, tokens, time.heads or 1, time.size or 1, batch=time.batch or 1)
        args = (output_weight(row, arrays), *arrays) if is_gradient else tuple(arrays)
        form = jax.jit(mixer_form(row, None, backward=is_gradient))
        return arrays, args, lambda: form(*args)

    arrays, _, short = call(min(CHECKED_TOKENS, time.tokens))
    if is_gradient:
        args = (output_weight(row, arrays), *arrays)
        expected = jax.grad(_loss(row), argnums=tuple(range(1, len(args))))(*args)
    else:
        expected = row.reference(*arrays, **row.options)[0]
    agree(TOLERANCE)({"its equation": expected, "toolkit": short()})
    yield 1, total, "agrees with its equation, token by token", None
    _, _, long = call(time.tokens)
    jax.block_until_ready(long())
    yield 2, total, "compiled", None
    timing = time_contenders({"toolkit": long}, rounds=ROUNDS)["toolkit"]
    found = record(
        f"{time.case} | here | toolkit", timing.median, "s", samples=timing.samples, check=PASSED
    )
    new = Time(
        time.method, time.work, time.case, "toolkit, here", time.batch, time.tokens, time.heads,
        time.size, found, is_here=True,
    )  # fmt: skip
    yield 3, total, "timed", new


def _loss(row):
    def loss(weight, *inputs):
        return (row.reference(*inputs, **row.options)[0] * weight).sum()

    return loss
