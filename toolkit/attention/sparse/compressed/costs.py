"""What attention to compressed blocks costs, as in `toolkit.attention.sparse.train.costs`."""

from toolkit.attention.costs import STATE_BYTES, attended_pairs
from toolkit.attention.sparse.train.costs import block_pairs, index_products


def forward_flops(
    batch, time, heads, key, value, *, block_size=4, sliding_window=128, selected_entries=None,
    index_heads=None, index_size=None,
):  # fmt: skip
    """Scores and weighted sums of the window and the entries; those of the index, if entries are
    selected (not None) and there are more."""
    entries, _ = entry_pairs(time, block_size, None)
    read, scored = entries, 0
    if selected_entries is not None and time // block_size > selected_entries:
        read, scored = entry_pairs(time, block_size, selected_entries)[1], entries
    pairs = attended_pairs(time, sliding_window) + read
    index = scored * index_products(heads, key, index_heads, index_size)
    return 2 * batch * (heads * pairs * (key + value) + index)


def entry_pairs(time, block_size, selected_entries):
    """Pairs of a query and an entry that it may see, and of those that it reads of them."""
    seen, _ = block_pairs(time, block_size, 1)
    if selected_entries is None:
        return seen, seen
    # The query at t (from 1) reads all t // block_size entries while they fit.
    fit = min(time, (selected_entries + 1) * block_size - 1)
    return seen, block_pairs(fit, block_size, 1)[0] + (time - fit) * selected_entries


def forward_bytes(
    batch, time, heads, key, value, *, element_bytes=4, has_index=False, index_heads=None,
    index_size=None, **_,
):  # fmt: skip
    """q, k, v, o, the entries, and the inputs of the index once."""
    rows = 3 * heads * (key + value) * element_bytes
    index_heads, index_size = index_heads or heads, index_size or key
    index = (index_heads + 1) * index_size * element_bytes + index_heads * STATE_BYTES
    return batch * time * (rows + has_index * index)


def step_flops(
    batch, context, heads, key, value, *, block_size=4, sliding_window=128, selected_entries=None,
    index_heads=None, index_size=None,
):  # fmt: skip
    """Scores and weighted sums of one token: the window, the entries, the index."""
    entries, scored = context // block_size, 0
    if selected_entries is not None and entries > selected_entries:
        entries, scored = selected_entries, entries
    index = scored * index_products(heads, key, index_heads, index_size)
    return 2 * batch * (heads * (sliding_window + entries) * (key + value) + index)


def state_bytes(
    batch, context, heads, key, value, *, block_size=4, sliding_window=128, element_bytes=4,
    has_index=False, index_size=None, **_,
):  # fmt: skip
    """The window and the entries, and their index keys."""
    blocks = context // block_size
    index = has_index * blocks * (index_size or key)
    rows = heads * (min(context, sliding_window) + blocks) * (key + value)
    return batch * (rows + index) * element_bytes


def step_bytes(
    batch, context, heads, key, value, *, block_size=4, sliding_window=128, selected_entries=None,
    element_bytes=4, has_index=False, index_heads=None, index_size=None,
):  # fmt: skip
    """The window, the entries that are read, the index keys where they are scored, one token."""
    entries, index = context // block_size, 0
    if selected_entries is not None and entries > selected_entries:
        entries, index = selected_entries, entries * (index_size or key)
    rows = heads * (sliding_window + entries) * (key + value)
    token = forward_bytes(
        batch, 1, heads, key, value, element_bytes=element_bytes, has_index=has_index,
        index_heads=index_heads, index_size=index_size,
    )  # fmt: skip
    return batch * (rows + index) * element_bytes + token


def qwen_forward_flops(
    batch, time, heads, key, value, *, block_size=64, selected_tokens=2048, index_heads=None,
    index_size=None,
):  # fmt: skip
    """Scores of the index, if there are more blocks than are selected, and attention."""
    selected, scored = selected_tokens // block_size, 0
    dense = min(time, selected_tokens + block_size - 1)
    pairs = attended_pairs(dense, None)
    if time // block_size > selected:
        scored = block_pairs(time, block_size, 1)[0]
    # Beyond, a query reads the selected blocks and what follows the last complete one.
    rest = time - dense
    cycles, more = divmod(rest, block_size)
    tails = cycles * block_size * (block_size - 1) // 2 + more * (more - 1) // 2
    pairs += rest * selected_tokens + tails
    index = scored * index_products(heads, key, index_heads, index_size)
    return 2 * batch * (index + heads * pairs * (key + value))


def qwen_forward_bytes(
    batch, time, heads, key, value, *, index_heads=None, index_size=None, element_bytes=4, **_
):
    """q, k, v, o and the inputs of the index once."""
    index = ((index_heads or heads) + 1) * (index_size or key)
    return batch * time * (2 * heads * (key + value) + index) * element_bytes


def qwen_step_flops(
    batch, context, heads, key, value, *, block_size=64, selected_tokens=2048, index_heads=None,
    index_size=None,
):  # fmt: skip
    """Scores of the index, if there are more blocks than are selected, and attention."""
    blocks, rows, scored = context // block_size, context, 0
    if blocks > selected_tokens // block_size:
        scored, rows = blocks, selected_tokens + block_size
    index = scored * index_products(heads, key, index_heads, index_size)
    return 2 * batch * (index + heads * rows * (key + value))


def qwen_step_bytes(
    batch, context, heads, key, value, *, block_size=64, selected_tokens=2048, index_heads=None,
    index_size=None, element_bytes=4,
):  # fmt: skip
    """The index keys of blocks where they are scored, the rows read, one token."""
    blocks, rows, index = context // block_size, context, 0
    if blocks > selected_tokens // block_size:
        index, rows = blocks * (index_size or key), selected_tokens + block_size
    token = qwen_forward_bytes(
        batch, 1, heads, key, value, index_heads=index_heads, index_size=index_size,
        element_bytes=element_bytes,
    )  # fmt: skip
    return batch * (heads * rows * (key + value) + index) * element_bytes + token
