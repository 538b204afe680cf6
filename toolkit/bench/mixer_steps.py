"""One decoded token of a recurrent mixer against reading and writing its state once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import Mixer
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.mixer_inputs import mixer_inputs

HEADS, SIZE = 16, 128
# One sequence, 1 MiB of state; and 64 MiB, which the caches of a core do not hold.
BATCHES = (1, 64)
TOLERANCE = 1e-4
SLOWEST = 1.3  # most wanted of the step's time over one read and one write of the state
OURS, PASS = "toolkit, step", "state read and written once"


def cases(rows: Sequence[Mixer]) -> Iterator[PlannedCase]:
    """Every row's step, for one sequence and for many.

    Args:
        rows: recurrent rows of `MIXERS`.

    Returns:
        The comparisons, each built in its turn.

    Cost:
        A second or two each.
    """
    for row in rows:
        for batch in BATCHES:
            yield PlannedCase(
                f"{row.name} step B={batch} H={HEADS} D={SIZE} float32",
                partial(step_case, row, batch),
            )


def step_case(row: Mixer, batch: int, name: str) -> Case:
    """One mixer's step, its state updated in place, beside x <- c x over as many bytes.

    Args:
        row: the mixer.
        batch: sequences.
        name: of the case.

    Returns:
        The comparison; both write over the array they were given.

    Cost:
        `row.step_bytes` of memory traffic a token, `2 * row.state_bytes` of the pass.

    Source:
        McCalpin, "Memory bandwidth and machine balance", 1995 (STREAM, the scale kernel).
    """
    token = [x[:, 0] for x in mixer_inputs(row, 1, HEADS, SIZE, batch=batch)]
    start = jax.random.normal(jax.random.key(2), (batch, HEADS, SIZE, SIZE)) / SIZE**0.5
    step = jax.jit(
        lambda state, *token: row.step(*token, state, **row.options),
        donate_argnums=0,
    )
    # c = -1: with any other the numbers would run out of range, and a processor slows on those.
    scale = jax.jit(lambda x: (None, -x), donate_argnums=0)
    state = row.state_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options)
    return Case(
        name=name,
        contenders={
            OURS: _in_place(step, start, token),
            PASS: _in_place(scale, start, ()),
        },
        check=_check(row, token, start),
        ours=OURS,
        targets={PASS: 1 / SLOWEST},
        note=f"state {state / 2**20:.0f} MiB, modelled traffic of a step "
        f"{row.step_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options) / 2**20:.0f} MiB",
    )


def _in_place(
    function: Callable[..., Any], state: jax.Array, token: list[jax.Array] | tuple[()]
) -> Callable[[], Any]:
    """The function as a contender that feeds its state back, and returns the rest."""
    held = [jnp.copy(state)]

    def call() -> jax.Array:
        out, held[0] = function(held[0], *token)
        return jax.block_until_ready((out, held[0]))[0]

    return call


def _check(
    row: Mixer, token: list[jax.Array], state: jax.Array
) -> Callable[[Mapping[str, Any]], None]:
    """The first step gives what the reference gives for a sequence of one token."""

    def check(results: Mapping[str, Any]) -> None:
        sequence = [x[:, None] for x in token]
        out, _ = row.reference(*sequence, initial_state=state, **row.options)
        agree(TOLERANCE)({"reference": out[:, 0], OURS: np.asarray(results[OURS])})

    return check
