"""The fastest strategy on a cluster, the reason, and the cost of the alternatives."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.memory.gpus import usable_bytes
from toolkit.planning.memory.sizes import SOFTMAX
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import model_of, nearest_multiple
from toolkit.planning.predict import Prediction, prediction_of
from toolkit.planning.search.divisions import bases_of
from toolkit.planning.search.own_order import search_order
from toolkit.planning.search.weigh import RUNNERS_UP, Search
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.seconds import Constants, constants_of

# Fastest pipelines whose order of tasks is searched.
SEARCHED = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fastest strategy that fits, and the alternatives.

    Attributes:
        best: its prediction.
        runners_up: the best of other divisions of the chips, fastest first.
        considered: strategies whose memory was predicted.
        fitting: how many of these fit.

    Example:
        >>> found = plan("llama-3-8b", "h100:8", batch=64)
        >>> found.best.fits, found.best.strategy.chips
        (True, 8)
    """

    best: Prediction
    runners_up: tuple[Prediction, ...]
    considered: int
    fitting: int

    def __str__(self) -> str:
        best, rows = self.best, [("", "strategy", "step", "MFU", "per chip", "why not")]
        rows.append(("*", str(best.strategy), *_figures(best), ""))
        rows += [
            ("", str(other.strategy), *_figures(other), why(other, best))
            for other in self.runners_up
        ]
        return (
            f"{self.fitting} of {self.considered} strategies fit {best.cluster.name} with "
            f"{in_words(best.limit, 'bytes')} per chip; modelled\n{text_table(rows, '<<>>><')}\n"
            f"{reason(best)}{links(best)}{attention(best)}"
        )


def _figures(found: Prediction) -> tuple[str, str, str]:
    """Step time, share of the peak and memory, in words."""
    memory = in_words(found.memory.total, "bytes")
    share = in_words(found.utilisation, "share")
    return in_words(found.step_seconds, "seconds"), share, memory


def links(best: Prediction) -> str:
    """Over which links the groups of every degree communicate, in words."""
    found = {
        each.part: best.cluster.link(each.inner, each.degree, each.kind).name
        for each in best.transfers
        if each.degree > 1
    }
    words = "; ".join(f"{part} over {name}" for part, name in found.items())
    return f"\nits groups: {words}" if words else ""


def attention(best: Prediction) -> str:
    """Which kernels the time of softmax attention assumes, in words; of measured rates nothing."""
    if best.cluster.is_measured or not {*SOFTMAX, "mla"} & {*best.config.pattern.split()}:
        return ""
    kernels = best.constants.attention_kernels.replace("flash-", "FlashAttention-")
    if best.cluster.chip.name.startswith("TPU"):
        kernels = "splash attention"
    return (
        f"\nits attention: as fast as {kernels} in published runs; "
        "`toolkit train` runs plain XLA, which is slower, where no kernel is its default"
    )


def reason(best: Prediction) -> str:
    """What limits the best plan, in words."""
    parts = sorted(best.seconds.items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{name} {in_words(value / best.step_seconds, 'share')}" for name, value in parts[:3]
    )
    room = 1 - best.memory.total / best.limit
    words = f"its time: {shares}; {in_words(room, 'share')} of the memory is free"
    if not best.strategy.stages:
        return words
    even = prediction_of(
        best.config, best.cluster, dataclasses.replace(best.strategy, stages=()), best.batch,
        best.sequence_length, best.limit, best.constants,
    )  # fmt: skip
    saved = in_words(even.step_seconds - best.step_seconds, "seconds")
    instead = f"save {saved} per step" if even.fits else "fit, equal ones do not"
    return f"{words}; stages of {best.strategy.stage_words} layers {instead}"


def why(other: Prediction, best: Prediction) -> str:
    """Why a plan is slower than the best, in words: the part that grows most."""
    names = best.seconds | other.seconds
    more = {name: other.seconds.get(name, 0) - best.seconds.get(name, 0) for name in names}
    name = max(more, key=lambda part: more[part])
    return f"{name} +{in_words(max(0.0, more[name]), 'seconds')}"


@checked
def plan(
    model: Any,
    chips: str | Cluster,
    *,
    batch: int,
    sequence_length: int = 2048,
    memory: float | None = None,
    reserve: float = 0.1,
    constants: Constants | None = None,
    capacity: float = 1.25,
    order_seconds: float = 0.0,
    host: float | None = None,
) -> Plan:
    """Search for the fastest way to train a model on a cluster within its memory.

    Every division of the chips into data x fsdp x tensor x pipeline is tried with every number of
    microbatches, with and without a chunked head and a sharded optimiser state, unless a lower
    bound rules it out. For each, a knapsack decides which layers recompute. If even fully
    recomputed layers do not fit, their backward pass runs in parts (StreamBP). The most promising
    pipelines are simulated in the order of every schedule (1F1B, interleaved, breadth-first, ZB-H1,
    ZB-H2, ZB-V, DualPipe-V), and in that of 1F1B with sequences in slices, each with its own
    memory; the fastest also get stages of unequal length, balanced in time as far as memory allows.
    Experts are cut over every product of the innermost chips that divides them, or over none;
    tokens are sent to them by all-to-alls or gathered.

    Args:
        model: a configuration, or the name of one (`MODELS`); the path of a config.json or its
            folder; or a model or configuration of Hugging Face transformers.
        chips: kind and number, such as "h100:64" or "v5e:4x4".
        batch: global batch size in sequences.
        sequence_length: tokens per sequence.
        memory: usable bytes per chip; None: all.
        reserve: share of that memory to keep free for errors of the prediction.
        constants: rates that chips and links achieve, and the imbalance of experts; None: the
            defaults.
        capacity: of the all-to-alls, as in `Strategy`.
        host: bytes of the host's memory per chip. Given, also what is modelled but not built by
            `train_program` is tried: sequences cut over chips ("context"), gradients cut over
            replicas (ZeRO-2), and, above 0, activations that wait on the host, over
            `Constants.host_link` (MEMO); None: only what `toolkit train --plan` runs.
        order_seconds: also search orders of tasks for the fastest pipelines, with so many seconds
            for each integer program (`search_order`; extra `search`); 0: do not.

    Raises:
        ValueError: when nothing fits, or no degrees divide the model and the batch; names the
            nearest that work.

    Cost: Below five seconds for 48 layers on 512 chips, and for 3,072 chips.

    Source: Miao et al., "Galvatron", 2022; Wang et al., 2023 (Galvatron-BMW); Luo et al.,
        "StreamBP", 2025.

    Example:
        >>> found = plan("llama-3.2-1b", "v5e:4x4", batch=64)
        >>> all(found.best.step_seconds <= other.step_seconds for other in found.runners_up)
        True
    """
    return searched(
        model, chips, batch, sequence_length, memory, reserve, constants, capacity, order_seconds,
        host,
    )  # fmt: skip


def searched(
    model: Any,
    chips: str | Cluster,
    batch: int,
    sequence_length: int,
    memory: float | None = None,
    reserve: float = 0.1,
    constants: Constants | None = None,
    capacity: float = 1.25,
    order_seconds: float = 0.0,
    host: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """`plan` with a callback that reports progress after each division of the chips."""
    config, where = model_of(model), cluster(chips)
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be positive; got {memory:,.0f} bytes")
    check_model(config, Strategy(capacity=capacity), batch, sequence_length)
    constants = constants_of(where, constants)
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve must lie in [0, 1); got {reserve}")
    limit = (usable_bytes(where) if memory is None else memory) * (1 - reserve)
    search = Search(config, where, batch, sequence_length, limit, constants, host)
    sizes = sequence_length, capacity
    ways = bases_of(config, where, batch, *sizes, beyond_built=host is not None)
    bases = sorted(((search.floor(base), base) for base in ways), key=lambda pair: pair[0])
    if not bases:
        others = bases_of(config, where, where.chips, *sizes)  # all that divide the model
        batches = (nearest_multiple(batch, each.batch_shards) for each in others)
        nearest = min(batches, key=lambda each: abs(each - batch), default=where.chips)
        raise ValueError(
            f"batch {batch} on {where.chips} chips: no cut divides the batch and the model; "
            f"nearest batch that works: {nearest}"
        )
    for done, (floor, base) in enumerate(bases, 1):
        # No later division is faster than those that will be shown.
        if floor > search.slowest:
            break
        search.weigh(base)
        tell(done, len(bases))
    tell(len(bases), len(bases))
    search.order()
    search.slice()
    search.balance()
    if not search.best:
        assert search.smallest is not None
        raise ValueError(_nothing_fits(search.smallest, memory, reserve))
    by_time = lambda each: (each.step_seconds, each.memory.total)  # noqa: E731
    ranked = sorted(search.best.values(), key=by_time)
    if order_seconds:
        few = [each for each in ranked if each.strategy.pipeline > 1][:SEARCHED]
        ordered = {id(each): search_order(each, seconds=order_seconds) for each in few}
        ranked = sorted((ordered.get(id(each), each) for each in ranked), key=by_time)
    return Plan(ranked[0], tuple(ranked[1 : RUNNERS_UP + 1]), search.considered, search.fitting)


def _nothing_fits(smallest: Prediction, memory: float | None, reserve: float) -> str:
    needed = math.ceil(100 * smallest.memory.total / (1 - reserve) / 2**30) / 100
    asked = "memory" if memory is not None else f"chips {smallest.cluster.name!r}: memory"
    had = in_words(smallest.limit / (1 - reserve), "bytes")
    return (
        f"{asked} of {had} per chip, {in_words(reserve, 'share')} kept free, is too little for any "
        f"of the strategies; nearest that works: {needed:.2f} GiB with {smallest.strategy}"
    )
