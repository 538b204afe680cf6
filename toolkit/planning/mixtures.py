"""A mixture of experts on one chip: its share of the work, and the layer itself in `shard_map`."""

import functools
import math
from typing import Any

from jax import Array

from toolkit.experts.products import Weights
from toolkit.looped import LoopedConfig
from toolkit.parallel.experts import Traffic, dispatch_traffic
from toolkit.parallel.experts.dispatch import dispatched_here, expert_slots
from toolkit.parallel.experts.ways import Way
from toolkit.planning.strategy import Strategy

SCALE_BYTES = 4 / 128  # of a number sent in float8


def routed_rows(config: LoopedConfig, strategy: Strategy, tokens: int) -> int:
    """Rows that a chip's experts receive for `tokens` of each chip, at an even load."""
    moe = config.moe
    if strategy.expert > 1 and strategy.dispatch == "all_to_all":
        return moe.experts * slots(config, strategy, tokens)
    return tokens * moe.chosen


def held_rows(config: LoopedConfig, strategy: Strategy, tokens: int) -> int:
    """Rows of the arrays on which a chip's experts work: with "gather" the pairs of all chips, and
    with "ragged" as many as could come."""
    moe, chips = config.moe, strategy.expert
    if strategy.dispatch in ("all_to_all", "by_host"):
        return routed_rows(config, strategy, tokens)
    each = moe.chosen if strategy.dispatch == "gather" else min(moe.chosen, moe.experts // chips)
    return chips * tokens * each


def slots(config: LoopedConfig, strategy: Strategy, tokens: int) -> int:
    """Tokens that an expert takes from each chip, with "all_to_all"."""
    moe = config.moe
    return min(tokens, expert_slots(tokens * moe.chosen, moe.experts, strategy.capacity))


def dispatch_of(config: LoopedConfig, strategy: Strategy, tokens: int, parts: int) -> list[Traffic]:
    """The collectives of one mixture, forward, for `tokens` of each chip; `parts` are the hosts
    over which its experts are spread, or the chips of one host."""
    moe, capacity = config.moe, strategy.capacity
    if strategy.expert == 1:
        return []
    if strategy.dispatch == "by_host":
        sent = tokens * config.width * remote_copies(config, parts)
        size = config.compute_dtype.itemsize
        there = 1 + SCALE_BYTES if strategy.products != "bfloat16" else size
        return [Traffic("all-to-all", 1, round(sent * each)) for each in (there, size)]
    return dispatch_traffic(
        tokens, config.width, moe.experts, moe.chosen, strategy.expert,
        dispatch=strategy.dispatch,  # pyright: ignore
        capacity=capacity if strategy.dispatch == "all_to_all" else None,
        itemsize=config.compute_dtype.itemsize,
    )  # fmt: skip


def remote_copies(config: LoopedConfig, parts: int) -> float:
    """Copies of a token that leave for other parts of those over which experts are spread, at an
    even load: each part gets one, whichever of its experts are chosen.

        (n - 1) / n  *  m (1 - P(none of k in a part)),  m = n M / G

    with n parts, M of G groups of experts chosen first, and k experts of those groups.
    """
    moe = config.moe
    some = max(1.0, parts * moe.chosen_groups / moe.groups)  # in which experts are chosen
    count = moe.experts * moe.chosen_groups / moe.groups
    own = count / some  # experts of a part
    none = math.prod(max(0.0, 1 - own / (count - at)) for at in range(moe.chosen))
    return (parts - 1) / parts * some * (1 - none)


def dropped_share(config: LoopedConfig, strategy: Strategy, tokens: int) -> float:
    """Share of the pairs of a token and an expert that find their expert full, at an even load:
    the number of pairs per expert and chip is then nearly Poisson's."""
    if strategy.expert == 1 or strategy.dispatch != "all_to_all":
        return 0.0
    mean, room = tokens * config.moe.chosen / config.moe.experts, slots(config, strategy, tokens)
    # E[max(X - C, 0)] = mean - C + sum of (C - x) P(x) below C.
    below = (room - x for x in range(room))
    chances = (math.exp(x * math.log(mean) - mean - math.lgamma(x + 1)) for x in range(room))
    left = mean - room + sum(a * b for a, b in zip(below, chances, strict=True))
    return max(0.0, left / mean)


def mix_folded(layer: Any, strategy: Strategy, x: Array) -> Array:
    """A "moe" layer for this chip's tokens, whose weights are those of this chip's experts; inside
    `jax.shard_map`."""
    return layer.routed(x, apply=functools.partial(_experts, strategy, layer.options.experts))[0]


def _experts(strategy, count, x, routing, gate, up, down, *, activation, **biases):
    tokens, chosen = math.prod(x.shape[:-1]), routing.experts.shape[-1]
    own = min(tokens, expert_slots(tokens * chosen, count, strategy.capacity))
    way = Way(strategy.expert_axes, None, False, own, activation)
    weights = Weights(gate, up, down, **biases)
    return dispatched_here(x, routing, weights, strategy.dispatch, way).outputs
