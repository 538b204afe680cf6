"""Small integers side by side in bytes, and vectors cut into blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8


def pack(codes: UInt8[Array, "*batch n"], bits: int) -> UInt8[Array, "*batch bytes"]:
    """Codes below 2**bits (bits 1, 2 or 4), 8 / bits of them in a byte, the first one lowest."""
    per_byte = 8 // bits
    short = -codes.shape[-1] % per_byte
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    codes = codes.reshape(*codes.shape[:-1], -1, per_byte)
    shifts = bits * jnp.arange(per_byte, dtype=jnp.uint8)
    return jnp.sum(codes << shifts, axis=-1, dtype=jnp.uint8)


def unpack(packed: UInt8[Array, "*batch bytes"], bits: int, n: int) -> UInt8[Array, "*batch n"]:
    """The first n codes of what `pack` made."""
    shifts = bits * jnp.arange(8 // bits, dtype=jnp.uint8)
    codes = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :n]


def in_blocks(x: Float[Array, " n"], block: int) -> Float[Array, "blocks block"]:
    """The vector in blocks; zeros fill the last one."""
    return jnp.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)
