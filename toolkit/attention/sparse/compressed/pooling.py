r"""How the rows of a block become one: a mean with weights per channel, or the plain mean.

    c_b = sum_{j in block b} softmax_j(z_j + bias_j) x_j

With two series of channels the first is that of the block before, in one softmax over both blocks:

    c_b = sum_{j in b-1} p_j x^1_j + sum_{j in b} p_j x^2_j
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention._attend import positions_in_documents
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator


@checked
@compiled
def block_pooling(
    x: Float[Array, "batch time channels"],
    gates: Float[Array, "batch time channels"] | None = None,
    bias: Float[Array, "block channels"] | None = None, *,
    block_size: int, series: int = 1, segment_ids: SegmentIds | None = None,
    initial_state: Float[Array, "batch past stored"] | None = None,
    length: Int[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch time size"], Float[Array, "batch past stored"]]:  # fmt: skip
    """The row of every block, in the place of its last token; zeros elsewhere.

        c_b = sum_j softmax_j(z_j + bias_j) x_j

    Args:
        x: rows [batch, time, channels], with channels = series size.
        gates: z, logarithms of their weights [batch, time, channels]; None for the plain mean.
        bias: added to the gates of every place in a block [block_size, channels]; None for 0.
        block_size: tokens per block, counted from the start of a document.
        series: 1; or 2, where the first half of the channels counts for the next block.
        segment_ids: document of every token [batch, time]; blocks begin anew in each.
        initial_state: what the call before returned: x and gates of the last tokens
            [batch, series block_size - 1, stored]; None at the start.
        length: tokens of each row's document before these [batch]; None for 0.

    Returns:
        Rows [batch, time, size], and the state with which the next piece continues.

    Cost:
        About 10 channels series FLOPs per token; every row is copied series times.

    Source: DeepSeek-V4 technical report (2026), equations 9 to 12 and 20 to 23.

    Example:
        >>> x = jnp.array([[[1.0], [3.0], [5.0]]])
        >>> block_pooling(x, block_size=2)[0][0, :, 0].tolist()
        [0.0, 2.0, 0.0]
    """
    batch, time, channels = x.shape
    if series not in (1, 2) or channels % series:
        raise ValueError(f"series must be 1 or 2 and divide {channels} channels; got {series}.")
    reach, wide = series * block_size, accumulator(x.dtype)
    new = x if gates is None else jnp.concatenate([x, gates], axis=-1)
    if initial_state is None:
        initial_state = jnp.zeros((batch, reach - 1, new.shape[-1]), new.dtype)
    rows = jnp.concatenate([initial_state, new], axis=1)

    index = jnp.arange(time, dtype=jnp.int32)[None]
    before = jnp.zeros(batch, jnp.int32) if length is None else length
    place = before[:, None] + index
    if segment_ids is not None:
        place = positions_in_documents(segment_ids, before)
    last = jnp.sort(jnp.where((place + 1) % block_size == 0, index, time), axis=1)
    last = last[:, : -(-time // block_size)]  # a place without a block has the number of tokens
    at = jnp.minimum(last, time - 1)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    seen = rows[row[..., None], at[..., None] + jnp.arange(reach, dtype=jnp.int32)[None, None]]
    seen = seen.reshape(batch, -1, series, block_size, new.shape[-1]).astype(wide)

    def of_series(array):
        """The channels of each series [..., series block, size]."""
        parts = jnp.split(array, series, axis=-1)
        return jnp.concatenate([part[..., n, :, :] for n, part in enumerate(parts)], axis=-2)

    values, logits = of_series(seen[..., :channels]), jnp.zeros((), wide)
    if gates is not None:
        logits = of_series(seen[..., channels:])
    if bias is not None:
        own = of_series(jnp.broadcast_to(bias[None], (series, *bias.shape)).astype(wide))
        logits = jnp.broadcast_to(logits, values.shape) + own[None, None]
    # The first block of a document has none before it.
    own = jnp.arange(reach, dtype=jnp.int32) >= reach - block_size
    is_there = own[None, None] | (place[row, at] >= block_size)[..., None]
    is_there = is_there[..., None]
    weights = jax.nn.softmax(jnp.broadcast_to(logits, values.shape), axis=-2, where=is_there)
    pooled = (weights * jnp.where(is_there, values, 0)).sum(axis=-2).astype(x.dtype)
    out = jnp.zeros((batch, time, channels // series), x.dtype)
    return out.at[row, last].set(pooled, mode="drop"), rows[:, time:]
