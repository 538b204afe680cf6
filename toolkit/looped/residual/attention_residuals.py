"""Attention residuals: a sub-layer reads a softmax mean of what groups of layers have added.

The residual stream is cut into groups of layers. The sum of what the layers of a group add is a
source; every sub-layer attends to all sources with a learned query of its own, the unfinished sum
of its own group included.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit._pytrees import register_dataclass
from toolkit.looped.mixing.layer import Separate
from toolkit.looped.residual.hyper_connections import normalised

EPSILON = 1e-6
"""That of the norm of sources."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Sourced:
    """The state of the stream between two sub-layers.

    Attributes:
        h: the sum of the present group [..., width].
        sources: the sums of the groups before it.
    """

    h: Float[Array, "... width"]
    sources: tuple[Float[Array, "... width"], ...] = ()


def attend_to_sources(
    queries: Float[Array, "queries width"],
    sources: Sequence[Float[Array, "... width"]],
    *,
    is_raw: bool = False,
) -> Float[Array, "... queries width"]:
    """sum_s softmax_s(q . n_s / sqrt(width)) n_s,   n_s = RMSNorm(source s); at least float32.

    With `is_raw` the mean is of the sources themselves.
    """
    stacked = jnp.stack(sources, axis=-2)
    keys = normalised(stacked, EPSILON)
    wide = keys.dtype
    scores = jnp.einsum("qd,...sd->...qs", queries.astype(wide), keys)
    shares = jax.nn.softmax(scores * keys.shape[-1] ** -0.5, axis=-1)
    return jnp.einsum("...qs,...sd->...qd", shares, stacked.astype(wide) if is_raw else keys)


class AttentionResidual(nnx.Module):
    """A mean of all sources, by one learned query that starts at zero: all weigh the same.

    With three queries it gives one mean each for a mixer's queries, keys and values.

    Source: Kimi Team, "Attention Residuals", 2026, arXiv:2603.15031, block form, whose sources are
        raw; Inkling-2's are normalised.
    """

    def __init__(self, width: int, *, is_raw: bool, queries: int = 1):
        shape = (width,) if queries == 1 else (queries, width)
        self.query, self.is_raw = nnx.Param(jnp.zeros(shape)), is_raw

    def __call__(self, state: Sourced) -> Any:
        every, width = (*state.sources, state.h), self.query.shape[-1]
        queries = self.query[...].reshape(-1, width)
        means = attend_to_sources(queries, every, is_raw=self.is_raw)
        parts = [means[..., n, :] for n in range(len(queries))]
        return parts[0] if len(parts) == 1 else Separate(*parts)


class Connection(nnx.Module):
    """What a sub-layer reads, and where its output goes: to the sum of its group.

    Attributes:
        residual: the mean that is read; None for the first sub-layer, which reads the stream.
        is_boundary: whether the sum so far becomes a source and the output starts the next.
    """

    def __init__(
        self, width: int, *, is_raw: bool, is_boundary: bool = False, reads: bool = True,
        queries: int = 1,
    ):  # fmt: skip
        how = {"is_raw": is_raw, "queries": queries}
        made = AttentionResidual(width, **how) if reads else nnx.data(None)
        self.residual: Any = made
        self.is_boundary = is_boundary

    def __call__(self, state: Sourced) -> tuple[Any, Callable[[Array], Sourced]]:
        """What the sub-layer reads, and the function from its output to the next state."""
        h, sources = state.h, state.sources

        def added(out: Array) -> Sourced:
            if self.is_boundary:
                return Sourced(out.astype(h.dtype), (*sources, h))
            return Sourced(h + out.astype(h.dtype), sources)

        read = h if self.residual is None else self.residual(state)
        return jax.tree.map(lambda part: part.astype(h.dtype), read), added
