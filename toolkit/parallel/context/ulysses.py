"""Ulysses: an all-to-all exchanges sharded time for sharded heads, so that each device attends over
the whole sequence with its heads.

[batch, time / N, heads, key] -> [batch, time, heads / N, key] -> attention -> and back
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention import softmax_attention
from toolkit.parallel.axes import devices_along
from toolkit.parallel.context.checks import check_attention


@checked
def ulysses_attention(
    q: Float[Array, "batch time heads key"], k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"], axis: str, *,
    is_causal: bool = True, sliding_window: int | None = None, scale: float | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads value"]:  # fmt: skip
    """Softmax attention over time sharded along a mesh axis; inside `jax.shard_map`.

        o = all_to_all(softmax_attention(all_to_all(q), all_to_all(k), all_to_all(v)))

    If N devices do not divide the heads, key heads are repeated, one per query head, and heads of
    zeros are added.

    Args:
        q: this device's queries [batch, time, heads, key].
        k: its keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: its values [batch, time, key_value_heads, value].
        axis: the mesh axis; its devices hold the text in order.
        is_causal: a token sees no token after itself.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        scale: factor of the products; None for key ** -0.5.
        segment_ids: document number of every token; consecutive equal numbers are one document.

    Returns:
        This device's outputs [batch, time, heads, value] in q's dtype.

    Cost: Four all-to-alls forward and four backward, each of one device's queries, keys, values or
        outputs; segment_ids are gathered. FLOPs as softmax attention, times ceil(heads / N) N /
        heads. A device holds the keys of its heads for all tokens.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.

    Example:
        >>> mesh, cut = make_mesh({"context": 2}, devices=jax.devices()[:2]), jax.P(None, "context")
        >>> go = lambda x: ulysses_attention(x, x, x, "context")
        >>> go = jax.shard_map(go, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        >>> go(jnp.ones((1, 4, 3, 8))).shape
        (1, 4, 3, 8)
    """
    check_attention(q, k, v, sliding_window)
    devices, heads, key_value_heads = devices_along(axis), q.shape[2], k.shape[2]
    if heads % devices or key_value_heads % devices:
        missing = -heads % devices
        k, v = (jnp.repeat(x, heads // key_value_heads, axis=2) for x in (k, v))
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in (q, k, v))
    q, k, v = (lax.all_to_all(x, axis, 2, 1, tiled=True) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = lax.all_gather(segment_ids, axis, axis=1, tiled=True)
    out, _ = softmax_attention(
        q,
        k,
        v,
        is_causal=is_causal,
        sliding_window=sliding_window,
        scale=scale,
        segment_ids=segment_ids,
    )
    return lax.all_to_all(out, axis, 1, 2, tiled=True)[:, :, :heads]
