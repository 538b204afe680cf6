"""The batches of a synthetic task: tokens, answers, and the scored positions."""

from typing import NamedTuple, Protocol

from jaxtyping import Array, Bool, Int


class Batch(NamedTuple):
    """Sequences with answers; a named tuple, so it goes through jax as a pytree.

    Attributes:
        tokens: what the model reads, int32.
        targets: the right answer at each position, int32; 0 where there is none.
        mask: the positions that are trained and scored.
    """

    tokens: Int[Array, "batch time"]
    targets: Int[Array, "batch time"]
    mask: Bool[Array, "batch time"]


class Task(Protocol):
    """A family of sequences; tasks are frozen dataclasses of their sizes.

    Attributes:
        vocabulary: tokens and answers are below it.
        length: tokens of a sequence.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def length(self) -> int: ...

    def draw(self, key: Array, batch: int) -> Batch:
        """Sequences that depend on the key alone; traceable."""
        ...
