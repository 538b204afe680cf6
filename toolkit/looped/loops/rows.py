"""Per-loop parameters, one row per loop, and the scan over them; and the check of tokens."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int


class LoopRow(NamedTuple):
    """The parameters of one loop or, with a leading axis, of all loops."""

    rho: Float[Array, "... width"] | None = None  # gate on the loop's input [width], or None
    embedding: Float[Array, "... width"] | None = None  # added to the loop's input [width], or None


def row_of(stacked: Any, tau: int) -> Any:
    """One loop's part of arrays with a leading axis of loops."""
    return jax.tree.map(lambda leaf: leaf[tau], stacked)


def run_rows(
    config: Any, rows: LoopRow, body: Callable[[int, Any, LoopRow], tuple[Any, Any]], h: Any, *,
    remat: bool = False,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Run body(loop, h, row) for every loop: by `lax.scan` if all are alike, otherwise unrolled.

    With `remat`, loops that differ are a scan over a `lax.switch`, because XLA for CPUs merges the
    recomputation of unrolled loops with their first computation and saves no memory.
    """
    if config.loops_differ and not remat:
        results = []
        for tau in range(config.loops):
            h, result = body(tau, h, row_of(rows, tau))
            results.append(result)
        return h, tuple(results)
    first = [config.loop_windows.index(windows) for windows in config.loop_windows]
    kinds = sorted(set(first))

    def loop(h, xs):
        kind, row = xs
        branches = [functools.partial(body, tau) for tau in kinds]
        return jax.lax.switch(kind, branches, h, row)

    if remat:
        loop = jax.checkpoint(loop, prevent_cse=False)
    h, stacked = jax.lax.scan(loop, h, (jnp.array([kinds.index(tau) for tau in first]), rows))
    return h, tuple(row_of(stacked, tau) for tau in range(config.loops))


def check_tokens(tokens: Int[Array, "batch time"], vocabulary: int) -> None:
    """Refuse anything but a non-empty [batch, time] array of whole numbers below the vocabulary.

    Traced tokens cannot be checked: a number beyond the vocabulary gives NaN.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; "
            "they must be whole numbers of shape [batch, time]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens of shape {tokens.shape} are empty; at least one is needed.")
    if isinstance(tokens, Tracer):
        return
    values = np.asarray(tokens)  # whose smallest is a number, be it inside of a trace
    lowest, highest = values.min(), values.max()
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"tokens must lie in [0, {vocabulary}), the vocabulary; got {lowest} to {highest}."
        )
