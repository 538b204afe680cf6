"""Checks shared by all forms of context parallelism, and their numbering of documents."""

import math

from jax.sharding import Mesh
from jaxtyping import Array, Int

from toolkit.attention._attend import run_numbers


def check_attention(q: Array, k: Array, v: Array, sliding_window: int | None) -> None:
    """Check self-attention: as many queries as keys, whole groups of heads, a window of at least
    1."""
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k, v do not fit: shapes {q.shape}, {k.shape}, {v.shape}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: want a multiple of k's {k.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: want at least 1")


def check_cut(
    shape: tuple[int, ...], mesh: Mesh, axis: str, batch_axis: str | tuple[str, ...] | None,
    pieces: int = 1,
) -> None:  # fmt: skip
    """Check that [batch, time, ...] divides among the axes, with `pieces` of time per device."""
    batch_axes = (batch_axis,) if isinstance(batch_axis, str) else batch_axis or ()
    if axis in batch_axes:
        raise ValueError(f"batch_axis={batch_axis!r}: want other axes than axis, {axis!r}")
    for names, dimension, wanted in (((axis,), 1, pieces), (batch_axes, 0, 1)):
        if unknown := [name for name in names if name not in mesh.shape]:
            raise ValueError(
                f"axis {unknown[0]!r}: the mesh has {', '.join(map(repr, mesh.shape))}"
            )
        size = shape[dimension]
        parts = wanted * math.prod(mesh.shape[name] for name in names)
        if size % parts:
            what = ("batch", "time")[dimension]
            raise ValueError(
                f"{what}={size} is not divisible by {parts} parts of axis "
                f"{' x '.join(map(repr, names))}; "
                f"{size + -size % parts} would be"
            )


def documents(
    segment_ids: Int[Array, "batch time"] | None, shape: tuple[int, ...]
) -> Int[Array, "batch time"] | None:
    """Number documents from 1, so that a number used again later is a new document."""
    if segment_ids is None:
        return None
    if segment_ids.shape != shape:
        raise ValueError(f"segment_ids have shape {segment_ids.shape}: want {shape}")
    return run_numbers(segment_ids)
