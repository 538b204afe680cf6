"""What a sender remembers of what it could not send: a table of feedbacks.

    p  = given(x, memory)               what is compressed
    x' = decode(encode(p))              what is sent
    memory <- kept(p, x', memory)

The memory is of what was *sent*, with the same rounding, and differs from replica to replica.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from toolkit.parallel.gradients.compression.compressor import Compressor
from toolkit.parallel.gradients.compression.compressors import int8

MOVING_AVERAGE = 0.5  # of LoCo
FORGET_AFTER = 512  # steps of LoCo; the number is ours
MOMENTUM = 0.9  # of DGC

Memory = tuple[Array, ...]


@dataclass(frozen=True)
class Feedback:
    """One way to remember what was not sent.

    Attributes:
        name: of the row.
        parts: number of arrays in a memory, each of the shape of what is sent.
        given: (x, memory) -> (what is compressed, memory).
        kept: (compressed, sent, memory) -> memory.
        is_difference: whether differences to the last messages are sent, so that the mean adds to
            that of the step before.
        is_for_sparse: whether it wants a compressor that sends some numbers as they are.
        storage: how the memory lies in memory; None for float32.
        forgets_after: steps after which it begins anew; None: never.
        source: the paper.

    Example:
        >>> row = FEEDBACKS["error_feedback"]
        >>> given, memory = row.given(jnp.ones(2), (jnp.full(2, 0.5),))
        >>> row.kept(given, jnp.ones(2), memory)[0].tolist()
        [0.5, 0.5]
    """

    name: str
    parts: int
    given: Callable[[Array, Memory], tuple[Array, Memory]]
    kept: Callable[[Array, Array, Memory], Memory]
    source: str
    is_difference: bool = False
    is_for_sparse: bool = False
    storage: Compressor | None = None
    forgets_after: int | None = None


def _corrected_momentum(x: Array, memory: Memory) -> tuple[Array, Memory]:
    velocity = MOMENTUM * memory[0] + x
    return memory[1] + velocity, (velocity, memory[1])


def _unsent(given: Array, sent: Array, memory: Memory) -> Memory:
    stays = sent == 0
    return jnp.where(stays, memory[0], 0), jnp.where(stays, given, 0)


FEEDBACKS: dict[str, Feedback] = {
    row.name: row
    for row in (
        Feedback(
            "error_feedback",
            1,
            lambda x, memory: (x + memory[0], memory),
            lambda given, sent, memory: (given - sent,),
            "Karimireddy et al., Error feedback fixes SignSGD, 2019",
        ),
        Feedback(
            "ef21",
            1,
            lambda x, memory: (x - memory[0], memory),
            lambda given, sent, memory: (memory[0] + sent,),
            "Richtarik, Sokolov and Fatkhullin, EF21, 2021",
            is_difference=True,
        ),
        Feedback(
            "loco",
            1,
            lambda x, memory: (x + memory[0], memory),
            lambda given, sent, memory: (
                MOVING_AVERAGE * memory[0] + (1 - MOVING_AVERAGE) * (given - sent),
            ),
            "Xie et al., LoCo: low-bit communication adaptor, 2024",
            storage=int8(256, "nearest"),
            forgets_after=FORGET_AFTER,
        ),
        Feedback(
            "momentum",
            2,
            _corrected_momentum,
            _unsent,
            "Lin et al., Deep gradient compression, 2018, section 3: momentum correction and "
            "factor masking",
            is_for_sparse=True,
        ),
    )
}
"""Feedbacks by name; "none" remembers nothing."""
