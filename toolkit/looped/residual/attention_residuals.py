"""Attention residuals: a sub-layer reads a softmax mean of what groups of layers have added.

The residual stream is cut into groups of layers. The sum of what the layers of a group add is a
source; every sub-layer attends to all sources with a learned query of its own, the unfinished sum
of its own group included.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.residual.hyper_connections import normalised

EPSILON = 1e-6
"""That of the norm of sources."""


@jax.tree_util.register_dataclass
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
    queries: Float[Array, "queries width"], sources: Sequence[Float[Array, "... width"]]
) -> Float[Array, "... queries width"]:
    """sum_s softmax_s(q . n_s / sqrt(width)) n_s,   n_s = RMSNorm(source s); at least float32."""
    values = normalised(jnp.stack(sources, axis=-2), EPSILON)
    wide = values.dtype
    scores = jnp.einsum("qd,...sd->...qs", queries.astype(wide), values)
    shares = jax.nn.softmax(scores * values.shape[-1] ** -0.5, axis=-1)
    return jnp.einsum("...qs,...sd->...qd", shares, values)


class AttentionResidual(nnx.Module):
    """A mean of all sources, by one learned query that starts at zero: all weigh the same.

    Source: Kimi Team, "Attention Residuals", 2026 (there the values are not normalised); this form
        is Inkling-2's.
    """

    def __init__(self, width: int):
        self.query = nnx.Param(jnp.zeros(width))

    def __call__(self, state: Sourced) -> Float[Array, "... width"]:
        return attend_to_sources(self.query[...][None], (*state.sources, state.h))[..., 0, :]


class Connection(nnx.Module):
    """What a sub-layer reads, and where its output goes: to the sum of its group.

    Attributes:
        residual: the mean that is read; None for the first sub-layer, which reads the stream.
        is_boundary: whether the sum so far becomes a source and the output starts the next.
    """

    def __init__(self, width: int, *, is_boundary: bool = False, reads: bool = True):
        self.residual = AttentionResidual(width) if reads else nnx.data(None)
        self.is_boundary = is_boundary

    def __call__(self, state: Sourced) -> tuple[Array, Callable[[Array], Sourced]]:
        """What the sub-layer reads, and what makes of its output the next state."""
        h, sources = state.h, state.sources

        def added(out: Array) -> Sourced:
            if self.is_boundary:
                return Sourced(out.astype(h.dtype), (*sources, h))
            return Sourced(h + out.astype(h.dtype), sources)

        read = h if self.residual is None else self.residual(state)
        return read.astype(h.dtype), added
