"""Placements of the few expensive layers among the many cheap ones, as strings.

Each placement has one word per layer, and has two uses.

As `LoopedConfig.pattern` its words are kinds of layers: four "gdn" to one "full". Layers of
different kinds have different parameters, so every loop runs the same pattern.

As a part of `LoopedConfig.windows` its words are windows of layers that are all "full": four of
"512" to one "full". A window has no parameters, so it may differ between loops (`by_loop`) and even
between steps (`random_placement`, `vote`).

    interleave        one expensive layer after every few cheap ones
    bookend           half of the expensive layers first, half last
    front_loaded      all of them first
    back_loaded       all of them last
    random_placement  anywhere
    by_loop           one placement per loop, joined for `LoopedConfig.windows`
    vote              logits averaged over several random placements of the windows

All place as many expensive layers as `interleave` of the same ratio, so that they compare at equal
cost.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.looped.loops.depth import reconfigured
from toolkit.looped.model import LoopedLM

MOST_LAYERS = 100_000
VOTES = 5
"""Placements LT2 averages over in evaluation."""


@checked
def interleave(
    layers: int, cheap: str = "gdn", expensive: str = "full", *, ratio: tuple[int, int] = (4, 1)
) -> str:
    """Repeat `ratio[0]` cheap layers and `ratio[1]` expensive ones, and cut at the end.

    With 20 layers and 4 to 1, the layers 5, 10, 15 and 20 are expensive.

    Args:
        layers: how many layers to place.
        cheap: the word of the many layers.
        expensive: the word of the few layers.
        ratio: cheap to expensive layers.

    Returns:
        One word per layer.

    Source: LT2, hybrid models; 4 to 1 is its default.

    Example:
        >>> interleave(6, ratio=(2, 1))
        'gdn gdn full gdn gdn full'
    """
    many, few = ratio
    if not 1 <= layers <= MOST_LAYERS or min(ratio) < 0 or many + few == 0:
        raise ValueError(
            f"layers {layers}, ratio {ratio}: one layer, at most {MOST_LAYERS:,}, and one part are "
            "needed."
        )
    words = [cheap] * many + [expensive] * few
    return " ".join(words[layer % len(words)] for layer in range(layers))


@checked
def bookend(
    layers: int, cheap: str = "gdn", expensive: str = "full", *, ratio: tuple[int, int] = (4, 1)
) -> str:
    """Half of the expensive layers at each end, an odd one at the front. Arguments as `interleave`.

    Source: LT2, placement study at 1.3B: slightly better than interleaving.

    Example:
        >>> bookend(6, ratio=(2, 1))
        'full gdn gdn gdn gdn full'
    """
    few = _budget(layers, ratio)
    first = -(-few // 2)
    return _placed(layers, [*range(first), *range(layers - few + first, layers)], cheap, expensive)


@checked
def front_loaded(
    layers: int, cheap: str = "gdn", expensive: str = "full", *, ratio: tuple[int, int] = (4, 1)
) -> str:
    """The expensive layers first. Arguments as `interleave`.

    Source: LT2, placement study at 1.3B: worse than interleaving.

    Example:
        >>> front_loaded(5)
        'full gdn gdn gdn gdn'
    """
    return _placed(layers, range(_budget(layers, ratio)), cheap, expensive)


@checked
def back_loaded(
    layers: int, cheap: str = "gdn", expensive: str = "full", *, ratio: tuple[int, int] = (4, 1)
) -> str:
    """The expensive layers last. Arguments as `interleave`.

    Source: LT2, placement study at 1.3B: the worst of the four.

    Example:
        >>> back_loaded(5)
        'gdn gdn gdn gdn full'
    """
    few = _budget(layers, ratio)
    return _placed(layers, range(layers - few, layers), cheap, expensive)


@checked
def random_placement(
    layers: int, cheap: str, expensive: str = "full", *, seed: int, ratio: tuple[int, int] = (4, 1)
) -> str:
    """The expensive layers at random places. Arguments as `interleave`.

    Args:
        seed: the same seed draws the same placement; LT2 takes seed + step in training.

    Source: LT2, random layouts.

    Example:
        >>> sorted(random_placement(5, "512", seed=0).split())
        ['512', '512', '512', '512', 'full']
    """
    few = _budget(layers, ratio)
    chosen = np.random.default_rng(seed).choice(layers, few, replace=False)
    return _placed(layers, chosen, cheap, expensive)


@checked
def by_loop(parts: Sequence[str]) -> str:
    """Join one placement per loop into `LoopedConfig.windows`.

    by_loop(["full", "512", "256", "128"]) is LT2's coarse to fine, the reverse its fine to coarse.

    Args:
        parts: for each loop, a placement or one word for all layers.

    Returns:
        The parts joined by "->".

    Source: LT2, loop-level hybrids.

    Example:
        >>> by_loop(["full", "512", "256"])
        'full -> 512 -> 256'
    """
    return " -> ".join(parts)


@checked
def vote(
    model: LoopedLM, tokens: Int[Array, "batch time"], placements: Sequence[str]
) -> Float[Array, "batch time vocabulary"]:
    """Average a model's logits over several placements of its windows.

        logits = 1/K sum_k logits(windows = placements[k])

    Args:
        model: a model whose "full" layers get these windows; the parameters are the same in every
            vote.
        tokens: whole numbers below the vocabulary.
        placements: `LoopedConfig.windows` of each vote, for instance VOTES draws of
            `random_placement`.

    Returns:
        float32 logits [batch, time, vocabulary].

    Cost: a forward pass per vote, each compiled separately.

    Source: LT2, random layouts: in evaluation logits are averaged over five.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> vote(model, jnp.zeros((1, 5), int), ["full 2", "2 full"]).shape
        (1, 5, 256)
    """
    if not placements:
        raise ValueError("placements is empty; a vote needs at least one.")
    votes = [with_windows(model, windows)(tokens) for windows in placements]
    return sum(votes[1:], start=votes[0]) / len(votes)


@checked
def with_windows(model: LoopedLM, windows: str | None) -> LoopedLM:
    """Give a model other windows.

    Args:
        model: not changed.
        windows: the new `LoopedConfig.windows`.

    Returns:
        A model that shares the arrays; programs that take it are compiled anew.

    Source: LT2, random layouts.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(loops=2, width=16, heads=2), rngs=nnx.Rngs(0))
        >>> with_windows(model, "full -> 4").config.loop_windows
        ((None,), (4,))
    """
    return reconfigured(model, windows=windows)


def _budget(layers, ratio):
    return interleave(layers, "cheap", "expensive", ratio=ratio).split().count("expensive")


def _placed(layers, positions, cheap, expensive):
    words = [cheap] * layers
    for position in positions:
        words[position] = expensive
    return " ".join(words)
