r"""Block floating point: the numbers of a block share one exponent.

    e = floor(log2 max |x|)        n = round(x / 2^(e - bits + 2)), clipped to +-(2^(bits - 1) - 1)

A number takes bits + 8 / block bits. One large channel leaves the others of its block few steps, so
channels are put in the order of their size first: of all orders, the sorted one minimises the sum
over the blocks of block max^2. Scores do not change if queries and keys are put in the same order,
(P q) . (P k) = q . k, so that P can go into the weights that make them.

Rotary embedding turns channels in pairs i and i + size / 2. An order that is applied before it has
to keep these pairs, and sorts them by the larger of the two.

Source: the shared exponents of Drumond et al. (2018), arXiv:1804.01526, section 3.
"""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from toolkit._annotations import Between
from toolkit._checks import checked
from toolkit.attention._checks import check_choice
from toolkit.attention._shapes import TokenCount
from toolkit.attention.execution.precision import accumulator

BITS = range(2, 9)


@checked
def block_floats(
    x: Float[Array, "*rows size"], *, bits: int = 4, block: TokenCount = 32
) -> tuple[Int8[Array, "*rows size"], Int8[Array, "*rows blocks"]]:
    """The numbers of a block of channels, and the exponent that they share.

    Args:
        x: rows of numbers [..., size].
        bits: of a number, its sign included, 2 to 8.
        block: numbers that share an exponent; divides size.

    Returns:
        Whole numbers [..., size] and exponents [..., size / block]. The error is at most half of
        2^(exponent - bits + 2), or all of it where the largest number would need another bit. A
        block of zeros, or with NaN or inf in it, gives zeros; the latter has the exponent 127.

    Example:
        >>> numbers, exponents = block_floats(jnp.array([1.0, 0.5, 0.25, 0.0]), block=4)
        >>> numbers.tolist(), exponents.tolist()
        ([4, 2, 1, 0], [0])
    """
    check_choice("bits", bits, BITS)
    if x.shape[-1] % block:
        raise ValueError(f"block must divide the size {x.shape[-1]}; got {block}.")
    blocks = x.astype(accumulator(x.dtype)).reshape(*x.shape[:-1], -1, block)
    largest = jnp.abs(blocks).max(axis=-1)
    is_sound = jnp.isfinite(largest)
    # |x| = m 2^e with m from 1/2 up to 1, so that floor(log2 |x|) is e - 1 without rounding.
    exponents = jnp.frexp(jnp.where(is_sound & (largest > 0), largest, 1))[1] - 1
    exponents = jnp.clip(exponents, -126, 126)
    numbers = jnp.round(jnp.ldexp(blocks, (bits - 2 - exponents)[..., None]))
    most = 2 ** (bits - 1) - 1
    numbers = jnp.where(is_sound[..., None], jnp.clip(numbers, -most, most), 0)
    exponents = jnp.where(is_sound, exponents, 127).astype(jnp.int8)
    return numbers.astype(jnp.int8).reshape(x.shape), exponents


@checked
def from_block_floats(
    numbers: Int8[Array, "*rows size"],
    exponents: Int8[Array, "*rows blocks"],
    *,
    bits: Annotated[int, Between("bits", 2, 8)] = 4,
) -> Float[Array, "*rows size"]:
    """The floating point numbers that `block_floats` made of others, in float32.

        x = n 2^(e - bits + 2)

    Args:
        numbers: from `block_floats` [..., size].
        exponents: likewise [..., size / block]; 127 stands for a block with NaN.
        bits: as there.

    Returns:
        Numbers [..., size].

    Example:
        >>> from_block_floats(*block_floats(jnp.array([1.0, 0.3]), block=2)).tolist()
        [1.0, 0.25]
    """
    blocks = numbers.reshape(*exponents.shape, -1).astype(jnp.float32)
    powers = exponents.astype(jnp.int32)[..., None]
    found = jnp.ldexp(blocks, powers - bits + 2)
    return jnp.where(powers == 127, jnp.nan, found).reshape(numbers.shape)


@checked
def rearranged_channels(
    size: Float[Array, "channels"], *, keeps_pairs: bool = False
) -> Int[Array, "channels"]:
    """An order of the channels in which those of like size lie side by side.

    Args:
        size: the largest |x| of each channel in texts for calibration [channels].
        keeps_pairs: whether channels i and i + channels / 2 stay a pair of rotary embedding: the
            order of each half is that of the pairs, by the larger of the two.

    Returns:
        Channels, the largest first [channels]; `x[..., order]` is x rearranged.

    Example:
        >>> rearranged_channels(jnp.array([1.0, 8.0, 2.0, 4.0])).tolist()
        [1, 3, 2, 0]
        >>> rearranged_channels(jnp.array([1.0, 8.0, 2.0, 4.0]), keeps_pairs=True).tolist()
        [1, 0, 3, 2]
    """
    if not keeps_pairs:
        return jnp.argsort(-size, stable=True)
    if size.size % 2:
        raise ValueError(f"size must be of an even number of channels to pair; got {size.size}.")
    half = size.size // 2
    order = jnp.argsort(-size.reshape(2, half).max(axis=0), stable=True)
    return jnp.concatenate([order, order + half])
