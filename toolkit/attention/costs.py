"""What the token mixers cost: closed forms in plain integers, held against the compiler's counts.

FLOPs count the matrix products of this implementation, two per multiply-add; bytes count the least
that must cross the memory bus: inputs and outputs once. `element_bytes` is the size of one number
of q, k, v and o; gates and recurrent states are float32. Chunks are those of a pass that is
differentiated. All functions take (batch, time, heads, key, value) and the options of their row of
`MIXERS`.
"""

import math

from toolkit.attention.linear.engine.rule import adding_chunk_size, correcting_chunk_size

STATE_BYTES = 4  # of one float32 number of a gate or a recurrent state
LEVELS = 14  # of log-linear attention: as many as 8,192 tokens have


def attended_pairs(time: int, sliding_window: int | None) -> int:
    """Pairs of a query and a key it may see: sum over t of min(t, window)."""
    window = time if sliding_window is None else min(sliding_window, time)
    return window * (window + 1) // 2 + (time - window) * window


def softmax_forward_flops(batch, time, heads, key, value, *, sliding_window=None):
    """q k^T and the product with v, of the pairs a query may see."""
    return 2 * batch * heads * attended_pairs(time, sliding_window) * (key + value)


def softmax_forward_bytes(batch, time, heads, key, value, *, sliding_window=None, element_bytes=4):
    """q, k, v and o once."""
    return 2 * batch * time * heads * (key + value) * element_bytes


def softmax_step_flops(batch, context, heads, key, value, *, sliding_window=None):
    """q k^T and the product with v, of the tokens seen."""
    seen = context if sliding_window is None else min(context, sliding_window)
    return 2 * batch * heads * seen * (key + value)


def softmax_state_bytes(batch, context, heads, key, value, *, sliding_window=None, element_bytes=4):
    """Keys and values of the tokens seen."""
    seen = context if sliding_window is None else min(context, sliding_window)
    return batch * heads * seen * (key + value) * element_bytes


def softmax_step_bytes(batch, context, heads, key, value, *, sliding_window=None, element_bytes=4):
    """The cache, and the inputs and outputs of one token."""
    seen = context if sliding_window is None else min(context, sliding_window)
    # The cache is read; q, o and this token's k and v (written to the cache) cross once.
    return batch * heads * (seen + 2) * (key + value) * element_bytes


def delta_forward_flops(batch, time, heads, key, value, *, decays_channels=False, chunk=None):
    """Chunks of a delta rule: state, scores, inverse."""
    channels = key if decays_channels else 1
    size = correcting_chunk_size(time, key, value, channels) if chunk is None else chunk
    chunks = -(-time // size)
    state = 3 * size * key * value  # read for k and for q, written once
    within = 2 * size**2 * (key + value)  # q k^T, k k^T; T R, scores N
    inverse = _inverse_multiply_adds(size)
    return 2 * batch * heads * chunks * (state + within + inverse)


def _inverse_multiply_adds(size: int) -> int:
    """Columns of 16 x 16 blocks one by one, then two products per merge of two blocks."""
    if size <= 16:
        return (size - 1) * size**2
    half = size // 2
    return 2 * _inverse_multiply_adds(half) + 2 * half**3


def product_forward_flops(batch, time, heads, key, value, *, steps=2, chunk=None):
    """Those of a delta rule with `steps` tokens in place of each."""
    return delta_forward_flops(batch, steps * time, heads, key, value, chunk=chunk)


def product_step_flops(batch, context, heads, key, value, *, steps=2):
    """One token that corrects `steps` times."""
    # Read for q and every k, 2 (steps + 1) K V; decay; an outer product and a sum per correction.
    return (4 * steps + 3) * batch * heads * key * value


def rwkv7_forward_flops(batch, time, heads, key, value, *, chunk=None):
    """Chunks that erase under one key and add under another."""
    size = correcting_chunk_size(time, key, value, key) if chunk is None else chunk
    chunks = -(-time // size)
    state = 4 * size * key * value  # read for q and for the removal key, written twice
    # Two readers of two writers; T R, P(e, k) V, and two products with the values written.
    within = 4 * size**2 * (key + value)
    return 2 * batch * heads * chunks * (state + within + _inverse_multiply_adds(size))


def rwkv7_step_flops(batch, context, heads, key, value):
    """One token that erases and adds."""
    # Read for q and for the removal key, 4 K V; decay, two outer products and sums, 5 K V.
    return 9 * batch * heads * key * value


def delta_step_flops(batch, context, heads, key, value):
    """One token of a delta rule."""
    # Read for k and for q, 4 K V; decay, outer product and sum, 3 K V.
    return 7 * batch * heads * key * value


def recurrent_state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    """A float32 state, whatever the context."""
    return batch * heads * key * value * STATE_BYTES


def additive_forward_flops(batch, time, heads, key, value, *, chunk=None):
    """Chunks of an additive rule: state, scores."""
    size = adding_chunk_size(time, key, value) if chunk is None else chunk
    chunks = -(-time // size)
    state = 2 * size * key * value  # read for q, written once
    within = size**2 * (key + value)  # scores, and their product with v
    return 2 * batch * heads * chunks * (state + within)


def additive_step_flops(batch, context, heads, key, value, *, decays=True):
    """One token of an additive rule, whose state decays if it `decays`."""
    # Read for q, 2 K V; decay, outer product and sum, 3 K V.
    return (5 if decays else 4) * batch * heads * key * value


def token_bytes(inputs, batch, time, heads, key, value, *, steps=2, levels=LEVELS, element_bytes=4):
    """Inputs, gates and outputs of every token once."""
    sizes = {
        "batch": batch, "time": time, "heads": heads, "key": key, "value": value, "steps": steps,
        "levels": levels, "pairs": key // 2,
    }  # fmt: skip
    total = batch * time * heads * value * element_bytes
    for array in inputs:
        number = STATE_BYTES if array.is_gate else element_bytes
        total += math.prod(sizes[axis] for axis in array.axes) * number
    return total


def recurrent_step_bytes(inputs, state_bytes, batch, context, heads, key, value, **sizes):
    """The state read and written, and one token."""
    state = state_bytes(batch, context, heads, key, value)
    return 2 * state + token_bytes(inputs, batch, 1, heads, key, value, **sizes)
