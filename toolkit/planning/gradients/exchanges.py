"""Which of a model's gradients to compress, and how: costs from chips and links, then the search.

The bytes are those of `toolkit.parallel.gradients`, which the compiled programs send. What a
compressor does to convergence is no part of it: the caller names those that he wants.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.measure.words import counted
from toolkit.parallel.gradients import Exchange
from toolkit.parallel.gradients.exchange import DENSE_BELOW
from toolkit.parallel.gradients.peers import Along
from toolkit.planning.gradients.costs import message_cost
from toolkit.planning.gradients.lanes import Cost, Message, Option, Schedule, one_by_one
from toolkit.planning.gradients.search import best_exchanges, greedy_exchanges
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.sizes import (
    layer_parts,
    layer_tensors,
    mixture_tensors,
    rest_tensors,
    share_of,
    table_tensors,
)
from toolkit.planning.predict import Prediction
from toolkit.planning.time.seconds import Seconds
from toolkit.planning.time.step import transfer_seconds
from toolkit.planning.time.traffic import Transfer, of_parameters

DENSE = "dense"
TWO_LEVELS = ("far", "two_hop")
Costs = Callable[[int, int], Cost]


@dataclass(frozen=True)
class Tensors:
    """Gradients in the order of back-propagation.

    Tensors that are small travel as they are, and are left out.

    Attributes:
        names: layer and shape.
        numbers: that a chip exchanges of each.
        ready: seconds from the start of the last backward pass.
        others: seconds that the link needs for other traffic of each.
        layers: where the tensors of a layer end.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    ready: tuple[float, ...]
    others: tuple[float, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeChoice:
    """How to exchange each gradient of a planned step; modelled.

    Attributes:
        step: the planned step.
        tensors: its gradients.
        options: ways to exchange them, the dense one first.
        best: the schedule of single tensors that ends first.
        grouped: the same where the layers' messages may be merged.

    Example:
        >>> from toolkit.planning import Strategy, predict
        >>> step = predict("llama-3.2-1b", "a10g:8", Strategy(data=8), batch=8, memory=1e12)
        >>> found = choose_exchanges(step, ["int4"])
        >>> found.best.exposed < found.dense.exposed
        True
    """

    step: Prediction
    tensors: Tensors
    options: tuple[Option, ...]
    best: Schedule
    grouped: Schedule

    @functools.cached_property
    def dense(self) -> Schedule:
        """All gradients as they are."""
        return one_by_one(self.tensors.ready, [self.options[0]] * len(self.tensors.ready))

    @functools.cached_property
    def greedy(self) -> Schedule:
        """What Espresso's search finds."""
        return greedy_exchanges(self.tensors.ready, self.options, self.tensors.numbers)

    @property
    def step_seconds(self) -> float:
        """The step with the best schedule in place of dense gradients."""
        return self.step.step_seconds + self.best.exposed - self.dense.exposed

    def otherwise(self, tensors: Sequence[int]) -> float:
        """Seconds by which the step grows if these tensors are dense and not compressed, or, where
        they are dense, if they are compressed by the best of the options."""
        at = {option.name: option for option in self.options}
        chosen = [at[name] for name in self.best.options()]
        is_dense = chosen[tensors[0]] is self.options[0]

        def seconds(option: Option) -> float:
            changed = [option if i in set(tensors) else own for i, own in enumerate(chosen)]
            return one_by_one(self.tensors.ready, changed).seconds

        others = self.options[1:] if is_dense else self.options[:1]
        return min(map(seconds, others), default=self.best.seconds) - self.best.seconds

    def __str__(self) -> str:
        rows = [("gradients", "of", "exchange", "link", "otherwise")]
        names, found = self.best.options(), {}
        for at, (name, chosen) in enumerate(zip(self.tensors.names, names, strict=True)):
            found.setdefault((name.partition(": ")[2], chosen), []).append(at)
        whole = Counter(name.partition(": ")[2] for name in self.tensors.names)
        costs = [each.option.cost(each.first, each.last) for each in self.best.messages]
        for (shape, chosen), those in found.items():
            sent = sum(costs[at].send for at in those)
            later = self.otherwise(those)
            other = "if compressed" if chosen == DENSE else "if dense"
            why = (
                f"+{in_words(later, 'seconds')} {other}"
                if later > 1e-4 * self.best.exposed
                else "no difference"
            )
            times = f"{len(those)} of {whole[shape]}" if whole[shape] > 1 else ""
            rows.append((shape, times, chosen, in_words(sent, "seconds"), why))
        gap = self.greedy.seconds / self.best.seconds - 1
        replicas, merged = _degrees(self.step)[0], len(self.grouped.messages)
        return (
            f"gradients of {counted(replicas, 'replica')} ({self.step.strategy}), modelled\n"
            f"{text_table(rows, '<<<><')}\n"
            f"exposed: {in_words(self.dense.exposed, 'seconds')} if all are dense, "
            f"{in_words(self.best.exposed, 'seconds')} so, of which "
            f"{in_words(self.best.encoding, 'seconds')} is encoding; step "
            f"{in_words(self.step.step_seconds, 'seconds')} -> "
            f"{in_words(self.step_seconds, 'seconds')}. Espresso's greedy search ends "
            f"{gap:.1%} later. Layers merged into {counted(merged, 'message')}: "
            f"{in_words(self.grouped.exposed, 'seconds')} exposed.\n"
            "Layers in a compiled loop (scan) send nothing before the loop has ended."
        )


@checked
def choose_exchanges(step: Prediction, exchanges: Sequence[str]) -> ExchangeChoice:
    """Choose how each gradient of a step is exchanged, on its modelled timeline.

    Args:
        step: the predicted step; its gradients are exchanged over "data", or under ZeRO-3 alone
            scattered over "fsdp".
        exchanges: texts that `Exchange.parse` reads; a compressor alone stands for all patterns
            that it may take there. Dense gradients are always an option.

    Returns:
        An `ExchangeChoice`, to print.

    Raises:
        ValueError: for a step without replicas, with pipeline stages or folded experts.

    Source: Wang et al., "ByteComp", 2022 (Espresso, EuroSys 2023), and "MergeComp", 2021.

    Example:
        >>> from toolkit.planning import Strategy, predict
        >>> step = predict("llama-3.2-1b", "h100:8", Strategy(data=8), batch=64)
        >>> choose_exchanges(step, ["int8"]).best.options().count("dense")  # all but the last
        112
    """
    strategy = step.strategy
    replicas, inner, is_cut = _degrees(step)
    if replicas == 1:
        raise ValueError(f"exchange: got {strategy}, whose gradients are not exchanged")
    if strategy.pipeline > 1 or strategy.expert > 1:
        raise ValueError(
            f"exchange: got {strategy}; wanted a plan without pipeline stages and folded experts"
        )
    near = math.gcd(replicas, max(1, step.cluster.chip.links[0].chips // inner))
    tensors = _tensors(step)
    options = [Option(DENSE, _dense(step, tensors))]
    for text in exchanges:
        for exchange in _patterns(text, near, replicas, is_cut):
            options.append(Option(str(exchange), _compressed(step, tensors, exchange, near)))
    best = best_exchanges(tensors.ready, options)
    return ExchangeChoice(step, tensors, tuple(options), best, _merged(tensors, options))


def _degrees(step: Prediction) -> tuple[int, int, bool]:
    """Replicas, the distance between neighbours, and whether each shall have a part only."""
    strategy = step.strategy
    if strategy.data > 1:
        return strategy.data, strategy.tensor * strategy.fsdp, strategy.shard_optimizer
    return strategy.fsdp, strategy.tensor, True


def _patterns(text: str, near: int, replicas: int, is_cut: bool) -> list[Exchange]:
    parsed = Exchange.parse(text)
    if ":" in text:
        return [parsed]
    names = ["scatter_gather"] if is_cut else ["scatter_gather", "gather"]
    return [
        Exchange(parsed.compressor, name)
        for name in (*names, *(TWO_LEVELS if 1 < near < replicas else ()))
    ]


def _merged(tensors: Tensors, options: Sequence[Option]) -> Schedule:
    """The best schedule whose messages are layers, or neighbouring layers together."""
    ends = (0, *tensors.layers)
    by_layer = [
        Option(o.name, lambda first, last, o=o: o.cost(ends[first], ends[last])) for o in options
    ]
    ready = [tensors.ready[end - 1] for end in tensors.layers]
    found = best_exchanges(ready, by_layer, is_grouped=True)
    at = {option.name: option for option in options}
    messages = (Message(ends[m.first], ends[m.last], at[m.option.name]) for m in found.messages)
    return Schedule(tensors.ready, tuple(messages))


def _tensors(step: Prediction) -> Tensors:
    """The gradients of a step. Those of a looped layer are complete after its first loop, which is
    the last of the backward pass; those of micro-batches after the last of them."""
    config, strategy = step.config, step.strategy
    _, _, is_cut = _degrees(step)
    names, numbers, ready, others, ends = [], [], [], [], []
    runs = strategy.microbatches * config.loops
    table = _backward(step.seconds_of_tables) / strategy.microbatches
    layers = layer_kinds(config, strategy)
    each = {kind: _backward(step.seconds_by_kind[kind]) / runs for kind in set(layers)}
    now = 0.75 * table + (config.loops - 1) * sum(each[kind] for kind in layers)

    def add(label: str, shapes: tuple, seconds: float, waits: float) -> None:
        nonlocal now
        found = []
        for shape, cut in shapes:
            share = share_of(((shape, cut),), strategy)
            kept = share.used if is_cut and strategy.data == 1 else share.kept
            found.append((" x ".join(map(str, shape)), kept))
        total = sum(kept for _, kept in found)
        found = [each for each in found if each[1] >= DENSE_BELOW]
        for shape, kept in reversed(found):
            now += seconds * kept / total
            names.append(f"{label}: {shape}")
            numbers.append(kept)
            ready.append(now)
            others.append(waits * kept / total)
        if found:
            ends.append(len(names))

    tables = table_tensors(config, strategy.tensor)
    add("head", (*tables[1:], *rest_tensors(config)), 0.0, 0.0)
    for at, (word, fed, recompute) in reversed([*enumerate(layers)]):
        kind = word, fed, recompute
        shapes = layer_tensors(config, word, fed)
        parts = layer_parts(config, word, fed, strategy)
        if fed == "moe":
            shapes = sum(mixture_tensors(config, False), shapes)
        waits = sum(
            _seconds(step, transfer)
            for part in parts
            for transfer in of_parameters(part.strategy, part.share, part.itemsize, 1)
            if transfer.part == "fsdp" and transfer.phase == "backward"
            if transfer.kind == "all-gather" or strategy.data > 1
        )
        add(f"layer {at}", shapes, each[kind], waits)
    add("embedding", tables[:1], 0.25 * table, 0.0)
    return Tensors(*map(tuple, (names, numbers, ready, others, ends)))


def _backward(seconds: Seconds) -> float:
    """What computes, or waits for other chips, in the backward pass."""
    waits = seconds.tensor_backward + seconds.expert_backward
    return seconds.backward + seconds.recomputed + waits


def _seconds(step: Prediction, each: Transfer) -> float:
    link = step.cluster.link(each.inner, each.degree, each.kind)
    return transfer_seconds(link, each.bytes_sent, each.degree, step.constants)


def _dense(step: Prediction, tensors: Tensors) -> Costs:
    """What the step does by itself: an all-reduce in float32, or ZeRO-3's reduce-scatter in the
    type that it computes with."""
    replicas, inner, _ = _degrees(step)
    is_reduced = step.strategy.data > 1
    kind = "all-reduce" if is_reduced else "reduce-scatter"
    width = 8 if is_reduced else step.config.compute_dtype.itemsize
    each = width * (replicas - 1) / replicas
    numbers, others = _sums(tensors.numbers), _sums(tensors.others)

    @functools.cache
    def cost(first: int, last: int) -> Cost:
        sent = each * (numbers[last] - numbers[first])
        transfer = Transfer("data", kind, "backward", sent, 1, replicas, inner)
        return Cost(0.0, _seconds(step, transfer) + others[last] - others[first])

    return cost


def _compressed(step: Prediction, tensors: Tensors, exchange: Exchange, near: int) -> Costs:
    replicas, inner, is_cut = _degrees(step)
    along = Along.over({"data": replicas}, near)
    numbers, others = _sums(tensors.numbers), _sums(tensors.others)
    rate = step.cluster.chip.bytes_per_second * step.constants.memory

    @functools.cache
    def cost(first: int, last: int) -> Cost:
        found = message_cost(
            exchange,
            along,
            numbers[last] - numbers[first],
            lambda peers: step.cluster.link(
                inner * (near if peers is along.far else 1), peers.size
            ),
            rate,
            step.constants,
            is_scattered=is_cut,
        )
        return found._replace(send=found.send + others[last] - others[first])

    return cost


def _sums(values: Sequence[float]) -> list[float]:
    return [0, *itertools.accumulate(values)]
