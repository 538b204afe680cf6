"""What a gradient becomes on the wire: a table of compressors.

    payload = encode(x, key)        arrays of wire types, `payload_bytes(n)` in all
    x'      = decode(payload, n)    float32, near x

A compressor is a *contraction* if E|x' - x|^2 <= (1 - contraction) |x|^2, which error feedback
needs, and *unbiased* if E x' = x and E|x' - x|^2 <= variance |x|^2. Only a linear one commutes with
a sum: the payloads of all others are decoded before anything is added, so that no integer wraps.

NaN and inf are never hidden. A quantiser spreads them over their block, `scaled_sign` and
`random_k` over everything, `top_k` sends them, and the casts keep them (an inf of `float8`
becomes NaN, with its block).

Everything that only moves is an unsigned integer on the wire: XLA for CPUs would send bfloat16 as
float32, and XLA for TPUs moves a cast across the collective.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import check_choice, checked
from toolkit.parallel.gradients.compression.compressor import Compressor, Payload
from toolkit.parallel.gradients.compression.low_rank import low_rank
from toolkit.parallel.gradients.compression.packing import in_blocks, pack, unpack

Rounding = Literal["stochastic", "nearest"]


def float32() -> Compressor:
    """Nothing is lost: the dense exchange, and what the others are held against."""
    return Compressor(
        "float32",
        lambda x, key: (x.astype(jnp.float32),),
        lambda payload, n, key: payload[0],
        lambda n: 4 * n,
        lambda n: 1.0,
        lambda n: 0.0,
        "",
        is_linear=True,
    )


def bfloat16() -> Compressor:
    """A cast, rounded to nearest."""
    return Compressor(
        "bfloat16",
        lambda x, key: (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),),
        lambda payload, n, key: _from_bits(payload[0], jnp.bfloat16),
        lambda n: 2 * n,
        lambda n: 1 - 2.0**-16,
        None,
        "",
    )


def _from_bits(bits: Array, dtype: Any) -> Float[Array, " n"]:
    return jax.lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def float8_e4m3(block: int = 256) -> Compressor:
    """Eight bits with three of mantissa: s = max|x| / 448 per block, x / s rounded to nearest."""
    return _float8("float8_e4m3", jnp.float8_e4m3fn, 2.0**-4, 2.0**-10, block)


def float8_e5m2(block: int = 256) -> Compressor:
    """Eight bits with two of mantissa: s = max|x| / 57344 per block, rounded to nearest."""
    return _float8("float8_e5m2", jnp.float8_e5m2, 2.0**-3, 2.0**-17, block)


def _float8(name: str, dtype: Any, relative: float, absolute: float, block: int) -> Compressor:
    """`relative` bounds the error of a normal number, `absolute` that of a subnormal one."""
    _check_block(block, 1)
    largest = float(jnp.finfo(dtype).max)

    def encode(x: Array, key: Any) -> Payload:
        blocks = in_blocks(x, block)
        scale = _scale(blocks, jnp.inf) / largest
        codes = jnp.clip(blocks / scale[:, None], -largest, largest).astype(dtype)
        return jax.lax.bitcast_convert_type(codes, jnp.uint8), scale

    def decode(payload: Payload, n: int, key: Any) -> Array:
        return (_from_bits(payload[0], dtype) * payload[1][:, None]).reshape(-1)[:n]

    lost = relative**2 + (block - 1) * (absolute / largest) ** 2
    size = partial(_blocked_bytes, block, 8)
    source = "Micikevicius et al., FP8 formats for deep learning, 2022"
    return Compressor(f"{name}={block}", encode, decode, size, lambda n: 1 - lost, None, source)


def int8(block: int = 256, rounding: Rounding = "stochastic") -> Compressor:
    """Eight bits: s = max|x| / 127 per block, x / s rounded."""
    return _integers("int8", 127, 8, block, rounding, "Wang et al., ZeRO++, 2023")


def int4(block: int = 256, rounding: Rounding = "stochastic") -> Compressor:
    """Four bits: s = max|x| / 7 per block, x / s rounded, two in a byte."""
    return _integers("int4", 7, 4, block, rounding, "Wang et al., ZeRO++, 2023")


def ternary(block: int = 256) -> Compressor:
    """TernGrad: s = max|x| per block, sign(x) with probability |x| / s, four in a byte."""
    return _integers("ternary", 1, 2, block, "stochastic", "Wen et al., TernGrad, 2017")


def qsgd(levels: int = 64, block: int = 256) -> Compressor:
    """QSGD: s = |x|_2 per block, sign(x) times L |x| / s rounded stochastically, divided by L."""
    if not 1 <= levels <= 127:
        raise ValueError(f"levels: got {levels}, wanted 1 to 127, which fit eight bits")
    row = _integers("qsgd", levels, 8, block, "stochastic", "Alistarh et al., QSGD, 2017", norm=2)
    return replace(row, name=f"qsgd={levels}")


def _integers(
    name: str, levels: int, bits: int, block: int, rounding: str, source: str, norm: float = jnp.inf
) -> Compressor:
    """x ~ s q with q in -levels..levels and s = |x|_norm / levels of each block.

    The worst block for rounding to nearest has one number at the scale and the others half a level
    from zero; for stochastic rounding with levels L the others lie at 1 / (r + 1) of a level, with
    r^2 = 1 + (block - 1) / L^2, and the variance is (r - 1) / 2.
    """
    _check_block(block, 8 // bits)
    check_choice("rounding", rounding, ("stochastic", "nearest"))

    def encode(x: Array, key: Any) -> Payload:
        blocks = in_blocks(x, block)
        scale = _scale(blocks, norm) / levels
        exact = blocks / scale[:, None]
        if rounding == "stochastic":
            codes = jnp.floor(exact + jax.random.uniform(key, exact.shape, exact.dtype))
        else:
            codes = jnp.round(exact)
        codes = jnp.clip(codes, -levels, levels)
        if bits == 8:
            return codes.astype(jnp.int8), scale
        return pack((codes + levels).astype(jnp.uint8), bits), scale

    def decode(payload: Payload, n: int, key: Any) -> Array:
        codes, scale = payload
        codes = codes if bits == 8 else unpack(codes, bits, block).astype(jnp.float32) - levels
        return (codes.astype(jnp.float32) * scale[:, None]).reshape(-1)[:n]

    spread = (math.sqrt(1 + (block - 1) / levels**2) - 1) / 2
    if norm == 2:
        spread = min(block / levels**2, math.sqrt(block) / levels)
    contraction: Any = lambda n: 4 * levels**2 / (4 * levels**2 + block - 1)  # noqa: E731
    variance: Any = None
    if rounding == "stochastic":
        variance = lambda n: spread  # noqa: E731
        contraction = (lambda n: 1 - spread) if spread < 1 else None
    size = partial(_blocked_bytes, block, bits)
    return Compressor(f"{name}={block}", encode, decode, size, contraction, variance, source)


def _scale(blocks: Array, norm: float) -> Array:
    """The norm of each block, 1 for a block of zeros; NaN where a number is not finite."""
    scale = jnp.linalg.norm(blocks, ord=norm, axis=1)
    # XLA for CPUs takes the maximum of numbers and a NaN to be a number, by default.
    scale = scale + jnp.sum(0 * blocks, axis=1)
    return jnp.where(scale == 0, 1, scale).astype(jnp.float32)


def _blocked_bytes(block: int, bits: int, n: int) -> int:
    blocks = -(-n // block)
    return blocks * (block * bits // 8 + 4)


def _check_block(block: int, per_byte: int) -> None:
    if block < 2 or block % per_byte:
        wanted = f"a multiple of {per_byte}" if per_byte > 1 else "at least 2"
        raise ValueError(f"block: got {block}, wanted {wanted}")


def scaled_sign() -> Compressor:
    """mean|x| sign(x), eight signs in a byte; sign(0) = 1."""

    def encode(x: Array, key: Any) -> Payload:
        return pack((x >= 0).astype(jnp.uint8), 1), jnp.mean(jnp.abs(x))[None].astype(jnp.float32)

    def decode(payload: Payload, n: int, key: Any) -> Array:
        return (2.0 * unpack(payload[0], 1, n).astype(jnp.float32) - 1) * payload[1]

    source = "Karimireddy et al., Error feedback fixes SignSGD, 2019"
    size: Any = lambda n: -(-n // 8) + 4  # noqa: E731
    return Compressor("scaled_sign", encode, decode, size, lambda n: 1 / n, None, source)


def top_k(share: float = 0.01) -> Compressor:
    """The k = ceil(share n) numbers of largest magnitude, with their places; ties to the first."""
    count = _count_of(share)

    def encode(x: Array, key: Any) -> Payload:
        places = jax.lax.top_k(jnp.abs(x), count(x.shape[0]))[1]
        return x[places].astype(jnp.float32), places.astype(jnp.int32)

    def decode(payload: Payload, n: int, key: Any) -> Array:
        return jnp.zeros(n, jnp.float32).at[payload[1]].set(payload[0], unique_indices=True)

    source = "Lin et al., Deep gradient compression, 2018"
    size: Any = lambda n: 8 * count(n)  # noqa: E731
    kept: Any = lambda n: count(n) / n  # noqa: E731
    return Compressor(f"top_k={share:g}", encode, decode, size, kept, None, source, False, True)


def random_k(share: float = 0.01, is_scaled: bool = False) -> Compressor:
    """k = ceil(share n) numbers at places from a shared key, which need not be sent.

    Scaled by n / k they are unbiased; as they are, a contraction.
    """
    count = _count_of(share)

    def places(n: int, key: Any) -> Array:
        return jax.random.choice(key, n, (count(n),), replace=False)

    def encode(x: Array, key: Any) -> Payload:
        n = x.shape[0]
        values = x[places(n, key)] * (n / count(n) if is_scaled else 1)
        # What is not finite may lie elsewhere.
        return ((values + jnp.sum(0 * x)).astype(jnp.float32),)

    def decode(payload: Payload, n: int, key: Any) -> Array:
        return jnp.zeros(n, jnp.float32).at[places(n, key)].set(payload[0], unique_indices=True)

    source = "Wangni et al., Gradient sparsification, 2018"
    size: Any = lambda n: 4 * count(n)  # noqa: E731
    row = Compressor(f"random_k={share:g}", encode, decode, size, None, None, source, True)
    if is_scaled:
        return replace(row, variance=lambda n: n / count(n) - 1)
    return replace(row, contraction=lambda n: count(n) / n)


def _count_of(share: float) -> Callable[[int], int]:
    if not 0 < share <= 1:
        raise ValueError(f"share: got {share}, wanted more than 0 and at most 1")
    return lambda n: min(n, math.ceil(share * n))


@checked
def contracted(compressor: Compressor) -> Compressor:
    """An unbiased compressor divided by 1 + variance, which makes it a contraction.

    With error feedback, one that is unbiased and no contraction diverges.

    Args:
        compressor: with a variance.

    Source: Beznosikov et al., On biased compression for distributed learning, 2020.

    Example:
        >>> round(contracted(COMPRESSORS["ternary"](256)).contraction(1024), 4)
        0.1176
    """
    variance = compressor.variance
    if variance is None:
        raise ValueError(f"compressor: got {compressor}, wanted one with a variance")
    return replace(
        compressor,
        name=f"contracted {compressor.name}",
        decode=lambda payload, n, key: compressor.decode(payload, n, key) / (1 + variance(n)),
        contraction=lambda n: 1 / (1 + variance(n)),
        variance=None,
    )


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "float32": float32,
    "bfloat16": bfloat16,
    "float8_e4m3": float8_e4m3,
    "float8_e5m2": float8_e5m2,
    "int8": int8,
    "int4": int4,
    "ternary": ternary,
    "qsgd": qsgd,
    "scaled_sign": scaled_sign,
    "top_k": top_k,
    "random_k": random_k,
    "low_rank": low_rank,
}
"""Compressors by name; each may be called without arguments, or with its first as in "int4=64"."""


def compressor_of(text: str) -> Compressor:
    """The compressor that a name such as "int4" or "top_k=0.001" stands for."""
    name, _, size = text.partition("=")
    check_choice("compressor", name, COMPRESSORS)
    try:
        sizes = [float(size) if "." in size or "e" in size else int(size)] if size else []
        return COMPRESSORS[name](*sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"compressor: got {text!r}: {error}") from None
