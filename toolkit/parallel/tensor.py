"""Explicit tensor parallelism: pairs of products that communicate once, and the vocabulary.

Inside `jax.shard_map`, with the weights cut along a mesh axis:

    h = column_parallel(x, w_up, axis)          w_up [width, hidden / M]
    y = row_parallel(act(h), w_down, axis)      w_down [hidden / M, width]

computes act(x W_up) W_down with one all-reduce forward and one backward. With `time_axis` x and y
are cut along time outside the pair (sequence parallelism), and each all-reduce becomes an
all-gather and a reduce-scatter: as many bytes, and 1/M of the activations in between.

Logits cut along the vocabulary are never gathered: their loss needs three numbers per token.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._checks import check_choice, checked
from toolkit._compat import varying, varying_axes
from toolkit.parallel.axes import check_auto_axes, devices_along
from toolkit.parallel.product_rings import (
    all_gather_matmul,
    check_product,
    matmul_reduce_scatter,
    part_of,
)


@checked
def column_parallel(
    x: Float[Array, "*batch width"], kernel: Float[Array, "width columns"], axis: str, *,
    time_axis: int | None = None, rings: int = 0,
) -> Float[Array, "*batch columns"]:  # fmt: skip
    """The first product of a pair, sharded by columns; inside `jax.shard_map`.

        y_m = x W_m

    Args:
        x: input [..., width], replicated along the axis; with `time_axis` this device's tokens.
        kernel: this device's columns [width, columns / M].
        axis: the mesh axis.
        time_axis: the dimension of x that is sharded along `axis` and gathered here; None: x is
            replicated.
        rings: 0: one all-gather before the product; 1 or 2: hops one way or both ways that hide
            behind it, see `all_gather_matmul`.

    Returns:
        [..., columns / M], for all tokens.

    Cost: Backward an all-reduce of x's gradient; with `time_axis` an all-gather of x forward and a
        reduce-scatter backward.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (f); Korthikanti et al., "Reducing
        Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198 (g).

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P(None, "model")
        >>> up = lambda x, w: column_parallel(x, w, "model")
        >>> up = jax.shard_map(up, mesh=mesh, in_specs=(jax.P(), cut), out_specs=cut)
        >>> up(jnp.ones((3, 4)), jnp.ones((4, 16))).shape
        (3, 16)
    """
    _check(x, kernel, axis, time_axis, rings)
    if rings and time_axis is not None:
        return all_gather_matmul(x, kernel, axis, time_axis=time_axis, rings=rings)
    if time_axis is None:
        used: Any = _used_by_all(x, axis)
        return used @ kernel
    return lax.all_gather(x, axis, axis=time_axis, tiled=True) @ kernel


@checked
def row_parallel(
    x: Float[Array, "*batch rows"], kernel: Float[Array, "rows width"], axis: str, *,
    time_axis: int | None = None, rings: int = 0,
) -> Float[Array, "*batch width"]:  # fmt: skip
    """The second product of a pair, sharded by rows, and the sum over devices.

        y = sum_m x_m W_m

    Args:
        x: this device's columns [..., rows / M], as `column_parallel` made them.
        kernel: this device's rows [rows / M, width].
        axis: the mesh axis.
        time_axis: the dimension of y to shard along `axis`; None: y is replicated.
        rings: 0: one reduce-scatter after the product; 1 or 2: hops one way or both ways that hide
            behind it, see `matmul_reduce_scatter`.

    Returns:
        [..., width], replicated, or this device's tokens.

    Cost: Forward an all-reduce of y; with `time_axis` a reduce-scatter, and an all-gather backward.

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P(None, "model")
        >>> down = lambda x, w: row_parallel(x, w, "model")
        >>> down = jax.shard_map(down, mesh=mesh, in_specs=(cut, jax.P("model")), out_specs=jax.P())
        >>> down(jnp.ones((3, 16)), jnp.ones((16, 4))).shape
        (3, 4)
    """
    _check(x, kernel, axis, time_axis, rings)
    if rings and time_axis is not None:
        return matmul_reduce_scatter(x, kernel, axis, time_axis=time_axis, rings=rings)
    partial_sums = x @ kernel
    if time_axis is None:
        return _sum_once(partial_sums, axis)
    part_of(partial_sums.shape[time_axis], devices_along(axis), axis, time_axis)
    return lax.psum_scatter(partial_sums, axis, scatter_dimension=time_axis, tiled=True)


@checked
def vocabulary_parallel_embedding(
    tokens: Int[Array, "*batch"], table: Float[Array, "rows width"], axis: str
) -> Float[Array, "*batch width"]:
    """Look up rows of a table that is sharded along the vocabulary; inside `jax.shard_map`.

        y = sum_m [token in part m] table_m[token - start_m]

    Args:
        tokens: whole numbers [...] below the vocabulary, the same on every device of the axis.
        table: this device's rows [vocabulary / M, width].
        axis: the mesh axis.

    Returns:
        [..., width], replicated; zeros for a token outside the vocabulary.

    Cost: An all-reduce of the output forward, nothing backward.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P("model")
        >>> rows = lambda tokens, table: vocabulary_parallel_embedding(tokens, table, "model")
        >>> rows = jax.shard_map(rows, mesh=mesh, in_specs=(jax.P(), cut), out_specs=jax.P())
        >>> rows(jnp.array([3, 0]), jnp.arange(8.0)[:, None]).tolist()
        [[3.0], [0.0]]
    """
    devices_along(axis)
    if not len(table):
        raise ValueError("table has no rows; want a part of the vocabulary on every device")
    at, is_mine = _place(tokens, len(table), axis)
    return _sum_once(jnp.where(is_mine[..., None], table[at], 0), axis)


@checked
def vocabulary_parallel_loss(
    logits: Float[Array, "*batch columns"], targets: Int[Array, "*batch"], axis: str
) -> Float[Array, "*batch"]:
    """Cross-entropy of logits that are sharded along the vocabulary; inside `jax.shard_map`.

        loss = log sum_v exp(l_v - max l) + max l - l_target

    Args:
        logits: this device's columns [..., vocabulary / M], any float dtype.
        targets: whole numbers [...] below the vocabulary, the same on every device of the axis.
        axis: the mesh axis.

    Returns:
        float32 [...], the same on every device; NaN for a target outside the vocabulary.

    Cost: Three all-reduces of one number per token forward (maximum, sum, target), nothing
        backward. Logits are never gathered.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Example:
        >>> mesh, cut = make_mesh({"model": len(jax.devices())}), jax.P(None, "model")
        >>> loss = lambda logits, targets: vocabulary_parallel_loss(logits, targets, "model")
        >>> loss = jax.shard_map(loss, mesh=mesh, in_specs=(cut, jax.P()), out_specs=jax.P())
        >>> loss(jnp.zeros((3, 16)), jnp.array([0, 7, 15])).shape
        (3,)
    """
    if logits.shape[:-1] != targets.shape or not logits.shape[-1]:
        raise ValueError(f"shapes do not fit: logits {logits.shape}, targets {targets.shape}")
    devices_along(axis)
    logits = logits.astype(jnp.float32)
    largest = lax.pmax(lax.stop_gradient(logits.max(-1)), axis)
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    total: Any = _sum_once(jnp.exp(logits - largest[..., None]).sum(-1), axis)
    at, is_mine = _place(targets, logits.shape[-1], axis)
    chosen = jnp.take_along_axis(logits, at[..., None], axis=-1)[..., 0]
    target: Any = _sum_once(jnp.where(is_mine, chosen, 0), axis)
    is_target = (targets >= 0) & (targets < logits.shape[-1] * devices_along(axis))
    return jnp.where(is_target, jnp.log(total) + largest - target, jnp.nan)


@checked
def vocabulary_parallel_cross_entropy(
    hidden: Float[Array, "batch time width"], table: Float[Array, "vocabulary width"],
    targets: Int[Array, "batch time"], mesh: Mesh, *,
    axis: str = "model", batch_axis: str | None = None,
) -> Float[Array, "batch time"]:  # fmt: skip
    """Cross-entropy of a head whose table is sharded along the vocabulary, on whole arrays.

        loss = logsumexp_v(hidden . table_v) - hidden . table_target

    Args:
        hidden: the head's input [batch, time, width].
        table: its table [vocabulary, width], sharded along `axis`.
        targets: whole numbers [batch, time] below the vocabulary.
        mesh: the devices.
        axis: the mesh axis that shards the vocabulary.
        batch_axis: the mesh axis that shards the batch, or None.

    Returns:
        float32 [batch, time], nats per token.

    Cost: Per device 2 tokens width vocabulary / M FLOPs, three all-reduces of one number per token,
        and backward one of hidden's gradient. Logits are never gathered.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Example:
        >>> mesh = make_mesh({"model": len(jax.devices())})
        >>> hidden, table, targets = jnp.ones((1, 2, 4)), jnp.ones((16, 4)), jnp.array([[3, 5]])
        >>> vocabulary_parallel_cross_entropy(hidden, table, targets, mesh).shape
        (1, 2)
    """
    check_auto_axes(mesh)
    fits = hidden.shape[:2] == targets.shape and hidden.shape[2] == table.shape[1]
    if not fits or not len(table):
        raise ValueError(
            f"shapes do not fit: hidden {hidden.shape}, table {table.shape}, "
            f"targets {targets.shape}"
        )
    for name, what, size in ((axis, "vocabulary", len(table)), (batch_axis, "batch", len(hidden))):
        if name is None:
            continue
        check_choice("axis", name, mesh.axis_names)
        if size % mesh.shape[name]:
            raise ValueError(
                f"{what}={size} is not divisible by axis {name!r} of size {mesh.shape[name]}; "
                f"{size + -size % mesh.shape[name]} would be"
            )

    def on_each_device(hidden: Array, table: Array, targets: Array) -> Array:
        logits = column_parallel(hidden, table.T, axis)
        return vocabulary_parallel_loss(logits, targets, axis)

    batch = PartitionSpec(batch_axis)
    return jax.shard_map(
        on_each_device, mesh=mesh, in_specs=(batch, PartitionSpec(axis), batch), out_specs=batch
    )(hidden, table, targets)


def _place(tokens: Array, rows: int, axis: str) -> tuple[Array, Array]:
    """The index of a token's row in this device's part, and whether it is there."""
    at = tokens.astype(jnp.int32) - lax.axis_index(axis) * rows
    is_mine = (at >= 0) & (at < rows)
    return jnp.where(is_mine, at, 0), is_mine


def _check(x: Array, kernel: Array, axis: str, time_axis: int | None, rings: int) -> None:
    check_product(x, kernel, axis, time_axis)
    if rings and time_axis is None:
        raise ValueError(f"rings: got {rings} without time_axis; an all-reduce has no rings here")


# With check_vma=True jax would insert these sums itself; with False it would misplace them, as the
# transpose of a sum would be a sum. Explicit sums are right under both.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _used_by_all(x: Array, axis: str) -> Array:
    """Replicated input that each device uses for a part of the result: Megatron's f."""
    return _varying(x, axis)


_used_by_all.defvjp(
    lambda x, axis: (_varying(x, axis), None),
    lambda axis, _, cotangent: (lax.psum(cotangent, axis),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_once(x: Array, axis: str) -> Array:
    """The sum of all devices' parts, which all use alike: Megatron's g."""
    return lax.psum(x, axis)


_sum_once.defvjp(
    lambda x, axis: (lax.psum(x, axis), None),
    lambda axis, _, cotangent: (_varying(cotangent, axis),),
)


def _varying(x: Array, axis: str) -> Array:
    return x if axis in varying_axes(x) else varying(x, (axis,))
