"""How many tokens a step may attend to: a number, a share, a mass, a threshold, or one per head.

A budget counts every token attended to, sinks and recent tokens included, so that systems with
equal budgets read equally much. A budget below the sinks and recent tokens of a system is refused
where it is used. A budget knows nothing of the system that ranks the tokens but the estimated share
of the softmax in every unit (`Ranked`).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_count


class Ranked(NamedTuple):
    """Units in falling order of their score, with their estimated shares of the softmax of every
    query head that reads them."""

    # estimated share of the whole softmax that each unit holds; None if not asked for
    shares: Float[Array, "heads units"] | None
    sizes: Int[Array, "units"]  # tokens of each unit
    # estimated share of the sinks and recent tokens, which are always read, likewise
    forced_share: Float[Array, "heads"] | None
    forced_lse: Float[Array, "heads"]  # their residual, exactly
    scores: Float[Array, "all_units"]  # by which all units are ranked, in the units' own order
    room: Int[Array, ""]  # the most tokens that may still be read


class Budget(Protocol):
    """How many tokens a head may attend to."""

    needs_mass: ClassVar[bool]  # whether it asks what share of the softmax the ranked units hold
    # whether it is shared out among the heads of a layer by their scores
    compares_heads: ClassVar[bool]

    @property
    def heads(self) -> int | None:
        """The key-value heads that it is for; None for any number of them."""
        ...

    def most(self, capacity: int) -> int:
        """The most tokens of a head, whatever its length: known when compiling."""
        ...

    def least(self, capacity: int) -> int:
        """The fewest tokens of a head whose row is full, if the query asks for as many."""
        ...

    def count(self, length: Int[Array, ""], head: Int[Array, ""]) -> Int[Array, ""]:
        """The most tokens of one key-value head in a row of some length."""
        ...

    def selected(self, ranked: Ranked) -> Int[Array, ""]:
        """How many ranked tokens suffice; asked only of a budget that depends on the ranking."""
        ...


@dataclass(frozen=True)
class _Counted:
    """A budget known before the ranking."""

    needs_mass: ClassVar[bool] = False
    compares_heads: ClassVar[bool] = False

    @property
    def heads(self) -> int | None:
        return None

    def most(self, capacity: int) -> int:
        raise NotImplementedError

    def least(self, capacity: int) -> int:
        return self.most(capacity)

    def selected(self, ranked: Ranked) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class FixedTokens(_Counted):
    """The same number of tokens in every head, or all tokens if there are fewer.

    Example:
        >>> FixedTokens(256).most(4096)
        256
    """

    tokens: int

    def __post_init__(self):
        check_count("tokens", self.tokens, 1, " token")

    def most(self, capacity: int) -> int:
        return min(self.tokens, capacity)

    def count(self, length: Array, head: Array) -> Array:
        return jnp.int32(self.tokens)


@dataclass(frozen=True)
class Ratio(_Counted):
    """A share of the tokens that the cache holds, growing with it.

    Of a short row it is less than the sinks and recent tokens; those are read all the same.

    Example:
        >>> Ratio(0.1).most(4096)
        410
    """

    share: float

    def __post_init__(self):
        _check_share(self.share)

    def most(self, capacity: int) -> int:
        return math.ceil(self.share * capacity)

    def count(self, length: Array, head: Array) -> Array:
        return jnp.ceil(self.share * length.astype(jnp.float32)).astype(jnp.int32)


@dataclass(frozen=True)
class PerHead(_Counted):
    """One number of tokens per key-value head, for example from a calibration.

    Example:
        >>> PerHead((64, 512)).most(4096)
        512
    """

    tokens: tuple[int, ...]

    def __post_init__(self):
        if not isinstance(self.tokens, tuple) or not self.tokens:
            raise ValueError(f"tokens must be a tuple, one number per head; got {self.tokens!r}.")
        for tokens in self.tokens:
            check_count("every one of tokens", tokens, 1, " token")

    @property
    def heads(self) -> int:
        return len(self.tokens)

    def most(self, capacity: int) -> int:
        return min(max(self.tokens), capacity)

    def least(self, capacity: int) -> int:
        return min(min(self.tokens), capacity)

    def count(self, length: Array, head: Array) -> Array:
        return jnp.asarray(self.tokens, jnp.int32)[head]


@dataclass(frozen=True)
class _Estimated:
    """A budget that depends on what the ranking estimates, `most_tokens` at the most."""

    needs_mass: ClassVar[bool] = True
    compares_heads: ClassVar[bool] = False

    share: float
    most_tokens: int = 4096

    @property
    def heads(self) -> int | None:
        return None

    def __post_init__(self):
        _check_share(self.share)
        check_count("most_tokens", self.most_tokens, 1, " token")

    def most(self, capacity: int) -> int:
        return min(self.most_tokens, capacity)

    def least(self, capacity: int) -> int:
        return self.most(capacity)

    def count(self, length: Array, head: Array) -> Array:
        return jnp.int32(self.most_tokens)


@dataclass(frozen=True)
class MassTarget(_Estimated):
    """The fewest tokens that hold a share of the softmax, as far as the system can estimate it.

    Whole units are taken until their estimated shares, with that of the sinks and recent tokens,
    reach `share` for every query head that reads them; `most_tokens` bounds what is read and
    decides the time of a step. Hashes (HATA) promise more than they hold on peaked keys
    (tests/attention/sparse/test_sparse_targets.py).

    Example:
        >>> MassTarget(0.9, most_tokens=2048).most(65536)
        2048
    """

    def selected(self, ranked: Ranked) -> Array:
        assert ranked.shares is not None  # this budget needs the mass
        assert ranked.forced_share is not None
        before = ranked.forced_share[:, None] + jnp.cumsum(ranked.shares, axis=1) - ranked.shares
        return jnp.where((before < self.share).any(0), ranked.sizes, 0).sum(dtype=jnp.int32)


@dataclass(frozen=True)
class Threshold(_Estimated):
    """Every token whose estimated share of some head's softmax is at least `share`.

    Heads that select together read also what their common order puts before the last such token.

    Example:
        >>> Threshold(0.001, most_tokens=1000).most(65536)
        1000
    """

    def selected(self, ranked: Ranked) -> Array:
        assert ranked.shares is not None
        each = ranked.shares / jnp.maximum(ranked.sizes, 1)[None].astype(ranked.shares.dtype)
        left = lax.cumsum((each >= self.share).any(0).astype(jnp.int32), reverse=True)
        return jnp.where(left > 0, ranked.sizes, 0).sum(dtype=jnp.int32)


def _check_share(share: float) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"share must be a number; got {share!r}.")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1; got {share}.")
