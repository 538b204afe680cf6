"""What the Hopper kernels share: the chips they run on, their sizes, and how one is launched.

The kernels are written for the matrix unit of Hopper (WGMMA, sm_90a) and its bulk copies (TMA):
H100, H200 and GH200. Earlier chips have neither; Blackwell dropped WGMMA for tcgen05, another
programming model, so it is refused rather than run wrongly or slowly.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from toolkit._compat import require_jax, varying, varying_axes

BF16, F32 = jnp.bfloat16, jnp.float32
CHUNK = 64  # tokens per chunk: the M of a WGMMA instruction
SHARED_MEMORY = 232_448  # bytes a thread block may use on Hopper
LONGEST = 65_535  # programs along the axes y and z of CUDA's grid
PROCESSORS = 132  # streaming multiprocessors of an H100 or H200 (SXM)


def check_chip(interpret: Any, device: Any = None) -> None:
    """Raise unless kernels are interpreted, only lowered, or meant for a Hopper GPU.

    `device` is by default the first that jax has.
    """
    require_jax("0.10", "The Pallas kernels for GPUs")
    device = jax.devices()[0] if device is None else device
    if interpret or device.platform not in ("gpu", "cuda"):
        return
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        raise NotImplementedError(
            f"The Pallas kernels need a Hopper GPU (compute capability 9.0: H100, H200, GH200); "
            f'{device.device_kind} has {capability}. Use implementation="xla".'
        )


def check_heads(key: int, value: int) -> None:
    """Raise for heads whose state does not fit the registers of a thread block."""
    if max(key, value) > 256:
        raise ValueError(
            f"The Pallas kernels take heads of at most 256 channels; got key {key}, value {value}."
        )


def interpreter(interpret: Any) -> Any:
    """What `plgpu.kernel` takes: None to compile, else the interpreter's parameters."""
    if interpret is not True:
        return interpret or None
    from jax._src.pallas.mosaic_gpu.interpret import params  # public from jax 0.11 on

    return params.InterpretGPUParams()


def _names(grid: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the launched axes: those of the grid, or one for all of them."""
    is_long = any(size > LONGEST for size in grid[:-1])
    return ("program",) if is_long else ("x", "y", "z")[: len(grid)]


def program(grid: tuple[int, ...]) -> tuple[Any, ...]:
    """The place of a program on its grid, however `launch` has laid the grid out."""
    names = _names(grid)
    if len(names) == len(grid):
        return tuple(map(lax.axis_index, names))
    index, places = lax.axis_index(*names), []
    for size in grid[:0:-1]:
        places.append(lax.rem(index, size))
        index = lax.div(index, size)
    return index, *reversed(places)


def launch(
    body: Callable, *, interpret: Any, grid: tuple[int, ...] = (), **arguments: Any
) -> Callable:
    """`plgpu.kernel` with layouts of registers and shared memory inferred by the compiler.

    The body asks `program(grid)` where it is. CUDA bounds all axes of a grid but one, the last of
    ours: a grid that is too long on another is launched as one axis.

    Under `jax.shard_map` the results vary over every mesh axis over which an operand does.
    """
    semantics = plgpu.LoweringSemantics.Warpgroup
    parameters, names = plgpu.CompilerParams(lowering_semantics=semantics), _names(grid)
    kernel = plgpu.kernel(
        body,
        grid=grid if len(names) == len(grid) else (math.prod(grid),),
        grid_names=names,
        compiler_params=parameters,
        interpret=interpreter(interpret),
        **arguments,
    )

    def run(*operands: Array) -> Any:
        axes = tuple(sorted(frozenset().union(*map(varying_axes, operands))))
        results = kernel(*operands)
        return jax.tree.map(lambda x: varying(x, axes), results) if axes else results

    return run


def token_place(
    row: Any, chunk: Any, heads: int, columns: Any = slice(None), group: int = 1
) -> tuple[Any, ...]:
    """Where the tokens of a row's chunk lie in [batch, time, heads / group, size].

    `group` heads, one row each, share one that lies there.
    """
    batch, head = lax.div(row, heads), lax.rem(row, heads)
    head = head if group == 1 else lax.div(head, group)
    return batch, pl.ds(chunk * CHUNK, CHUNK), head, columns


def tile_columns(columns: int, limit: int) -> int:
    """The widest tile of at most `limit` columns, a multiple of 32, that divides `columns`."""
    return max(size for size in range(32, limit + 1, 32) if columns % size == 0)


def padded(x: Array, multiple: int) -> Array:
    """Pad the last axis with zeros to a multiple; a channel of zeros changes no other channel."""
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
