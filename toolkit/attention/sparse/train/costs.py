"""What sparse attention costs: closed forms in plain integers, as in `toolkit.attention.costs`.

FLOPs count the pairs of a query and a row that it attends to or scores. The gathered form and the
steps compute just these; the masked form multiplies every pair and drops most. The indexer has as
many heads as attention and keys of the same size, unless given otherwise.
"""

from toolkit.attention.costs import STATE_BYTES, attended_pairs, softmax_forward_bytes


def native_forward_flops(
    batch, time, heads, key, value, *, block_size=64, selected_blocks=16, sliding_window=512
):
    """Scores and weighted sums of the three branches."""
    means, selected = block_pairs(time, block_size, selected_blocks)
    pairs = means + selected + attended_pairs(time, sliding_window)
    return 2 * batch * heads * pairs * (key + value)


def block_pairs(time, block_size, selected_blocks):
    """Pairs of a query and a complete block's mean, and of a query and a token it reads."""
    # A query at t >= 1 (from 1) sees t // block_size means.
    blocks = time // block_size
    means = block_size * blocks * (blocks - 1) // 2 + blocks * (time - blocks * block_size + 1)
    # All its tokens while they fit in the selection; then whole blocks and a part of its own.
    dense = min(time, selected_blocks * block_size)
    whole, rest = divmod(time - dense, block_size)
    selected = attended_pairs(dense, None) + (time - dense) * (selected_blocks - 1) * block_size
    selected += whole * attended_pairs(block_size, None) + attended_pairs(rest, None)
    return means, selected


def native_forward_bytes(batch, time, heads, key, value, *, element_bytes=4, **_):
    """q, k, v, o and three gates once."""
    tokens = softmax_forward_bytes(batch, time, heads, key, value, element_bytes=element_bytes)
    return tokens + 3 * batch * time * heads * STATE_BYTES


def native_step_flops(
    batch, context, heads, key, value, *, block_size=64, selected_blocks=16, sliding_window=512
):
    """Scores and weighted sums of the three branches for one token."""
    rows = min(context, selected_blocks * block_size) + min(context, sliding_window)
    return 2 * batch * heads * (context // block_size + rows) * (key + value)


def native_state_bytes(batch, context, heads, key, value, *, block_size=64, element_bytes=4, **_):
    """Keys and values of all tokens, and float32 means of complete blocks."""
    token, mean = (key + value) * element_bytes, (key + value) * STATE_BYTES
    return batch * heads * (context * token + context // block_size * mean)


def native_step_bytes(
    batch, context, heads, key, value, *, block_size=64, selected_blocks=16, sliding_window=512,
    element_bytes=4,
):  # fmt: skip
    """The means, the rows selected, those of the window, and one token."""
    rows = min(context, selected_blocks * block_size) + min(context, sliding_window)
    means = context // block_size * STATE_BYTES
    read = batch * heads * (rows * element_bytes + means) * (key + value)
    return read + native_forward_bytes(batch, 1, heads, key, value, element_bytes=element_bytes)


def mixture_forward_flops(
    batch, time, heads, key, value, *, block_size=512, selected_blocks=3
):  # fmt: skip
    """Scores of the means, and attention to the blocks selected."""
    means, selected = block_pairs(time, block_size, selected_blocks)
    return 2 * batch * heads * (means * key + selected * (key + value))


def mixture_forward_bytes(batch, time, heads, key, value, *, element_bytes=4, **_):
    """q, k, v and o once."""
    return softmax_forward_bytes(batch, time, heads, key, value, element_bytes=element_bytes)


def mixture_step_flops(batch, context, heads, key, value, *, block_size=512, selected_blocks=3):
    """Scores of the means, and attention to the blocks selected, for one token."""
    rows = min(context, selected_blocks * block_size)
    return 2 * batch * heads * (context // block_size * key + rows * (key + value))


def mixture_step_bytes(
    batch, context, heads, key, value, *, block_size=512, selected_blocks=3, element_bytes=4
):  # fmt: skip
    """The mean keys, the rows selected, and one token."""
    rows = min(context, selected_blocks * block_size) * (key + value) * element_bytes
    read = batch * heads * (rows + context // block_size * key * STATE_BYTES)
    return read + softmax_forward_bytes(batch, 1, heads, key, value, element_bytes=element_bytes)


def deepseek_forward_flops(
    batch, time, heads, key, value, *, selected_tokens=2048, index_heads=None, index_size=None
):
    """Scores of the index, if the sequence is longer than the selection, and attention."""
    scored = attended_pairs(time, None) if time > selected_tokens else 0
    index = scored * index_products(heads, key, index_heads, index_size)
    attention = heads * attended_pairs(time, selected_tokens) * (key + value)
    return 2 * batch * (index + attention)


def deepseek_forward_bytes(
    batch, time, heads, key, value, *, index_heads=None, index_size=None, element_bytes=4, **_
):
    """q, k, v, o and the inputs of the index once."""
    index_heads, index_size = index_heads or heads, index_size or key
    index = (index_heads + 1) * index_size * element_bytes + index_heads * STATE_BYTES
    tokens = softmax_forward_bytes(batch, time, heads, key, value, element_bytes=element_bytes)
    return tokens + batch * time * index


def deepseek_step_flops(
    batch, context, heads, key, value, *, selected_tokens=2048, index_heads=None, index_size=None
):
    """Scores of the index, if the context is longer than the selection, and attention."""
    scored = context if context > selected_tokens else 0
    index = scored * index_products(heads, key, index_heads, index_size)
    return 2 * batch * (index + heads * min(context, selected_tokens) * (key + value))


def deepseek_state_bytes(
    batch, context, heads, key, value, *, index_size=None, element_bytes=4, **_
):
    """Keys and values of all tokens, and their index keys."""
    return batch * context * (heads * (key + value) + (index_size or key)) * element_bytes


def deepseek_step_bytes(
    batch, context, heads, key, value, *, selected_tokens=2048, index_heads=None, index_size=None,
    element_bytes=4,
):  # fmt: skip
    """The index keys, if the context is longer than the selection, the rows selected, one token."""
    rows = heads * min(context, selected_tokens) * (key + value)
    index = (index_size or key) * context if context > selected_tokens else 0
    token = deepseek_forward_bytes(
        batch, 1, heads, key, value, index_heads=index_heads, index_size=index_size,
        element_bytes=element_bytes,
    )  # fmt: skip
    return batch * (rows + index) * element_bytes + token


def index_products(heads, key, index_heads, index_size):
    """Products of an index score, in multiplications and additions."""
    return (index_heads or heads) * ((index_size or key) + 1)
