"""Answers to the exercises on meshes and shardings."""

import math

from jax.sharding import PartitionSpec as P


def local_shape(shape, spec, sizes):
    cut = []
    for at, length in enumerate(shape):
        axes = spec[at] if at < len(spec) else None
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        cut.append(length // math.prod(sizes[axis] for axis in axes))
    return tuple(cut)


ANSWERS = {
    "local_shape": (
        local_shape,
        [
            (lambda shape, spec, sizes: shape, "cut by ('data', None): (64, 32)"),
            (
                lambda shape, spec, sizes: tuple(
                    n // sizes[axis] if axis else n for n, axis in zip(shape, spec, strict=False)
                ),
                "raised KeyError",
            ),
        ],
    ),
    "layout": (
        lambda: {"w1": P(None, "model"), "w2": P("model")},
        [
            (lambda: {"w1": P("model"), "w2": P(None, "model")}, "all-gather"),
            (lambda: {"w1": P(None, "model"), "w2": P()}, "w2: every device holds 16 KiB"),
            (lambda: {"w1": P(None, "modle"), "w2": P()}, "raised ValueError"),
            (lambda: {"w1": (None, "model"), "w2": P()}, "wanted a PartitionSpec"),
            (lambda: [P(), P()], "Wanted a dict"),
        ],
    ),
}
