"""Which of a model's gradients to compress, and how: costs from chips and links, then the search.

The bytes are those of `toolkit.parallel.gradients`, which the compiled programs send. What a
compressor does to convergence is no part of it: the caller names those that he wants.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.measure.words import counted
from toolkit.parallel.gradients import Exchange
from toolkit.parallel.gradients.compression.compressors import compressor_of
from toolkit.parallel.gradients.exchange import DENSE_BELOW
from toolkit.parallel.gradients.peers import Along
from toolkit.planning.gradients.costs import message_cost
from toolkit.planning.gradients.lanes import Cost, Message, Option, Schedule, one_by_one
from toolkit.planning.gradients.search import best_exchanges, greedy_exchanges
from toolkit.planning.gradients.tensors import Tensors, degrees_of, seconds_of, shape_of, tensors_of
from toolkit.planning.predict import Prediction
from toolkit.planning.time.traffic import Transfer

DENSE = "dense"
TWO_LEVELS = ("far", "two_hop")
Costs = Callable[[int, int], Cost]


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
        replicas, merged = degrees_of(self.step)[0], len(self.grouped.messages)
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
    replicas, inner, is_cut = degrees_of(step)
    if replicas == 1:
        raise ValueError(f"exchange: got {strategy}, whose gradients are not exchanged")
    if strategy.pipeline > 1 or strategy.expert > 1:
        raise ValueError(
            f"exchange: got {strategy}; wanted a plan without pipeline stages and folded experts"
        )
    near = math.gcd(replicas, max(1, step.cluster.chip.links[0].chips // inner))
    tensors = tensors_of(step)
    if not tensors.names:
        raise ValueError(
            f"exchange: got a model of which no tensor has {DENSE_BELOW:,} numbers per chip under "
            f"{strategy}; smaller ones are summed as they are"
        )
    options = [Option(DENSE, _dense(step, tensors))]
    for text in exchanges:
        for exchange in _patterns(text, near, replicas, is_cut):
            options.append(Option(str(exchange), _compressed(step, tensors, exchange)))
    best = best_exchanges(tensors.ready, options)
    return ExchangeChoice(step, tensors, tuple(options), best, _merged(tensors, options))


def _patterns(text: str, near: int, replicas: int, is_cut: bool) -> list[Exchange]:
    """The exchanges that a text stands for, with the devices of a node where they have levels."""
    if ":" in text:
        found = [Exchange.parse(text)]
    elif (row := compressor_of(text)).is_linear:
        found = [Exchange(row, "all_reduce")]
    else:
        names = ["scatter_gather"] if is_cut else ["scatter_gather", "gather"]
        levels = TWO_LEVELS if 1 < near < replicas else ()
        found = [Exchange(row, name) for name in (*names, *levels)]
    if named := [exchange for exchange in found if exchange.exceptions]:
        raise ValueError(f"exchange: got {named[0]}; wanted ways to choose from, without tensors")
    return [
        replace(each, near=near) if each.pattern in TWO_LEVELS and each.near is None else each
        for each in found
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


def _dense(step: Prediction, tensors: Tensors) -> Costs:
    """What the step does by itself: an all-reduce in float32, or ZeRO-3's reduce-scatter in the
    type that it computes with."""
    replicas, inner, _ = degrees_of(step)
    is_reduced = step.strategy.data > 1
    kind = "all-reduce" if is_reduced else "reduce-scatter"
    width = 8 if is_reduced else step.config.compute_dtype.itemsize
    each = width * (replicas - 1) / replicas
    numbers, others = _sums(tensors.numbers), _sums(tensors.others)

    @functools.cache
    def cost(first: int, last: int) -> Cost:
        sent = each * (numbers[last] - numbers[first])
        transfer = Transfer("data", kind, "backward", sent, 1, replicas, inner)
        return Cost(0.0, seconds_of(step, transfer) + others[last] - others[first])

    return cost


def _compressed(step: Prediction, tensors: Tensors, exchange: Exchange) -> Costs:
    replicas, inner, is_cut = degrees_of(step)
    near = exchange.near or 1
    along = Along.over({"data": replicas}, near)
    numbers, others = _sums(tensors.numbers), _sums(tensors.others)
    rate = step.cluster.chip.bytes_per_second * step.constants.memory
    of_columns = exchange.of_gradients.of_columns

    def message(exchange: Exchange, count: float) -> Cost:
        return message_cost(
            exchange,
            along,
            count,
            lambda peers: step.cluster.link(
                inner * (near if peers is along.far else 1), peers.size
            ),
            rate,
            step.constants,
            is_scattered=is_cut,
        )

    @functools.cache
    def cost(first: int, last: int) -> Cost:
        if of_columns is None:
            found = message(exchange, numbers[last] - numbers[first])
        else:  # matrix by matrix
            rows = [
                replace(exchange, compressor=of_columns(math.prod(shape_of(name)[1:])))
                for name in tensors.names[first:last]
            ]
            each = map(message, rows, tensors.numbers[first:last])
            found = Cost(*map(sum, zip(*each, strict=True)))
        return found._replace(send=found.send + others[last] - others[first])

    return cost


def _sums(values: Sequence[float]) -> list[float]:
    return [0, *itertools.accumulate(values)]
