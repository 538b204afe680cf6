r"""What a score is, for the forms of softmax attention that compute it.

    s_ij = c tanh(scale q_i . k_j / c) + bias_ij + relative_bias_i,i-j - slope |i - j|
    p_ij = exp(s_ij - lse_i) for the keys j that query i sees, of which dropout keeps some

c is `logits_soft_cap`. The cap comes before the bias, as in FlashAttention.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit._kinds import shown
from toolkit.attention._attend import Mask, Window
from toolkit.attention._checks import check_count

# Farther away than any key, and no sum with the index of a token overflows 32 bits.
FURTHEST = 2**30


class Options(NamedTuple):
    """What is fixed when compiling.

    Attributes:
        scale: factor of the products of queries and keys.
        logits_soft_cap: bound of the scaled products; None for none.
        dropout_rate: share of the weights that dropout takes.
    """

    scale: float
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0


class Inputs(NamedTuple):
    """What attention is differentiated by; keys and values have time last."""

    q: Float[Array, "batch query_time heads key"]
    k: Float[Array, "batch key_heads key key_time"]
    v: Float[Array, "batch key_heads value key_time"]
    bias: Float[Array, "#batch #heads #query_time #key_time"] | None = None
    alibi_slopes: Float[Array, "heads"] | None = None
    relative_bias: Float[Array, "batch query_time heads distances"] | None = None


class Context(NamedTuple):
    """What else it depends on."""

    mask: Mask = Mask()
    dropout_key: Any = None


def at_ages(
    relative_bias: Float[Array, "*rows distances"], ages: Int[Array, "*#rows keys"], most: int
) -> Float[Array, "*rows keys"]:
    """The bias of every key by its age; 0 for a key of another age than 0 ... most - 1."""
    places = jnp.broadcast_to(ages, (*relative_bias.shape[:-1], ages.shape[-1]))
    taken = jnp.take_along_axis(relative_bias, places.clip(0, most - 1), axis=-1)
    return jnp.where((places >= 0) & (places < most), taken, 0)


def checked_cap(logits_soft_cap: float | None) -> float | None:
    """A soft cap as a float; refuses one that bounds nothing."""
    if logits_soft_cap is None:
        return None
    if not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap must be above 0; got {logits_soft_cap!r}.")
    return float(logits_soft_cap)


def window_of(
    is_causal: bool,
    sliding_window: int | None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
) -> Window:
    """The one window that the arguments describe."""
    if local_window_size is None:
        reach = None if sliding_window is None else int(sliding_window) - 1
        return reach, 0 if is_causal else reach
    if sliding_window is not None:
        raise ValueError("sliding_window and local_window_size say the same; give one of them.")
    is_pair = isinstance(local_window_size, tuple) and len(local_window_size) == 2
    sides: Any = local_window_size if is_pair else (local_window_size,) * 2
    bounded: list[Any] = [side for side in sides if side is not None or not is_pair]
    for side in bounded:
        check_count("local_window_size", side, 0, " on a side")
    left, right = (side if side is None else int(side) for side in sides)
    return left, 0 if is_causal else right


def checked_key(dropout_rate: float, dropout_key: Array | None) -> Array | None:
    """The random key of a dropout whose arguments fit each other; None without dropout."""
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must lie in [0, 1); got {dropout_rate!r}.")
    if not dropout_rate:
        return None
    if dropout_key is None:
        raise ValueError("dropout_rate needs a dropout_key, such as jax.random.key(0).")
    key = dropout_key
    if jnp.issubdtype(key.dtype, jnp.unsignedinteger):
        key = jax.random.wrap_key_data(key)
    if key.ndim or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"dropout_key must be one random key; got {shown(dropout_key)}.")
    return key


def capped(products: Array, options: Options) -> Array:
    """The scaled products, bounded."""
    products = products * options.scale
    cap = options.logits_soft_cap
    return products if cap is None else cap * jnp.tanh(products / cap)


def kept(
    key: Array,
    rate: float,
    entry: Int[Array, "*#sizes"],
    head: Int[Array, "*#sizes"],
    query: Int[Array, "*#sizes"],
    key_number: Int[Array, "*#sizes"],
) -> Bool[Array, "*sizes"]:
    """Which weights dropout keeps, each by a number of its own.

    The number follows from the key, the batch entry, the head, the query and the key alone, so any
    tile of it is drawn without the rest, and again in the backward pass.
    """
    fold = jax.vmap(jax.random.fold_in)
    for number in (entry, head, query, key_number):
        shape = jnp.broadcast_shapes(key.shape, number.shape)
        key, number = (jnp.broadcast_to(x, shape).reshape(-1) for x in (key, number))
        key = fold(key, number).reshape(shape)
    return jax.random.key_data(key)[..., 0] >= jnp.uint32(round(rate * 2**32))
