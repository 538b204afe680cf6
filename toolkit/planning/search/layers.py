"""Galvatron's search: decision trees of strategies, and a knapsack over the layers.

Source: Miao et al., "Galvatron", 2022 (arXiv:2211.13878); Wang et al., "Improving Automatic
Parallel Training via Balanced Memory Workload Optimization", 2023 (arXiv:2307.02031).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from toolkit._checks import checked

PARADIGMS = ("data", "fsdp", "tensor")
MOST_CELLS = 1 << 28  # of a knapsack's table: layers x budget x strategies


@checked
def decision_trees(
    chips: int, *, mixed_data: bool = False, recompute: bool = True
) -> list[tuple[tuple[tuple[str, int], ...], int, bool]]:
    """All ways to distribute a train step over chips: ordered paradigms, pipeline stages,
    recomputation.

    Pipelines come first and divide the chips into groups; in a group follow some of data, fsdp and
    tensor, with degrees of at least two whose product is the group's size. The last of them gets
    the fastest links.

    Args:
        chips: number of chips, a power of two.
        mixed_data: also trees with both data and fsdp, which fsdp alone dominates.
        recompute: also include every tree with recomputed layers.

    Returns:
        Triples ((paradigm, degree), ...), pipeline degree, whether layers are recomputed.

    Source: Galvatron, section 3.1.

    Example:
        >>> len(decision_trees(8)), len(decision_trees(8, recompute=False))
        (44, 22)
        >>> len(decision_trees(8, mixed_data=True))
        68
    """
    if chips < 1 or chips & (chips - 1) or chips > 1 << 20:
        near = 1 << max(0, min(20, round(np.log2(max(1, min(chips, 1 << 20))))))
        raise ValueError(f"chips must be a power of two up to 2^20; got {chips}, nearest: {near}")

    def orders(left: int, free: tuple[str, ...]):
        if left == 1:
            yield ()
            return
        for name in free:
            others = tuple(other for other in free if other != name)
            if not mixed_data and name != "tensor":
                others = tuple(other for other in others if other == "tensor")
            degree = 2
            while degree <= left:
                yield from (((name, degree), *rest) for rest in orders(left // degree, others))
                degree *= 2

    found, pipeline = [], 1
    while pipeline <= chips:
        for tree in orders(chips // pipeline, PARADIGMS):
            found += [(tree, pipeline, again) for again in ((False, True)[: 1 + recompute])]
        pipeline *= 2
    return found


class Assignment(NamedTuple):
    """A strategy for every layer.

    Attributes:
        seconds: of all layers, with changes of strategy between them.
        choices: index of each layer's strategy.

    Example:
        >>> assign_layers([[6, 4, 2]] * 4, [[1, 1.5, 2.5]] * 4, budget=24)
        Assignment(seconds=4.0, choices=(0, 0, 0, 0))
    """

    seconds: float
    choices: tuple[int, ...]


@checked
def assign_layers(
    memory: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    *,
    budget: int,
    switch: Sequence[Sequence[float]] | None = None,
) -> Assignment | None:
    """Choose the fastest strategy per layer within a memory budget (a knapsack).

        f_i[e, s] = seconds[i][s] + min_s' (f_{i-1}[e - memory[i][s], s'] + switch[s'][s])

    Args:
        memory: of every layer under every strategy, in whole units.
        seconds: of every layer under every strategy.
        budget: units available.
        switch: seconds from one strategy (row) to another (column); None: no time.

    Returns:
        An `Assignment`, or None if nothing fits.

    Cost: layers x budget x strategies^2, vectorised: milliseconds for 48 layers, 256 units and ten
        strategies.

    Source: Galvatron, section 3.3, and its released code.

    Example:
        >>> assign_layers([[6, 4, 2]] * 4, [[1, 1.5, 2.5]] * 4, budget=8)
        Assignment(seconds=10.0, choices=(2, 2, 2, 2))
    """
    sizes, times, changes = _tables(memory, seconds, switch, budget)
    layers, strategies = sizes.shape
    best, same = np.zeros((budget + 1, strategies)), np.zeros((strategies, strategies))
    came = np.zeros((layers, budget + 1, strategies), np.int16)
    for layer in range(layers):
        # The first layer switches from nothing.
        step = best[:, :, None] + (changes if layer else same)
        came[layer] = step.argmin(axis=1)
        cheapest = step.min(axis=1)
        best = np.full((budget + 1, strategies), np.inf)
        for s in range(strategies):
            need = sizes[layer, s]
            if need <= budget:
                best[need:, s] = cheapest[: budget + 1 - need, s] + times[layer, s]
    strategy, left = int(best[budget].argmin()), budget
    total = float(best[budget, strategy])
    if not np.isfinite(total):
        return None
    choices = []
    for layer in reversed(range(layers)):
        choices.append(strategy)
        left -= int(sizes[layer, strategy])
        strategy = int(came[layer, left, strategy])
    return Assignment(total, tuple(reversed(choices)))


def _tables(memory, seconds, switch, budget):
    try:
        sizes, times = np.asarray(memory, np.int64), np.asarray(seconds, np.float64)
        count = sizes.shape[-1] if sizes.ndim else 0
        changes = np.zeros((count, count)) if switch is None else np.asarray(switch, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("memory, seconds and switch must be tables of numbers") from None
    if sizes.ndim != 2 or 0 in sizes.shape or times.shape != sizes.shape:
        raise ValueError(
            "memory and seconds must be tables [layers, strategies]; "
            f"got shapes {sizes.shape} and {times.shape}"
        )
    if changes.shape != (sizes.shape[1],) * 2:
        raise ValueError(f"switch must be {(sizes.shape[1],) * 2}; got {changes.shape}")
    if budget < 0 or (sizes < 0).any() or not (times >= 0).all() or not (changes >= 0).all():
        raise ValueError("budget, memory, seconds and switch must not be negative")
    if (budget + 1) * sizes.size > MOST_CELLS:
        raise ValueError(f"budget {budget} x {sizes.size} is more than {MOST_CELLS} cells")
    return sizes, times, changes
