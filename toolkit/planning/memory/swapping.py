"""What is kept, swapped to the host or computed anew, tensor by tensor.

    min sum over recomputed r_i + stall
    with  sum over kept b_i <= memory,  sum over swapped b_i <= host
    and   stall >= sum over swapped b_i / link - hidden

Every tensor that the forward pass leaves for the backward pass has one of three fates. What is
swapped crosses the link twice, each way behind the other layers' computing; only what exceeds that
is waited for. The program is solved exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.memory.categories import SWIGLU_KEPT, layer_kinds
from toolkit.planning.memory.sizes import FLOAT32, channels
from toolkit.planning.predict import Prediction, predict

NEVER = 1e9  # seconds: cannot be computed anew


class ActivationTensor(NamedTuple):
    """A tensor between the forward and the backward pass.

    Attributes:
        name: such as "attention output".
        size: bytes of one copy.
        again: seconds to compute one copy anew.
        copies: layers that have it.

    Example:
        >>> ActivationTensor("gate", 1e9, 0.02).copies
        1
    """

    name: str
    size: float
    again: float
    copies: int = 1


class Fates(NamedTuple):
    """What becomes of each tensor.

    Attributes:
        tensors: as given.
        counts: copies (kept, swapped, computed anew), per tensor.
        seconds: beyond a step that keeps everything.

    Example:
        >>> given = [ActivationTensor("gate", 4.0, 1.0)]
        >>> keep_swap_recompute(given, memory=4, host=0, link=1, hidden=0).counts
        ((1, 0, 0),)
    """

    tensors: tuple[ActivationTensor, ...]
    counts: tuple[tuple[int, int, int], ...]
    seconds: float

    @property
    def bytes(self) -> tuple[float, ...]:
        """Bytes kept, swapped and computed anew."""
        pairs = list(zip(self.tensors, self.counts, strict=True))
        return tuple(sum(each.size * count[way] for each, count in pairs) for way in range(3))

    def __str__(self) -> str:
        rows = [("tensor", "size", "kept", "swapped", "anew")]
        for each, count in zip(self.tensors, self.counts, strict=True):
            kept, swapped, anew = map(str, count)
            rows.append((each.name, in_words(each.size, "bytes"), kept, swapped, anew))
        kept, swapped, _ = (in_words(each, "bytes") for each in self.bytes)
        return (
            f"{text_table(rows, '<>>>>')}\n{kept} kept, {swapped} swapped, "
            f"{in_words(self.seconds, 'seconds')} more than keeping all (MEMO; modelled)"
        )


@checked
def keep_swap_recompute(
    tensors: Sequence[ActivationTensor], *, memory: float, host: float, link: float, hidden: float
) -> Fates:
    """The cheapest fate of every copy of every tensor within the memory of chip and host.

        min sum_i r_i y_i + stall
        with  x_i + y_i + k_i = copies,  stall >= sum_i b_i x_i / link - hidden

    Args:
        tensors: what the forward pass leaves.
        memory: bytes for what is kept.
        host: bytes of host memory per chip.
        link: bytes per second to the host, one way; both ways work at the same time.
        hidden: seconds of computing behind which transfers of one way hide.

    Returns:
        The `Fates`.

    Raises:
        ValueError: a number is out of range, or nothing fits; says why.

    Source: "MEMO", 2024, arXiv:2407.12117; the program over whole tensors is ours.

    Example:
        >>> seconds = {"mixed": 9.0, "norm": 1.0, "up": 4.0}
        >>> given = [ActivationTensor(name, 8.0, again) for name, again in seconds.items()]
        >>> keep_swap_recompute(given, memory=8, host=8, link=2.0, hidden=4.0).counts
        ((1, 0, 0), (0, 0, 1), (0, 1, 0))
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not tensors or min(each.size for each in tensors) <= 0:
        raise ValueError("tensors must be one or more, of more than 0 bytes")
    if min(memory, host, hidden, *(each.again for each in tensors)) < 0 or not link > 0:
        raise ValueError(
            f"want memory, host, hidden and every again of at least 0 and link above 0; got "
            f"{memory}, {host}, {hidden} and {link}"
        )
    count, unit = len(tensors), max(each.size for each in tensors)  # solvers want numbers near 1
    size = np.array([each.size / unit for each in tensors])
    again = np.array([min(each.again, NEVER) for each in tensors])
    copies: Any = np.array([each.copies for each in tensors], float)
    is_possible = np.array([each.again < NEVER for each in tensors])
    nothing, each = np.zeros(count), np.eye(count)
    # Variables: swapped x, computed anew y, and the stall.
    most: Any = np.concatenate([copies, copies * is_possible, [np.inf]])
    bounds, least = Bounds(0, most), size @ copies - memory / unit
    found = milp(
        np.concatenate([nothing, np.where(is_possible, again, 0), [1.0]]),
        constraints=[
            LinearConstraint(np.hstack([each, each, nothing[:, None]]), 0, copies),
            LinearConstraint(np.concatenate([size, size, [0]]), float(least), np.inf),
            LinearConstraint(np.concatenate([size, nothing, [0]]), 0, host / unit),
            LinearConstraint(np.concatenate([size * unit / link, nothing, [-1]]), -np.inf, hidden),
        ],
        integrality=np.append(np.ones(2 * count), 0),
        bounds=bounds,
    )
    if found.x is None:
        raise ValueError(f"memory: {in_words(memory, 'bytes')} hold no choice ({found.message})")
    x, y = np.round(found.x[:count]), np.round(found.x[count : 2 * count])
    counts = tuple((int(n - a - b), int(a), int(b)) for n, a, b in zip(copies, x, y, strict=True))
    stall = max(0.0, float(size @ x) * unit / link - hidden)
    return Fates(tuple(tensors), counts, float(again @ np.where(is_possible, y, 0)) + stall)


@checked
def plan_swaps(prediction: Prediction, *, host: float, link: float) -> Fates:
    """What a plan's layers keep, swap and compute anew, instead of one rule for all.

        memory = limit - all but activations;  hidden = the forward pass

    Args:
        prediction: of a plan without pipeline stages, of a dense model of softmax layers; what it
            computes anew does not matter.
        host: bytes of host memory per chip.
        link: bytes per second between a chip and its host, one way.

    Returns:
        The `Fates` of every kind of tensor, with the layers as copies. `jax.checkpoint` policies
        with offloading name the same tensors; no compiler has graded them.

    Source: "MEMO", 2024, arXiv:2407.12117.

    Example:
        >>> from toolkit.planning import Strategy, predict
        >>> found = predict("llama-3-8b", "h100:8", Strategy(fsdp=8), batch=64)
        >>> fates = plan_swaps(found, host=2e11, link=5e10)
        >>> fates.bytes[0] < found.memory.activations
        True
    """
    config, where = prediction.config, prediction.cluster
    strategy = prediction.strategy.changed(recompute="none", block_chunks=1)
    kinds = set(layer_kinds(config, strategy))
    if strategy.pipeline > 1 or {kind[:2] for kind in kinds} != {("full", "swiglu")}:
        raise ValueError("prediction: swaps are planned for dense softmax layers without stages")
    whole = predict(
        config, where, strategy, batch=prediction.batch,
        sequence_length=prediction.sequence_length, constants=prediction.constants,
    )  # fmt: skip
    tokens = prediction.batch // (strategy.batch_shards * strategy.microbatches)
    tensors = layer_tensors_kept(whole, tokens * prediction.sequence_length)
    room = prediction.limit - (whole.memory.total - whole.memory.activations)
    if room < 0:
        raise ValueError("prediction: does not fit even if nothing is kept")
    hidden = whole.seconds["forward"] / strategy.microbatches
    return keep_swap_recompute(tensors, memory=room, host=host, link=link, hidden=hidden)


def layer_tensors_kept(whole: Prediction, tokens: int) -> list[ActivationTensor]:
    """What all softmax layers leave of a microbatch, if nothing is computed anew."""
    config, cut, rates = whole.config, whole.strategy.tensor, whole.constants
    chip, size = whole.cluster.chip, config.compute_dtype.itemsize
    queries, keys = (each // cut for each in channels(config, "full"))
    width, hidden = config.width, config.feed_forward_size // cut
    copies = len(config.layers) * config.loops

    def products(flops: float) -> float:
        return flops / chip.flops_per_second / rates.matmul

    def moved(read_and_written: float) -> float:
        return read_and_written / chip.bytes_per_second / rates.elementwise

    seen = 4 * tokens * whole.sequence_length * queries / 2  # causal
    stream = tokens * width * size // cut
    norms = 8 * FLOAT32 * tokens * width // cut
    unit = tokens * hidden * size
    rotated, projected = tokens * queries * size, tokens * (queries + 2 * keys) * size
    gated = (SWIGLU_KEPT - 2) * unit
    return [
        ActivationTensor("input", stream, NEVER, copies),
        ActivationTensor("norms", norms, moved(2 * norms), copies),
        ActivationTensor(
            "queries, keys, values",
            projected,
            products(2 * tokens * width * (queries + 2 * keys)),
            copies,
        ),
        ActivationTensor("rotated queries", rotated, moved(2 * rotated), copies),
        ActivationTensor(
            "attention output", rotated, seen / chip.flops_per_second / rates.attention, copies
        ),
        ActivationTensor("gate and up", 2 * unit, products(4 * tokens * width * hidden), copies),
        ActivationTensor("gated", gated, moved(2 * gated), copies),
    ]


@checked
def swapped_share(computing: float, size: float, *, link: float, host: float, layers: int) -> float:
    """The share of a layer's swappable bytes that hides behind computing and fits the host.

        alpha = min(1, link c / B, host / (layers B))

    Args:
        computing: c, seconds of one layer's forward pass.
        size: B, bytes of the layer that may be swapped.
        link: bytes per second to the host.
        host: bytes of host memory per chip.
        layers: of the model.

    Returns:
        The share; the rest is computed anew, token by token.

    Source: "MEMO", 2024, arXiv:2407.12117.

    Example:
        >>> round(swapped_share(0.02 * 32**2 + 32, 16.0 * 32, link=1.0, host=1e9, layers=32), 4)
        0.1025
    """
    if min(computing, host) < 0 or min(size, link, layers) <= 0:
        raise ValueError("want computing and host of at least 0, and size, link, layers above 0")
    return min(1.0, link * computing / size, host / (layers * size))
