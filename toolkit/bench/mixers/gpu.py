"""Every recurrent mixer on an accelerator, bfloat16: by kernels, by XLA, by fla's on a GPU.

The shapes are those of the speed table in flash-linear-attention's README. Both sides get the same
bfloat16 numbers, must agree before anything is timed, and take turns in one process. Next to the
ratio stands the floor: what the chip's published peaks allow for the modelled work.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.attention import Mixer
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase, bound
from toolkit.bench.mixers.fla_forms import fla_contender
from toolkit.bench.mixers.inputs import direction, mixer_form, mixer_inputs, output_weight
from toolkit.measure import Peak, published_peak

Shape = tuple[int, int, int, int]  # batch, time, heads, head size
SHAPES: tuple[Shape, ...] = (
    (2, 16384, 16, 128),
    (1, 8192, 96, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
)
OURS, XLA, KERNEL, PEER = "toolkit", "toolkit, xla", "toolkit, pallas", "flash-linear-attention"
LEAST_RATIO = 1.0
DRAWN = 2048  # tokens that are drawn, on the host, which is slow; longer inputs repeat them
# Of the root mean square: bfloat16 keeps 8 bits, and the two sum in different orders.
FORWARD_TOLERANCE = 0.01
GRADIENT_TOLERANCE = 0.02


@dataclass(frozen=True)
class Work:
    """Modelled work of one call.

    Attributes:
        flops: of its matrix products.
        bytes: that must cross the memory bus: every input and result once.
    """

    flops: float
    bytes: float

    def floor_parts(self, peak: Peak) -> tuple[float, float]:
        """Seconds on a chip of the products, FLOPs / peak FLOP/s, and of the traffic likewise."""
        return self.flops / peak.flops_per_second, self.bytes / peak.bytes_per_second

    def floor_seconds(self, peak: Peak) -> float:
        """Least seconds on a chip: the longer of the two."""
        return max(self.floor_parts(peak))


def modelled_work(row: Mixer, shape: tuple[int, int, int, int], *, backward: bool) -> Work:
    """What a row's formulas say of one shape in bfloat16.

    A gradient repeats the forward's traffic (the cotangent for the output), then writes a gradient
    for each input; each product of the forward has two in the gradient.
    """
    batch, time, heads, size = shape
    flops = row.forward_flops(batch, time, heads, size, size, **row.options)
    traffic = row.forward_bytes(batch, time, heads, size, size, element_bytes=2, **row.options)
    if not backward:
        return Work(flops, traffic)
    output = 2 * batch * time * heads * size
    return Work(3 * flops, traffic + traffic + (traffic - output))


def cases(rows: Sequence[Mixer], shapes: Sequence[Shape] = SHAPES) -> Iterator[PlannedCase]:
    """Forward and forward+backward of every row on every shape."""
    peak = published_peak(jax.devices()[0].device_kind)
    for row in rows:
        for shape in shapes:
            batch, time, heads, size = shape
            for backward in (False, True):
                yield PlannedCase(
                    f"{row.name} {direction(backward)} B={batch} T={time} H={heads} D={size} "
                    "bfloat16",
                    partial(_case, row, shape, peak, backward),
                )


def _case(
    row: Mixer, shape: tuple[int, int, int, int], peak: Peak | None, backward: bool, name: str
) -> Case:
    batch, time, heads, size = shape
    drawn = math.gcd(time, DRAWN)
    arrays = [
        jnp.concatenate([x] * (time // drawn), axis=1)
        for x in mixer_inputs(row, drawn, heads, size, batch=batch, dtype=jnp.bfloat16)
    ]
    weight = output_weight(row, arrays)
    args = (weight, *arrays) if backward else tuple(arrays)
    forms: dict[str, Any] = {OURS: None}
    if jax.default_backend() != "cpu" and "pallas" in row.implementations:
        forms = {KERNEL: "pallas", XLA: "xla"}
    contenders: dict[str, Callable[[], Any]] = {
        name: bound(jax.jit(mixer_form(row, form, backward=backward)), args)
        for name, form in forms.items()
    }
    peer, refusal = fla_contender(row, arrays, weight if backward else None), ""
    if peer is not None:
        try:
            peer()
        except RuntimeError as error:  # flash-linear-attention refuses some versions of Triton
            refusal = f"; {PEER} refuses: {str(error).splitlines()[0][:200]}"
        else:
            contenders[PEER] = peer
    work = modelled_work(row, shape, backward=backward)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE, norm="rms"),
        ours=next(iter(forms)),
        targets={PEER: LEAST_RATIO} if PEER in contenders else {},
        floor=None if peak is None else work.floor_seconds(peak),
        note=f"modelled work {work.flops / 1e12:.3f} TFLOP, {work.bytes / 1e9:.2f} GB"
        + ("" if peak is None else f"; peaks: {peak.source}")
        + refusal,
    )
