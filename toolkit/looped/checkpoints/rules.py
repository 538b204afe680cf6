"""How tensors of a checkpoint become parameters: a rule, and functions that make the usual ones.

PyTorch stores projections as [outputs, inputs] and convolutions as [channels, 1, taps]; checkpoints
fuse projections that are separate here, or the reverse. The order of the heads is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class WeightRule(NamedTuple):
    """How some tensors of a checkpoint become some parameters of a layer.

    Attributes:
        theirs: names of tensors, after the prefix of the layer.
        ours: paths of parameters in the layer, such as "output.kernel".
        convert: (layer, *tensors) -> one array per path.
        is_stacked: whether `convert` makes of each tensor alone a part of one parameter, which are
            stacked: one tensor at a time is in memory.
        rows: (layer) -> rows of each tensor, where there are several and they are not stacked.
        stored: the shape of a vector in files, with one -1, or (layer) -> the shape of a tensor
            that is no matrix; None: one axis, or what the parameters' shapes say.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    convert: Callable[..., Sequence[Array]]
    is_stacked: bool = False
    rows: Callable[[Any], Sequence[int]] | None = None
    stored: tuple[int, ...] | Callable[[Any], tuple[int, ...]] | None = None


def stacked(ours: str, theirs: Sequence[str]) -> WeightRule:
    """[outputs, inputs] of each expert -> [experts, inputs, outputs]."""
    return WeightRule(tuple(theirs), (ours,), lambda _, tensor: [tensor.T], is_stacked=True)


def projection(ours: str, *theirs: str) -> WeightRule:
    """[outputs, inputs] each -> [inputs, all outputs], side by side."""
    return WeightRule(theirs, (f"{ours}.kernel",), lambda _, *parts: [jnp.concatenate(parts).T])


def convolution(*theirs: str) -> WeightRule:
    """[channels, 1, taps] each -> [taps, all channels]."""
    return WeightRule(
        theirs, ("convolution.kernel",), lambda _, *parts: [jnp.concatenate(parts)[:, 0].T]
    )


def vector(ours: str, theirs: str) -> WeightRule:
    """Any shape -> one axis."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [tensor.ravel()])


def from_zero(ours: str, theirs: str) -> WeightRule:
    """A scale stored as its difference from one."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [1 + tensor.astype(jnp.float32)])


def as_it_is(ours: str, theirs: str) -> WeightRule:
    """The same numbers in the same order: not transposed, as a projection would be."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [tensor])


def by_head(fused: Array, *sizes: int) -> list[Array]:
    """[heads * (a head's parts), width] -> one [width, channels] per part."""
    width = fused.shape[-1]
    fused = fused.T.reshape(width, -1, sum(sizes))
    borders = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return [part.reshape(width, -1) for part in jnp.split(fused, borders, axis=-1)]
