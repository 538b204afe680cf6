"""What a system of sparse decoding is: an index of the keys, and how a query ranks them.

All methods see one key-value head of one sequence; `protocol.py` spreads them over heads and rows.
Shapes are static, arrays as long as the cache's capacity, and `length` says how much of them is
filled. An index of zeros is that of no tokens. A method that compares the heads of a layer names
their axis, `HEADS`, in a collective such as `lax.pmean`.

The tokens of a head form three parts that never overlap: the first `sinks` and the recent tokens
from `start` on, which every query attends to, and between them the *selectable* tokens, which lie
in units (tokens, pages, clusters) that the system ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_count
from toolkit.attention.sparse.budget import Budget, Ranked

HEADS = "key_value_heads"  # the axis of the heads that the methods of a selector run over


def setting(default: Any) -> Any:
    """A field that is known when compiling."""
    return field(default=default, metadata={"static": True})


class Expanded(NamedTuple):
    """Ranked units as ranked tokens; `is_token` is false where a slot holds none."""

    tokens: Int[Array, "slots"]
    is_token: Bool[Array, "slots"]


class Rest(NamedTuple):
    """The tokens that a step did not attend to: how many, and their means, exactly."""

    count: Float[Array, "sets"]
    key: Float[Array, "sets key"]
    value: Float[Array, "sets value"]


@register_dataclass
@dataclass(frozen=True)
class Selector:
    """A system that ranks tokens; a pytree whose settings are static and whose weights are not.

    Attributes:
        sinks: first tokens, always attended to.
        recent: last tokens, likewise, and at least the newest.

    Example:
        >>> Selector(sinks=2, recent=8).recent_slots(most=256)
        8
    """

    sinks: int = setting(4)
    recent: int = setting(16)

    # What the query heads of one key head do by default; see `decode_step`.
    group: ClassVar[str] = "union"
    # Whether `logits` are an estimate that a budget can rely on.
    estimates_mass: ClassVar[bool] = True
    # Whether the scores of heads are compared as they are, not by each head's softmax.
    compares_scores: ClassVar[bool] = False
    # Whether sinks and recent tokens, which are always attended to, count in that softmax.
    counts_forced: ClassVar[bool] = False
    # Whether `build` needs the queries of the prompt.
    sees_queries: ClassVar[bool] = False
    # Whether `observe` is shown what a step attended to.
    sees_weights: ClassVar[bool] = False

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1, ", for the newest token")

    @property
    def unit(self) -> int:
        """Tokens in a unit that is a run of tokens."""
        return 1

    @property
    def least(self) -> int:
        """Tokens that a step reads whatever the budget: the sinks and the recent ones."""
        return self.sinks + self.recent_slots(0)

    def check_budget(self, budget: Budget, capacity: int, heads: int) -> None:
        """Refuse a budget that this system cannot serve or that is below what it always reads."""
        name = type(self).__name__
        if budget.compares_heads and not (self.compares_scores and self.ranks_tokens):
            raise ValueError(
                f"budget compares the scores of heads token by token, which {name} does not give; "
                f"got {budget}."
            )
        if budget.needs_mass and not self.estimates_mass:
            raise ValueError(
                f"budget must be a number of tokens: {name} does not estimate what share of the "
                f"softmax a token holds; got {budget}."
            )
        if budget.heads not in (None, heads):
            raise ValueError(f"budget must be for {heads} key-value heads; got {budget}.")
        if budget.least(capacity) < min(self.least, capacity):
            raise ValueError(
                f"budget must be at least {self.least} tokens for {name}, which always reads "
                f"{self.sinks} sinks and up to {self.recent_slots(0)} recent tokens; "
                f"got {budget}, {budget.least(capacity)} of {capacity} tokens."
            )

    @property
    def ranks_tokens(self) -> bool:
        """Whether unit i is token i."""
        return self.unit == 1 and type(self).expand is Selector.expand

    def build(
        self, keys: Float[Array, "capacity key"], values: Float[Array, "capacity value"], length
    ) -> Any:
        """The index of the first `length` tokens.

        If it `sees_queries`, a fourth argument has them, scaled [group, capacity, key].
        """
        return ()

    def update(self, index: Any, k: Float[Array, "key"], v: Float[Array, "value"], position) -> Any:
        """The index with one more token at `position`."""
        return index

    def observe(self, index: Any, log_weights: Float[Array, "group capacity"]) -> Any:
        """The index after a step: logarithms of its softmax, -inf for a token it did not read."""
        return index

    def is_due(self, index: Any, length) -> Bool[Array, ""] | None:
        """Whether `refresh` should run; None for a system that has nothing to refresh."""
        return None

    def refresh(self, index: Any, keys: Float[Array, "capacity key"], values: Any, length) -> Any:
        """The index after maintenance that runs once in many steps."""
        return index

    def scores(
        self, index: Any, keys: Float[Array, "capacity key"], q: Float[Array, "group key"], length
    ) -> Float[Array, "group units"]:
        """The score of every unit for every query head; `q` is scaled."""
        raise NotImplementedError

    def logits(
        self, index: Any, q: Float[Array, "group key"], scores: Float[Array, "group units"]
    ) -> Float[Array, "group units"] | None:
        """Estimated logarithm of every unit's sum of exponentials; None if scores say nothing."""
        return scores

    def together(
        self, index: Any, q: Float[Array, "group key"], length, start, recent_slots: int,
        reduce: Callable[[Array], Array],
    ) -> Float[Array, "1 units"] | None:  # fmt: skip
        """Scores for a group that reads together, if found without those of every head.

        `reduce` makes one row of the heads' logarithms of shares [group, any]; of at most
        `recent_slots` tokens from `start` on no share is counted.
        """
        return None

    def start(self, index: Any, length, count) -> Int[Array, ""]:
        """The first recent token; `count` tokens may be attended to, 0 if the query decides."""
        first = jnp.maximum(length - self.recent, 0)
        return first - first % self.unit

    def recent_slots(self, most: int) -> int:
        """The most recent tokens there can be; `most` is that of a head, 0 if the query decides."""
        return self.recent + self.unit - 1

    def least_recent(self, most: int) -> int:
        """The fewest recent tokens of a long row, likewise."""
        return self.recent

    def ranked_units(self, slots: int, units: int) -> int:
        """How many units to rank so that they fill so many slots."""
        return min(-(-slots // self.unit) + 1, units)

    def sizes(self, index: Any, units: Int[Array, "ranked"], start) -> Int[Array, "ranked"]:
        """Selectable tokens of some units."""
        first = jnp.maximum(units * self.unit, self.sinks)
        last = jnp.minimum((units + 1) * self.unit, start)
        return jnp.maximum(last - first, 0)

    def expand(self, index: Any, units: Int[Array, "ranked"], start, slots: int) -> Expanded:
        """The tokens of ranked units, in that order."""
        tokens = units[:, None] * self.unit + jnp.arange(self.unit, dtype=jnp.int32)[None]
        tokens = tokens.reshape(-1)
        return Expanded(tokens, (tokens >= self.sinks) & (tokens < start))

    def suffices(
        self, budget: Budget, ranked: Ranked, index: Any, keys: Float[Array, "capacity key"],
        q: Float[Array, "group key"], tokens: Int[Array, "slots"],
    ) -> Int[Array, ""]:  # fmt: skip
        """How many ranked tokens satisfy a budget that asks for a mass."""
        return budget.selected(ranked)

    def tail(
        self, index: Any, q: Float[Array, "group key"], logits: Float[Array, "group units"] | None,
        is_taken: Bool[Array, "sets units"], rest: Rest,
    ) -> tuple[Float[Array, "group value"], Float[Array, "group"]]:  # fmt: skip
        """Estimate the output of attention to the rest, and its residual.

        The output is the mean value of the rest. The residual sums the estimates of the units not
        taken; without estimates, it is that of as many keys equal to their mean, which is never too
        large, since exp is convex.
        """
        value = jnp.broadcast_to(rest.value, (q.shape[0], rest.value.shape[1]))
        if logits is None:
            lse = jnp.log(rest.count) + (q * rest.key).sum(axis=1)
        else:
            lse = jax.nn.logsumexp(jnp.where(is_taken, -jnp.inf, logits), axis=1)
        return value, jnp.where(rest.count > 0, lse, -jnp.inf)

    def index_bytes(self, index: Any, q: Float[Array, "group key"], length) -> Int[Array, ""]:
        """Bytes of the index that a step reads."""
        return jnp.int32(0)

    def estimate_bytes(self, index: Any, q: Float[Array, "group key"], length) -> Int[Array, ""]:
        """Further bytes that a budget reads if it asks for a mass."""
        return jnp.int32(0)

    def tail_bytes(self, index: Any, q: Float[Array, "group key"], length) -> Int[Array, ""]:
        """Further bytes that the tail reads: the sums of all keys and values."""
        return jnp.int32(8 * q.shape[1])


@register_dataclass
@dataclass(frozen=True)
class HalfRecent(Selector):
    """A system half of whose budget goes to the most recent tokens."""

    def start(self, index: Any, length, count) -> Array:
        recent = jnp.maximum((count - self.sinks) // 2, self.recent)
        return jnp.maximum(length - recent, 0)

    def recent_slots(self, most: int) -> int:
        return max((most - self.sinks) // 2, self.recent)

    def least_recent(self, most: int) -> int:
        return self.recent_slots(most)
