"""Retrieval: needles scattered over a haystack of noise, asked for at the end."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit.experiments.tasks.batch import Batch

KEYS = 64  # as many values; the rest of the vocabulary is noise


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """Pairs of a key and a value anywhere in noise; at the end some of the keys are asked for.

        noise k2 v2 noise noise k1 v1 ... k7 v7 noise | k1 v1 k7 v7        targets: v1 at k1

    Pairs stand at even places, no key twice. A retrieval head finds the one token that follows
    the key it is asked for; everything else in the text is of no use to it.

    Attributes:
        pairs: pairs in the haystack.
        length: tokens of a sequence, even.
        queries: keys that are asked for, at most `pairs`.
        depth: where the first pair asked for stands, as a share of the haystack; None for
            anywhere. A needle in a haystack is 1 query at a depth.

    Source: Arora et al., "Zoology", 2023, and the needle tests of RULER (Hsieh et al., 2024), with
        many needles at once.
    """

    pairs: int
    length: int
    queries: int
    depth: float | None = None

    def __post_init__(self):
        if not 1 <= self.queries <= self.pairs <= KEYS:
            raise ValueError(
                f"1 <= queries <= pairs <= {KEYS} must hold; got {self.queries} and {self.pairs}"
            )
        if self.length % 2 or self.haystack < 2 * self.pairs:
            raise ValueError(
                f"length: got {self.length} for {self.pairs} pairs and {self.queries} queries, "
                f"wanted an even number of at least {2 * (self.pairs + self.queries)}"
            )
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"depth: got {self.depth}, wanted a share from 0 to 1")

    @property
    def vocabulary(self) -> int:
        """Keys, values, noise."""
        return 4 * KEYS

    @property
    def haystack(self) -> int:
        """Tokens before the first question."""
        return self.length - 2 * self.queries

    def draw(self, key: Array, batch: int) -> Batch:
        """Sequences with all questions scored; see the class."""
        return jax.vmap(self._draw_one)(jax.random.split(key, batch))

    def _draw_one(self, key: Array) -> Batch:
        for_keys, for_values, for_places, for_noise = jax.random.split(key, 4)
        keys = jax.random.permutation(for_keys, KEYS)[: self.pairs]
        values = KEYS + jax.random.randint(for_values, (self.pairs,), 0, KEYS)
        slots = self.haystack // 2
        order = jax.random.permutation(for_places, slots)
        if self.depth is not None:
            # The slot that is wanted changes places with the first.
            wanted = round(self.depth * (slots - 1))
            order = jnp.where(order == wanted, order[0], order).at[0].set(wanted)
        places = 2 * order[: self.pairs]
        asked = self.haystack + 2 * jnp.arange(self.queries)
        answers = values[: self.queries]
        tokens = jax.random.randint(for_noise, (self.length,), 2 * KEYS, self.vocabulary)
        tokens = tokens.at[places].set(keys).at[places + 1].set(values)
        tokens = tokens.at[asked].set(keys[: self.queries]).at[asked + 1].set(answers)
        targets = jnp.zeros(self.length, jnp.int32).at[asked].set(answers)
        return Batch(tokens, targets, jnp.zeros(self.length, bool).at[asked].set(True))
