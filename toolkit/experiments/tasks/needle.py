"""One value to find at a known distance: a test of the receptive field."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from toolkit.experiments.tasks.batch import Batch


@dataclasses.dataclass(frozen=True)
class Needle:
    """Noise around one token that means something, asked for D tokens later.

        noise ... v noise noise ... QUERY        the answer at QUERY is v, D positions before it

    The alphabet of the needle v differs from that of the noise, and nothing else in the sequence
    depends on it: a model that does not reach D tokens back answers by chance, 1 / values.

    Attributes:
        distance: positions from the needle to the query, drawn from 1 to this.
        values: how many needles there are, and as many kinds of noise.
    """

    distance: int
    values: int = 4

    def __post_init__(self):
        for name in ("distance", "values"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")

    @property
    def vocabulary(self) -> int:
        """Needles, noise, QUERY."""
        return 2 * self.values + 1

    @property
    def length(self) -> int:
        """Up to the farthest needle, query included."""
        return self.distance + 1

    def draw(self, key: Array, batch: int) -> Batch:
        """Sequences of equal length with the query at the end; see the class."""
        where, rest = jax.random.split(key)
        return self.draw_at(rest, jax.random.randint(where, (batch,), 1, self.distance + 1))

    def draw_at(self, key: Array, distance: Int[Array, "batch"]) -> Batch:
        """`draw` with distances given, 1 to the largest."""
        noise, which = jax.random.split(key)
        shape, last = (len(distance), self.length), self.length - 1
        value = jax.random.randint(which, (shape[0], 1), 0, self.values)
        tokens = jax.random.randint(noise, shape, self.values, 2 * self.values)
        position = jnp.arange(self.length)[None]
        tokens = jnp.where(position == last - distance[:, None], value, tokens)
        tokens = jnp.where(position == last, 2 * self.values, tokens)
        mask = jnp.broadcast_to(position == last, shape)
        return Batch(tokens, jnp.where(mask, value, 0), mask)
