"""How the arrays of a train step are cut over chips: the degrees of every kind of parallelism."""

import dataclasses
import math
from typing import Self

from toolkit._checks import check_choice, check_fields

DISPATCHES = ("all_to_all", "gather", "ragged", "by_host")
# No cluster is larger, and the bound keeps every search short.
MOST_CHIPS = 1 << 20
MOST_CAPACITY = 1024
DEGREES = ("data", "fsdp", "context", "tensor", "pipeline")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """A division of `chips` = data x fsdp x context x tensor x pipeline, the innermost "tensor".

    Attributes:
        data: replicas of the parameters; their gradients are all-reduced (DDP).
        fsdp: shards of parameters, gradients and optimiser state (ZeRO-3); also cuts the batch.
        tensor: shards of heads, hidden units and vocabulary, the residual stream cut along time
            (Megatron's tensor and sequence parallelism).
        context: shards of every sequence, each with an early and a late part; keys and values are
            gathered for attention. For parameters its chips belong to `fsdp`, or with a sharded
            optimiser and without `fsdp` to `data`. Modelled only.
        expert: shards of the experts, over the innermost chips whatever else those cut ("folding"):
            1, or `tensor` times some of `fsdp`, or of `data` if that is all of `fsdp`. What is left
            of `fsdp` cuts each expert further; what is left of `data` replicates it. A part of an
            axis is modelled only.
        pipeline: stages of consecutive layers.
        shard_optimizer: cut the optimiser's state over `data` as well (ZeRO-1).
        shard_gradients: and the gradients, which every microbatch scatters (ZeRO-2); modelled only.
        dispatch: how tokens reach the chips of their experts, as in
            `toolkit.parallel.experts.sharded_mixture`: "all_to_all", "gather" or "ragged"; or,
            modelled only, "by_host": once to every host that has some of its experts, and from
            there over the host's links (DeepEP), in float8 if products are, and kept for the
            backward pass.
        capacity: most tokens per expert, relative to an even load, with "all_to_all"; tokens beyond
            are dropped.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    shard_optimizer: bool = False
    shard_gradients: bool = False
    dispatch: str = "all_to_all"
    capacity: float = 1.25

    def _check_degrees(self, *more: str) -> None:
        check_fields(self)
        for name in (*DEGREES, *more):
            if not 1 <= getattr(self, name) <= MOST_CHIPS:
                raise ValueError(f"{name} must be 1 to {MOST_CHIPS:,}; got {getattr(self, name)}")
        if self.shard_gradients and not self.shard_optimizer:
            raise ValueError(
                "shard_gradients wants shard_optimizer (ZeRO-2 cuts both); got False, nearest that "
                "works: True"
            )

    def _check_experts(self) -> None:
        cut = self.for_parameters
        if self.expert > 1 and (self.expert % cut.tensor or cut._expert_parts is None):
            nearest = min(self.expert_degrees, key=lambda degree: abs(degree - self.expert))
            raise ValueError(
                f"expert must be a product of the innermost of data {cut.data} x fsdp {cut.fsdp} "
                f"x tensor {cut.tensor}; got {self.expert}, nearest that works: {nearest}"
            )
        check_choice("dispatch", self.dispatch, DISPATCHES)
        if self.dispatch != "all_to_all" and self.expert == 1:
            raise ValueError(
                f"dispatch {self.dispatch!r} sends tokens to other chips, and expert is 1; "
                "nearest that works: 'all_to_all'"
            )
        if not 0 < self.capacity <= MOST_CAPACITY:
            raise ValueError(f"capacity must lie in (0, {MOST_CAPACITY}]; got {self.capacity}")

    def changed(self, **changes) -> Self:
        """A copy with other fields, unchecked because a search makes thousands."""
        division = object.__new__(type(self))
        division.__dict__.update(self.__dict__, **changes)
        return division

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod((self.data, self.fsdp, self.context, self.tensor, self.pipeline))

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch."""
        return self.data * self.fsdp

    @property
    def for_parameters(self) -> Self:
        """The same as parameters see it: the chips of "context" have different shards of them, or
        with a sharded optimiser and no "fsdp" the same."""
        if self.context == 1:
            return self
        axis = "data" if self.shard_optimizer and self.fsdp == 1 else "fsdp"
        return self.changed(context=1, **{axis: getattr(self, axis) * self.context})

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """The numbers of shards that experts can have without cutting an axis in two."""
        cut = self.for_parameters
        inner = cut.tensor, cut.tensor * cut.fsdp, cut.tensor * cut.fsdp * cut.data
        return tuple(sorted({1, *inner}))

    @property
    def _expert_parts(self) -> dict[str, int] | None:
        """Of each axis, how many parts cut the experts, the innermost axis first; None: none."""
        found, left = {}, self.expert
        for name in ("tensor", "fsdp", "data"):
            size = getattr(self, name)
            found[name] = math.gcd(left, size)
            left //= found[name]
            if left > 1 and found[name] < size:
                return None
        return None if left > 1 else found

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that cut experts, the outermost first."""
        found = self._expert_parts or {}
        return tuple(name for name in reversed(found) if found[name] > 1)

    @property
    def of_experts(self) -> Self:
        """The same as the experts' weights see it: `tensor` cuts their number."""
        if self.expert == 1:
            return self
        parts = self._expert_parts or {}
        left = {name: getattr(self, name) // parts[name] for name in ("fsdp", "data")}
        return self.changed(tensor=self.expert, **left)

    @property
    def degree_words(self) -> str:
        """The degrees above 1 in words."""
        cuts = [f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        return " x ".join(cuts) or "one chip"

    @property
    def expert_words(self) -> str:
        """Shards of the experts, and how tokens reach them, in words."""
        ways = {"all_to_all": f"capacity {self.capacity:g}", "gather": "gathered"}
        return f"expert {self.expert} {ways.get(self.dispatch, self.dispatch)}"

    @property
    def modelled_only(self) -> str:
        """What of it `train_program` does not build, in words; empty if it builds all."""
        if self.context > 1:
            return f"context {self.context}"
        if self.shard_gradients:
            return "shard_gradients"
        if self.dispatch == "by_host":
            return f"dispatch {self.dispatch!r}"
        if self.expert not in self.expert_degrees:
            return f"expert {self.expert}, which cuts an axis in two,"
        return ""
