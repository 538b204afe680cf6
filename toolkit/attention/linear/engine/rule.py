"""What one token does to the state, as data: the rules that the engine runs.

A token decays the state and then corrects it, adds to it, or both:

    decay      S <- Diag(a) S                          a = e^g, per head or per key channel
    correct    S <- S + w beta (u - S^T e)^T           read under e, write the difference under w
    add        S <- S + k v^T
    read       o  = S^T q
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Correction(NamedTuple):
    """Read under `erase`, write `strength` times the difference to `value` under `write`."""

    erase: Float[Array, "*tokens key"]
    write: Float[Array, "*tokens key"]
    value: Float[Array, "*tokens value"] | None  # None: the value is 0, what was read is erased
    strength: Float[Array, "*tokens"] | None  # None: 1


class Addition(NamedTuple):
    """Add `value` under `key`."""

    key: Float[Array, "*tokens key"]
    value: Float[Array, "*tokens value"]


class Action(NamedTuple):
    """What tokens do to the state once it has decayed, and the query they read it with."""

    query: Float[Array, "*tokens key"]
    correction: Correction | None
    addition: Addition | None


class Rule(NamedTuple):
    """A method as the engine sees it."""

    # from the arrays of tokens, (q, k, v, *others) in the dtype of the state, to what they do
    action: Callable[..., Action]
    # (time, key, value, channels of g, alone) -> tokens per chunk by default; `alone` on CPUs where
    # only values are wanted, no derivatives
    chunk_size: Callable[[int, int, int, int, bool], int]
    erases_before_decay: bool = False  # whether a correction reads the state before it decays
    # whether the Pallas kernels of `kernels/` can run it: it only adds, or corrects under the key
    # that it reads by
    has_kernels: bool = False


def act(rule: Rule, dtype: jnp.dtype, tokens: tuple[Array, ...]) -> Action:
    """What tokens do, in the dtype of the state."""
    return rule.action(*(x.astype(dtype) for x in tokens))


def correcting_chunk_size(
    time: int, key: int, value: int, channels: int = 1, alone: bool = False
) -> int:
    """Tokens per chunk where tokens correct: 16 or 32, by length, head size and decays.

    Large chunks cost more work per token; small chunks keep more states for derivatives.
    Measured on CPUs: for values alone, 16 takes up to a quarter less time than 32, at 2048 and at
    8192 tokens. Forward and backward together, at 2048 tokens, 32 ties 16 for heads of 64 and is a
    tenth faster for those of 128; with a decay per channel it is slower. At 8192 tokens, memory
    makes 16 a tenth slower than 32.
    """
    has_small_heads = channels > 1 or max(key, value) <= 64
    return 16 if alone or time <= 16 or (has_small_heads and time <= 4096) else 32


def adding_chunk_size(
    time: int, key: int, value: int, channels: int = 1, alone: bool = False
) -> int:
    """Tokens per chunk where tokens only add: 32, 64 for large heads, 16 for short sequences."""
    return min(32 if max(key, value) <= 64 else 64, max(16, 1 << (time - 1).bit_length()))


DELTA_RULE = Rule(
    lambda q, k, v, beta: Action(q, correction=Correction(k, k, v, beta), addition=None),
    correcting_chunk_size,
    has_kernels=True,
)
ADDITIVE_RULE = Rule(
    lambda q, k, v: Action(q, correction=None, addition=Addition(k, v)),
    adding_chunk_size,
    has_kernels=True,
)
