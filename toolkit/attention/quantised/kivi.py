r"""KIVI: keys in a few bits per channel, values in a few bits per token, the newest ones exact.

    code = round((x - z) / s)        s = (max - min) / (2^bits - 1)        z = min

over `group` tokens of one channel for keys, whose large channels are the same in all tokens, and
over `group` channels of one token for values, which have none. Keys are rounded `recent` tokens at
a time, when so many are full; values one by one, as they leave the `recent` newest.

Source: Liu et al. (2024), arXiv:2402.02750, algorithm 1.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import bounded
from toolkit.attention._checks import check_choice, check_multiple
from toolkit.attention._shapes import HeldKeys, HeldValues, SharedKey, SharedValue, TokenCount
from toolkit.attention.execution.precision import accumulator


class Codes(NamedTuple):
    """Numbers of a few bits, several in a byte, with a step and a zero point per group."""

    packed: UInt8[Array, "*rows bytes"]
    scales: Float[Array, "*rows groups"]
    zeros: Float[Array, "*rows groups"]


@register_dataclass
@dataclass(frozen=True)
class KiviCache:
    """Keys and values of a few bits with a window in full precision; a pytree.

    `floats` gives what attention reads, and so what a selector of `attention.sparse` indexes.

    Attributes:
        keys: codes of every channel, tokens last [batch, heads, key, capacity in bytes].
        values: codes of every token [batch, heads, capacity, value in bytes].
        recent_keys: token p in slot p % recent [batch, heads, recent, key].
        recent_values: likewise.
        length: tokens of each row, int32.
        bits: of a number: 2, 4 or 8.
        group: numbers with one step and zero point.

    Example:
        >>> keys = jnp.arange(128.0).reshape(1, 1, 32, 4)
        >>> cache = KiviCache.of(keys, keys, jnp.array([20]), bits=2, group=4, recent=8)
        >>> cache.append(keys[:, :, 20], keys[:, :, 20]).length.tolist()
        [21]
        >>> float(abs(cache.floats()[0] - keys)[:, :, :20].max())
        0.0
    """

    keys: Codes
    values: Codes
    recent_keys: Float[Array, "batch heads recent key"]
    recent_values: Float[Array, "batch heads recent value"]
    length: Int[Array, "batch"]
    bits: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})

    @classmethod
    @checked
    def of(
        cls, keys: HeldKeys, values: HeldValues, length: Int[Array, "batch"], *,
        bits: int = 2, group: TokenCount = 32, recent: TokenCount = 128,
    ) -> "KiviCache":  # fmt: skip
        """Round a prompt's keys and values [batch, heads, capacity, size].

        `recent` is a multiple of `group` and divides the capacity; `group` divides the values.
        """
        check_choice("bits", bits, (2, 4, 8))
        check_multiple("recent", recent, "group", group)
        check_multiple("the capacity", keys.shape[2], "recent", recent)
        check_multiple("the size of values", values.shape[3], "group", group)
        check_multiple("group", group, "the numbers of a byte", 8 // bits)
        length = bounded(length, 0, keys.shape[2])
        is_token = (jnp.arange(keys.shape[2])[None] < length[:, None])[:, None, :, None]
        keys, values = (jnp.where(is_token, x, 0) for x in (keys, values))
        # The newest token of every slot.
        slot = jnp.arange(recent, dtype=jnp.int32)[None]
        newest = (length[:, None] - 1 - slot) // recent * recent + slot
        newest = jnp.maximum(newest, 0)[:, None, :, None]
        recent_keys, recent_values = (
            jnp.take_along_axis(x, newest, axis=2) for x in (keys, values)
        )
        of_keys, of_values = encode(keys.swapaxes(2, 3), bits, group), encode(values, bits, group)
        return cls(of_keys, of_values, recent_keys, recent_values, length, bits, group)

    def append(self, k: SharedKey, v: SharedValue) -> "KiviCache":
        """One more token for every row; its room is not checked."""
        heads = jax.vmap(_append, in_axes=(0, 0, 0, None, None, None))
        rows = jax.vmap(heads, in_axes=(0, 0, 0, 0, None, None))
        codes = self.keys, self.values, self.recent_keys, self.recent_values
        codes = rows(codes, k, v, self.length, self.bits, self.group)
        keys, values, recent_keys, recent_values = codes
        return replace(
            self, keys=keys, values=values, recent_keys=recent_keys,
            recent_values=recent_values, length=self.length + 1,
        )  # fmt: skip

    def floats(self) -> tuple[HeldKeys, HeldValues]:
        """Keys and values as attention reads them [batch, heads, capacity, size]."""
        keys, values = (decode(x, self.bits, self.group) for x in (self.keys, self.values))
        keys, recent = keys.swapaxes(2, 3), self.recent_keys.shape[2]
        token, length = jnp.arange(keys.shape[2], dtype=jnp.int32)[None], self.length[:, None]
        is_exact = token >= length - length % recent, token >= length - recent
        pairs = (keys, self.recent_keys), (values, self.recent_values)
        found = (
            jnp.where(exact[:, None, :, None], jnp.tile(ring, (1, 1, x.shape[2] // recent, 1)), x)
            for exact, (x, ring) in zip(is_exact, pairs, strict=True)
        )
        keys, values = (
            jnp.where((token < length)[:, None, :, None], x.astype(ring.dtype), 0)
            for x, (_, ring) in zip(found, pairs, strict=True)
        )
        return keys, values

    def bits_per_number(self) -> float:
        """Of a rounded key or value, its share of steps and zero points included."""
        return self.bits + 2 * 8 * self.keys.scales.dtype.itemsize / self.group


def encode(x: Float[Array, "*rows size"], bits: int, group: int) -> Codes:
    """Codes of groups of the last axis; a group with NaN or inf has the step NaN."""
    groups = x.reshape(*x.shape[:-1], -1, group).astype(accumulator(x.dtype))
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = (high - low) / (2**bits - 1)
    is_sound = jnp.isfinite(scales)
    steps = (groups - low[..., None]) / jnp.where(is_sound & (scales > 0), scales, 1)[..., None]
    steps = jnp.where(is_sound[..., None], jnp.clip(steps, 0, 2**bits - 1), 0)
    codes = jnp.round(steps).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 8 // bits)
    shifts = bits * jnp.arange(8 // bits, dtype=jnp.uint8)
    packed = jnp.left_shift(codes, jnp.broadcast_to(shifts, codes.shape))
    packed = packed.sum(axis=-1, dtype=jnp.uint8)
    scales, zeros = (y.astype(x.dtype) for y in (jnp.where(is_sound, scales, jnp.nan), low))
    return Codes(packed, scales, zeros)


def decode(codes: Codes, bits: int, group: int) -> Float[Array, "*rows size"]:
    """The numbers that codes stand for, in the precision of sums."""
    shifts = bits * jnp.arange(8 // bits, dtype=jnp.uint8)
    packed = jnp.broadcast_to(codes.packed[..., None], (*codes.packed.shape, 8 // bits))
    numbers = jnp.right_shift(packed, jnp.broadcast_to(shifts, packed.shape)) & (2**bits - 1)
    precise = accumulator(codes.scales.dtype)
    numbers = numbers.reshape(*codes.scales.shape, group).astype(precise)
    scales, zeros = (x.astype(precise)[..., None] for x in (codes.scales, codes.zeros))
    return (numbers * scales + zeros).reshape(*codes.packed.shape[:-1], -1)


def _append(parts, k, v, position, bits, group):
    """For one head: arrays without the axes of rows and heads."""
    keys, values, recent_keys, recent_values = parts
    recent = recent_keys.shape[0]
    slot, oldest = position % recent, position - recent
    leaving = encode(recent_values[slot][None], bits, group)
    values = _written(values, leaving, oldest >= 0, (oldest, oldest), axis=0)
    recent_keys, recent_values = (
        x.at[slot].set(new.astype(x.dtype)) for x, new in ((recent_keys, k), (recent_values, v))
    )
    full, is_full = encode(recent_keys.T, bits, group), slot == recent - 1
    places = (oldest + 1) * bits // 8, (oldest + 1) // group
    keys = _written(keys, full, is_full, places, axis=1)
    return keys, values, recent_keys, recent_values


def _written(codes: Codes, new: Codes, is_due: Array, places: Any, *, axis: int) -> Codes:
    """Codes with others written, if they are due, at a place of the bytes and one of the groups."""

    def write(x: Array, new: Array, place: Array) -> Array:
        before = lax.dynamic_slice_in_dim(x, jnp.maximum(place, 0), new.shape[axis], axis)
        new = jnp.where(is_due, new, before)
        return lax.dynamic_update_slice_in_dim(x, new, jnp.maximum(place, 0), axis)

    byte, of_group = places
    return Codes(
        write(codes.packed, new.packed, byte),
        write(codes.scales, new.scales, of_group),
        write(codes.zeros, new.zeros, of_group),
    )
