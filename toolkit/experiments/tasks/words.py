"""Word problems: the running product of a sequence of group elements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit.experiments.tasks.batch import Batch
from toolkit.experiments.tasks.groups import group


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """Reads elements of a group, answers with their product so far at every position.

        y_0 = x_0,   y_t = y_{t-1} x_t

    Parity is the word problem of Z2. A solvable group can be taken apart into steps that commute;
    A5 and S5 cannot, and stand for what takes a state to track.

    Attributes:
        group: one of `GROUPS`.
        length: elements of a sequence.
        is_swaps_only: read only elements that exchange two points (S3 and S5): the easier task of
            following swaps.

    Source: Merrill, Petty and Sabharwal, "The Illusion of State in State-Space Models", 2024;
        Liu et al., "Transformers Learn Shortcuts to Automata", 2022.
    """

    group: str
    length: int
    is_swaps_only: bool = False

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, wanted at least 1")
        if self.is_swaps_only and not group(self.group).swaps:
            raise ValueError(f"group: {self.group} has no swaps; wanted S3 or S5")

    @property
    def vocabulary(self) -> int:
        """One token an element."""
        return group(self.group).order

    def draw(self, key: Array, batch: int) -> Batch:
        """Elements drawn uniformly, every position scored; see the class."""
        found = group(self.group)
        choices = np.array(found.swaps) if self.is_swaps_only else np.arange(found.order)
        tokens = jax.random.choice(key, jnp.asarray(choices), (batch, self.length))
        targets = products(tokens, found.table)
        return Batch(tokens, targets, jnp.ones(tokens.shape, bool))


def products(words: Array, table: np.ndarray) -> Array:
    """Running products of group elements, [batch, time] each, in log2(time) rounds of look-ups."""
    lookup = jnp.asarray(table)
    return jax.lax.associative_scan(lambda a, b: lookup[a, b], words, axis=1)
