"""Products whose all-gather or reduce-scatter is cut into steps, so that it hides behind them.

Inside `jax.shard_map`, with M devices in a ring. A gather is M - 1 hops of one device's tokens, and
while one is on its way the tokens that came before it are multiplied; a sum over devices is M - 1
hops of partial sums, and while one is on its way the next part is multiplied. What travels one way
takes M - 1 steps, and what travels both ways half as many.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._compat import varying, varying_axes
from toolkit.parallel.axes import devices_along

RINGS = (1, 2)


@checked
def all_gather_matmul(
    x: Float[Array, "*batch width"], kernel: Float[Array, "width columns"], axis: str, *,
    time_axis: int, rings: int = 1,
) -> Float[Array, "*batch columns"]:  # fmt: skip
    """The product of all devices' tokens with this device's columns, gathered hop by hop.

        y = concat_j (x_j W_m)        x_j arrives at device m after |m - j| hops

    Equal to `lax.all_gather(x, axis, axis=time_axis, tiled=True) @ kernel`. Its derivative with
    respect to x is the ring of `matmul_reduce_scatter`.

    Args:
        x: this device's tokens.
        kernel: this device's columns [width, columns / M].
        axis: the mesh axis.
        time_axis: the dimension of x that is cut along `axis`.
        rings: 1: tokens travel one way; 2: both ways, in half as many steps.

    Returns:
        [..., columns / M], for all tokens.

    Cost: M - 1 permutes of x forward, as many bytes as the all-gather, and as many of its gradient
        backward. Keeps all tokens for the backward pass, as the all-gather does.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
        Large Deep Learning Models", 2023 (ASPLOS), section 5; Pati et al., "T3", 2024
        (arXiv:2401.16677), which does the same in hardware.

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P(None, "model")
        >>> up = lambda x, w: all_gather_matmul(x, w, "model", time_axis=0)
        >>> up = jax.shard_map(up, mesh=mesh, in_specs=(jax.P("model"), cut), out_specs=cut)
        >>> up(jnp.ones((16, 4)), jnp.ones((4, 16))).shape
        (16, 16)
    """
    devices, (ahead, behind) = _hops(x, kernel, axis, time_axis, rings)
    here, size = lax.axis_index(axis), x.shape[time_axis]
    shape = [*x.shape[:-1], kernel.shape[1]]
    shape[time_axis] *= devices
    y = jnp.zeros(shape, jnp.result_type(x, kernel))
    lacking = tuple({axis, *varying_axes(x), *varying_axes(kernel)} - varying_axes(y))
    y = varying(y, lacking) if lacking else y

    def placed(y: Array, tokens: Array, source: Array) -> Array:
        start = (source % devices) * size
        return lax.dynamic_update_slice_in_dim(y, tokens @ kernel, start, time_axis)

    y, up, down = placed(y, x, here), x, x
    for hop in range(1, max(ahead, behind) + 1):
        if hop <= ahead:
            up = _sent(up, axis, devices, 1)
            y = placed(y, up, here - hop)
        if hop <= behind:
            down = _sent(down, axis, devices, -1)
            y = placed(y, down, here + hop)
    return y


@checked
def matmul_reduce_scatter(
    x: Float[Array, "*batch rows"], kernel: Float[Array, "rows width"], axis: str, *,
    time_axis: int, rings: int = 1,
) -> Float[Array, "*batch width"]:  # fmt: skip
    """A product summed over devices, each of which keeps its tokens; partial sums travel.

        y_j = sum_m x_m[j] W_m        j: the part of the tokens that device j keeps

    Equal, up to the order of the sum, to `lax.psum_scatter(x @ kernel, axis,
    scatter_dimension=time_axis, tiled=True)`. Its derivative with respect to x is the ring of
    `all_gather_matmul`.

    Args:
        x: this device's columns [..., rows / M], of all tokens.
        kernel: this device's rows [rows / M, width].
        axis: the mesh axis.
        time_axis: the dimension of y to cut along `axis`.
        rings: 1: partial sums travel one way; 2: both ways, in half as many steps.

    Returns:
        [..., width], this device's tokens.

    Cost: M - 1 permutes of y forward, as many bytes as the reduce-scatter, and as many of its
        gradient backward. Sums are in the product's dtype.

    Source: as of `all_gather_matmul`.

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P(None, "model")
        >>> down = lambda x, w: matmul_reduce_scatter(x, w, "model", time_axis=0, rings=2)
        >>> rows = jax.P("model")
        >>> down = jax.shard_map(down, mesh=mesh, in_specs=(cut, rows), out_specs=rows)
        >>> down(jnp.ones((16, 16)), jnp.ones((16, 4))).shape
        (16, 4)
    """
    devices, (ahead, behind) = _hops(x, kernel, axis, time_axis, rings)
    here, size = lax.axis_index(axis), part_of(x.shape[time_axis], devices, axis, time_axis)

    def part(target: Array) -> Array:
        start = (target % devices) * size
        return lax.dynamic_slice_in_dim(x, start, size, time_axis) @ kernel

    up = down = None  # partial sums on their way to the devices ahead, and behind
    for left in range(max(ahead, behind), 0, -1):
        if left <= ahead:
            own = part(here + left)
            up = _sent(own if up is None else own + up, axis, devices, 1)
        if left <= behind:
            own = part(here - left)
            down = _sent(own if down is None else own + down, axis, devices, -1)
    total = part(here)
    for arrived in (up, down):
        total = total if arrived is None else total + arrived
    return total


def part_of(size: int, devices: int, axis: str, time_axis: int) -> int:
    """A device's part of the tokens; ValueError if they cannot be divided."""
    if size % devices:
        raise ValueError(
            f"time_axis={time_axis}: that dimension, of size {size}, is not divisible by axis "
            f"{axis!r} of size {devices}; {size + -size % devices} would be"
        )
    return size // devices


def check_product(x: Array, kernel: Array, axis: str, time_axis: int | None) -> None:
    """ValueError for shapes that do not fit, or a dimension that is none of the tokens'."""
    devices_along(axis)
    if x.shape[-1] != kernel.shape[0]:
        raise ValueError(f"shapes do not fit: x {x.shape}, kernel {kernel.shape}")
    if time_axis is not None and not 0 <= time_axis < x.ndim - 1:
        raise ValueError(f"time_axis={time_axis}: want one of x's {x.ndim} axes but the last")


def _hops(
    x: Array, kernel: Array, axis: str, time_axis: int, rings: int
) -> tuple[int, tuple[int, int]]:
    """The number of devices, and the hops to the next ones and to those before."""
    check_product(x, kernel, axis, time_axis)
    if rings not in RINGS:
        raise ValueError(f"rings: got {rings}, wanted 1 (one way) or 2 (both ways)")
    devices = devices_along(axis)
    behind = (devices - 1) // 2 if rings == 2 else 0
    return devices, (devices - 1 - behind, behind)


def _sent(x: Array, axis: str, devices: int, by: int) -> Array:
    return lax.ppermute(x, axis, [(i, (i + by) % devices) for i in range(devices)])
