"""Context-parallel attention on whole arrays: a drop-in for softmax attention on long sequences."""

from functools import partial
from typing import Literal

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.parallel.axes import check_auto_axes
from toolkit.parallel.context.checks import check_attention, check_cut, documents
from toolkit.parallel.context.ring import ring_attention
from toolkit.parallel.context.ulysses import ulysses_attention
from toolkit.parallel.context.zigzag import from_zigzag, to_zigzag


@checked
def context_attention(
    q: Float[Array, "batch time heads key"], k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"], mesh: Mesh,
    method: Literal["ring", "zigzag", "ulysses"] = "zigzag", *,
    axis: str = "context", batch_axis: str | tuple[str, ...] | None = None, is_causal: bool = True,
    sliding_window: int | None = None, scale: float | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads value"]:  # fmt: skip
    """Softmax attention on whole arrays whose time dimension is sharded along a mesh axis.

        o_i = sum_j softmax_j(scale q_i . k_j) v_j

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        mesh: the devices.
        method: "ring" (least memory), "zigzag" (a ring with balanced causal attention; tokens are
            reordered before and after), "ulysses" (fewest messages).
        axis: the mesh axis that shards time.
        batch_axis: the mesh axis (or axes) that shard the batch, or None.
        is_causal: a token sees no token after itself.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        scale: factor of the products; None for key ** -0.5.
        segment_ids: document number of every token; consecutive equal numbers are one document.

    Returns:
        [batch, time, heads, value] in q's dtype, in the order of the text, sharded like q.

    Cost: see `ring_attention` and `ulysses_attention`; "zigzag" adds two permutes of half of each
        array, before and after.

    Example:
        >>> q = k = v = jnp.ones((1, 2 * len(jax.devices()), 3, 8))
        >>> context_attention(q, k, v, make_mesh({"context": len(jax.devices())})).shape[2:]
        (3, 8)
    """
    check_auto_axes(mesh)
    check_attention(q, k, v, sliding_window)
    if sliding_window is not None and sliding_window >= q.shape[1]:
        sliding_window = None
    pieces = 2 if method == "zigzag" else 1
    check_cut(q.shape, mesh, axis, batch_axis, pieces)
    segment_ids = documents(segment_ids, q.shape[:2])
    how = {"is_causal": is_causal, "sliding_window": sliding_window, "scale": scale}

    def on_each_device(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        if method == "ulysses":
            return ulysses_attention(q, k, v, axis, segment_ids=segments, **how)
        if method == "ring":
            return ring_attention(q, k, v, axis, segment_ids=segments, **how)
        q, k, v, segments = jax.tree.map(partial(to_zigzag, axis=axis), (q, k, v, segments))
        out = ring_attention(q, k, v, axis, is_zigzag=True, segment_ids=segments, **how)
        return from_zigzag(out, axis)

    spec = PartitionSpec(batch_axis, axis)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(
        q, k, v, segment_ids
    )
