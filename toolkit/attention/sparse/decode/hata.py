"""HATA: the signs of a learned projection are a key's hash, and hashes are compared bit by bit.

    h(x) = sign(x W)        score_i = (1 - 2 Hamming(h(q), h(k_i)) / bits) |k_i|

summed over the query heads of a group. For a random W the bracket estimates 1 - 2 angle / pi
(SimHash), so that cos(pi Hamming / bits) |q| |k| estimates the score itself. `train_hash` learns a
W from queries and keys. Keys are hashed relative to their mean, which shifts all scores of a query
alike and so leaves attention unchanged; the mean is recomputed whenever the number of tokens has
doubled, so that the mean of a short prompt does not stay.

Source: Gong et al. (2025), arXiv:2506.02572, and the released code for the norms.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt16, UInt32

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_choice, check_multiple
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.heads import over_blocks
from toolkit.attention.sparse.selector import Rest, Selector, setting

WORD = 32


class Hashes(NamedTuple):
    """A mean key, its number of tokens, and every token's bits (32 a word) and distance from it, in
    the bits of a bfloat16: XLA on CPUs copies an array of bfloat16 to write one number of it."""

    centre: Float[Array, "key"]
    centred: Int[Array, ""]
    words: UInt32[Array, "words capacity"]
    norms: UInt16[Array, "capacity"]


@register_dataclass
@dataclass(frozen=True)
class HATA(Selector):
    """Rank tokens by the bits that their hash shares with the query's.

    Attributes:
        bits: of a hash, a multiple of 32.
        uses_norms: whether long keys count for more, as in the released code.
        is_centred: whether keys are hashed relative to their mean.
        seed: of the random projection, where none is given.
        weights: a learned projection of every key-value head [key_value_heads, key, bits].
    """

    bits: int = setting(128)
    uses_norms: bool = setting(True)
    is_centred: bool = setting(True)
    seed: int = setting(0)
    weights: Any = field(default=None)

    group: ClassVar[str] = "sum"
    compares_scores: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_multiple("bits", self.bits, "the bits of a word", WORD)
        for name in ("uses_norms", "is_centred"):
            check_choice(name, getattr(self, name), (True, False))

    def hashes(self, x: Float[Array, "rows key"]) -> UInt32[Array, "words rows"]:
        """Hashes of queries, or of keys relative to their mean."""
        weights = self.weights
        if weights is None:
            weights = _projection(self.seed, (x.shape[1], self.bits), jnp.result_type(float))
        is_above = x.astype(weights.dtype) @ weights > 0
        bits = is_above.reshape(x.shape[0], -1, WORD).astype(jnp.uint32)
        return (
            (bits << jnp.arange(WORD, dtype=jnp.uint32)[None, None]).sum(axis=2, dtype=jnp.uint32).T
        )

    def build(self, keys: Array, values: Array, length) -> Hashes:
        capacity, size = keys.shape
        centre = jnp.zeros(size, accumulator(keys.dtype))
        if self.is_centred:

            def add(total, block, places, is_new):
                is_token = (is_new & (places < length))[:, None]
                return total + jnp.where(is_token, block, 0).sum(axis=0, dtype=total.dtype)

            centre = over_blocks(add, centre, keys) / jnp.maximum(length, 1).astype(centre.dtype)

        def hash_block(found, block, places, is_new):
            rows = block.astype(centre.dtype) - centre[None]
            new = self.hashes(rows), _rounded(jnp.linalg.norm(rows, axis=1))
            put = partial(lax.dynamic_update_slice_in_dim, start_index=places[0], axis=-1)
            return tuple(map(put, found, new))

        none = jnp.zeros((self.bits // WORD, capacity), jnp.uint32)
        words, norms = over_blocks(hash_block, (none, none[0].astype(jnp.uint16)), keys)
        centred = jnp.asarray(length if self.is_centred else 0, jnp.int32)
        return Hashes(centre, centred, words, norms)

    def is_due(self, index: Hashes, length) -> Array | None:
        return length >= 2 * index.centred if self.is_centred else None

    def refresh(self, index: Hashes, keys: Array, values: Array, length) -> Hashes:
        return self.build(keys, values, length)

    def update(self, index: Hashes, k: Array, v: Array, position) -> Hashes:
        row = k.astype(index.centre.dtype) - index.centre
        words = index.words.at[:, position].set(self.hashes(row[None])[:, 0])
        norms = index.norms.at[position].set(_rounded(jnp.linalg.norm(row)))
        return index._replace(words=words, norms=norms)

    def scores(self, index: Hashes, keys: Array, q: Array, length) -> Array:
        different = index.words[:, None] ^ self.hashes(q)[:, :, None]
        distance = lax.population_count(different).sum(axis=0, dtype=jnp.uint32)
        alike = 1 - distance.astype(index.centre.dtype) * (2 / self.bits)
        return alike * self._norms(index) if self.uses_norms else alike

    def logits(self, index: Hashes, q: Array, scores: Array) -> Array:
        norms = self._norms(index)
        alike = scores / jnp.where(norms == 0, 1, norms) if self.uses_norms else scores
        q = q.astype(norms.dtype)
        length = jnp.linalg.norm(q, axis=1)[:, None]
        return length * norms * jnp.sin(alike * (jnp.pi / 2)) + (q @ index.centre)[:, None]

    def tail(self, index: Hashes, q: Array, logits, is_taken: Array, rest: Rest):
        """The sum of the estimates of the tokens not taken, at most twice what is certain.

            n exp(q . mean k) <= sum_i exp(q . k_i)

        Hashes are noisy, and the exponentials of noisy estimates sum to too much. With values that
        are independent of each other, a weight of the rest lowers the expected error as long as it
        is less than twice the true one.
        """
        value, lse = super().tail(index, q, logits, is_taken, rest)
        _, least = super().tail(index, q, None, is_taken, rest)
        return value, jnp.clip(lse, least, least + jnp.log(2.0).astype(lse.dtype))

    def _norms(self, index: Hashes) -> Array:
        return lax.bitcast_convert_type(index.norms, jnp.bfloat16).astype(index.centre.dtype)[None]

    def index_bytes(self, index: Hashes, q: Array, length) -> Array:
        per_token = self.bits // 8 + (2 if self.uses_norms else 0)
        return length * per_token + q.shape[1] * self.bits * 4


@cache
def _projection(seed: int, shape: tuple[int, int], dtype) -> np.ndarray:
    """Once, not in every step or trace; in NumPy, since a trace's array must not outlive it."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.normal(jax.random.key(seed), shape, dtype))


def _rounded(norms: Float[Array, "*shape"]) -> UInt16[Array, "*shape"]:
    """The bits of their bfloat16."""
    return lax.bitcast_convert_type(norms.astype(jnp.bfloat16), jnp.uint16)
