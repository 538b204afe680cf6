"""Multi-query associative recall (MQAR): pairs of a key and a value, asked for again later."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit.experiments.tasks.batch import Batch


@dataclasses.dataclass(frozen=True)
class MultiQueryRecall:
    """Key-value pairs first; then every key once more, where the answer is its value.

        k1 v1 k2 v2 ... kn vn | noise k2 noise noise k1 noise ...      targets: v2 at k2, v1 at k1

    Keys come from 1..V/2-1 and values from V/2..V-1, both without repetition. A key is asked for
    at an even distance behind the pairs, the j-th of the slots being drawn with a probability
    proportional to a j^(a-1), without repetition: soon after the pairs, with a long tail. The rest
    is noise, any token.

    Attributes:
        pairs: number of pairs n.
        length: tokens of a sequence, even, at least 4 n.
        vocabulary: V; even, with room for n keys and n values.
        power: a of the power law.

    Source: Arora et al., "Zoology", 2023, appendix and code; the token after a key is the one
        to predict, so the target stands at the key.
    """

    pairs: int
    length: int = 64
    vocabulary: int = 256
    power: float = 0.01

    def __post_init__(self):
        if self.pairs < 1 or self.length % 2 or self.length < 4 * self.pairs:
            raise ValueError(
                f"length: got {self.length} for {self.pairs} pairs, wanted an even number of at "
                f"least {4 * self.pairs}"
            )
        if self.vocabulary % 2 or self.vocabulary // 2 - 1 < self.pairs:
            raise ValueError(
                f"vocabulary: got {self.vocabulary}, wanted an even number of at least "
                f"{2 * self.pairs + 2}"
            )

    def draw(self, key: Array, batch: int) -> Batch:
        """Sequences with every pair asked for once; see the class."""
        return jax.vmap(self._draw_one)(jax.random.split(key, batch))

    def _draw_one(self, key: Array) -> Batch:
        for_keys, for_values, for_slots, for_noise = jax.random.split(key, 4)
        half, pairs = self.vocabulary // 2, self.pairs
        keys = 1 + jax.random.permutation(for_keys, half - 1)[:pairs]
        values = half + jax.random.permutation(for_values, half)[:pairs]
        slots = (self.length - 2 * pairs) // 2
        weights = self.power * jnp.arange(1, slots + 1) ** (self.power - 1.0)
        # The largest of log weight + Gumbel noise are a draw without repetition.
        scores = jnp.log(weights) + jax.random.gumbel(for_slots, (slots,))
        asked = 2 * pairs + 2 * jax.lax.top_k(scores, pairs)[1]
        tokens = jax.random.randint(for_noise, (self.length,), 0, self.vocabulary)
        tokens = tokens.at[: 2 * pairs].set(jnp.stack([keys, values], 1).reshape(-1))
        tokens = tokens.at[asked].set(keys)
        targets = jnp.zeros(self.length, jnp.int32).at[asked].set(values)
        return Batch(tokens, targets, jnp.zeros(self.length, bool).at[asked].set(True))
