"""Every way to divide a step over chips, and the fastest variant of each that fits.

Time is bounded from below first, without the pipeline's bubble; a division that cannot be among the
best is neither simulated nor are its bytes counted.
"""

import bisect
import functools
import itertools
import math

from toolkit.planning.memory.categories import layer_kinds, layer_memory
from toolkit.planning.memory.pipelines import stage_memory
from toolkit.planning.model_checks import check_model, stages_fault
from toolkit.planning.models import kinds_of
from toolkit.planning.predict import Prediction, prediction_of
from toolkit.planning.search.divisions import degrees_of, divisors, sharded_ways
from toolkit.planning.search.layers import assign_layers
from toolkit.planning.strategy import RECOMPUTE, SCHEDULES, SPLIT, Strategy
from toolkit.planning.time.pipelines import balanced, cuts_by_size
from toolkit.planning.time.step import layer_seconds

RUNNERS_UP = 5
UNITS = 512  # of memory in the knapsack over layers
CHUNK = 256  # tokens per chunk of a streamed head, and least tokens of a slice
BLOCK_CHUNKS = (2, 4, 8, 16)  # chunks of a sequence in the backward pass of a layer
BALANCED = 8  # number of fastest pipelines whose stages are balanced
ORDERED = 16  # number of fitting pipelines that are simulated in the order of another schedule
LOOKED_AT = 200  # number of most promising ones
NEARLY = 1.1  # of the memory: stages of unequal length may fit
MOST_SIMULATED = 1 << 14  # tasks of a schedule that a search simulates
# Schedules beside 1F1B, with their chunks and how much of 1F1B's bubble about is left to them.
ORDERS = (
    ("zb-v", 2, 1 / 6), ("dualpipe-v", 2, 1 / 6), ("zb-h2", 1, 1 / 3), ("zb-h1", 1, 1 / 3),
    ("interleaved", 4, 1 / 4), ("interleaved", 2, 1 / 2), ("breadth-first", 4, 1 / 4),
    ("breadth-first", 2, 1 / 2),
)  # fmt: skip
SLICES = (2, 4, 8, 16)  # of a sequence


class Search:
    """The fastest step of each division of the chips."""

    def __init__(self, config, where, batch, length, limit, constants, host=None):
        self.host, self.beyond_built = host or 0.0, host is not None
        self.given = config, where, batch, length, limit, constants
        self.chunks = max(n for n in divisors(length) if n == 1 or length // n >= CHUNK)
        self.considered = self.fitting = 0
        self.best: dict[tuple[int | str, ...], Prediction] = {}  # by degrees
        self.slowest = math.inf  # seconds of the slowest plan that would be shown
        self.smallest: Prediction | None = None
        self.staged: list[tuple[float, Prediction]] = []
        self.piped: list[tuple[float, Prediction]] = []

    def of(self, base: Strategy, **changes) -> Prediction:
        """The base strategy of a checked division."""
        config, where, batch, length, limit, constants = self.given
        strategy = base.changed(**changes)
        return prediction_of(config, where, strategy, batch, length, limit, constants)

    def _changed(self, known: Prediction, same: str, **changes) -> Prediction:
        """With changes to the strategy on which that property does not depend."""
        found = self.of(known.strategy, **changes)
        vars(found)[same] = getattr(known, same)
        return found

    def floor(self, base: Strategy) -> float:
        """Lower bound on the seconds with these degrees, without bubble and recomputation."""
        ways = sharded_ways(base, beyond_built=False)
        return min(_mean_seconds(self.of(base, **sharded)) for sharded in ways)

    def weigh(self, base: Strategy) -> None:
        """The fastest step with these degrees over microbatches, optimiser, head and
        recomputation."""
        for parts in divisors(self.given[2] // base.batch_shards):
            fastest = []
            for sharded in sharded_ways(base, self.beyond_built):
                fastest.append(whole := self.of(base, microbatches=parts, **sharded))
                if self.chunks > 1:
                    fastest.append(self._changed(whole, "seconds_by_kind", head_chunks=self.chunks))
            # More microbatches never send less.
            if min(map(_mean_seconds, fastest)) > self._bar(base):
                break
            for each in fastest:
                self._recomputed(each)

    def _recomputed(self, fastest: Prediction) -> None:
        """The least recomputation that fits, also mixed or in parts."""
        base, bar = fastest.strategy, self._bar(fastest.strategy)
        # A lower bound: as if the stages were balanced.
        even = 1 + (base.pipeline - 1) / base.microbatches / base.chunks
        if base.pipeline > 1:
            self.piped.append((_mean_seconds(fastest), fastest))
        if _mean_seconds(fastest) * even >= bar:
            return
        again = RECOMPUTE[1:]
        changed = (self._changed(fastest, "seconds_of_tables", recompute=each) for each in again)
        found = [fastest, *changed]
        if base.pipeline > 1:
            self.staged += [(_mean_seconds(each) * even, each) for each in found]
        if fastest.least_seconds >= bar:
            return
        for each in found:
            self._try(each)
            if each.fits:
                break
        for each in found[:-1]:
            if self.host and not each.fits:
                self._offloaded(each)
        mixed = None if fastest.fits or not found[-1].fits else _mixed(found[-1])
        for each in [*([mixed] if mixed else []), *_streamed(found[-1])]:
            self._try(each)

    def _offloaded(self, each: Prediction) -> None:
        """The least share of activations on the host with which it fits (MEMO)."""
        kept = each.memory.activations
        over = each.memory.total - each.limit
        share = math.ceil(100 * over / kept) / 100 if kept else 1.0
        while share <= 1 and share * kept <= self.host:
            moved = self.of(each.strategy, offload=share)
            if moved.fits:
                self._try(moved)
                break
            share = round(share + 0.05, 2)

    def _try(self, each: Prediction) -> None:
        self.considered += 1
        self.fitting += each.fits
        if self.smallest is None or each.memory.total < self.smallest.memory.total:
            self.smallest = each
        bar = self._bar(each.strategy)
        if each.fits and each.least_seconds < bar and each.step_seconds < bar:
            self.best[degrees_of(each.strategy)] = each
            shown = sorted(each.step_seconds for each in self.best.values())
            self.slowest = shown[RUNNERS_UP] if len(shown) > RUNNERS_UP else math.inf

    def _bar(self, strategy: Strategy) -> float:
        """Seconds that a step must beat to be shown."""
        known = self.best.get(degrees_of(strategy))
        return min(self.slowest, known.step_seconds if known else math.inf)

    def order(self) -> None:
        """Run the pipelines that may be fastest in the order of every other schedule."""
        few, config = [], self.given[0]
        for mean, each in self.piped:
            base = each.strategy
            for name, chunks, left in ORDERS:
                # An estimate, which ranks only.
                about = mean * (1 + left * (base.pipeline - 1) / base.microbatches / base.chunks)
                times = base.chunks if SCHEDULES[name] is None else 1  # in every loop
                ordered = base.changed(schedule=name, chunks=chunks * times)
                tasks = 3 * ordered.stage_count * base.microbatches
                if tasks > MOST_SIMULATED or ordered.schedule_fault or about >= self._bar(base):
                    continue
                if not stages_fault(config, ordered):
                    few.append((about, ordered))
        self._try_few(few)

    def slice(self) -> None:
        """Cut the sequences of the pipelines that may be fastest, in the order of 1F1B."""
        ways = []
        for mean, each in self.piped:
            base = each.strategy
            for slices in SLICES:
                tasks = 3 * base.stage_count * base.microbatches * slices
                # Slices never shorten the work, only the bubble.
                least = mean * (1 + (base.pipeline - 1) / base.microbatches / slices)
                if base.chunks == 1 and tasks <= MOST_SIMULATED and least < self._bar(base):
                    ways.append((least, base.changed(slices=slices)))
        few: list[tuple[float, Strategy]] = []
        known: dict[Strategy, Prediction] = {}  # with a whole head
        for least, cut in sorted(ways, key=lambda pair: pair[0]):
            if len(few) >= LOOKED_AT and least > few[LOOKED_AT - 1][0]:
                break
            whole = cut.changed(head_chunks=1)
            known.setdefault(whole, self.of(whole))
            found = self._changed(known[whole], "seconds_by_kind", head_chunks=cut.head_chunks)
            about = _mean_seconds(found) * (1 + (cut.pipeline - 1) / cut.parts)
            if about < self._bar(cut) and self._can_cut(cut):
                bisect.insort(few, (about, cut), key=lambda pair: pair[0])
        self._try_few(few)

    def _try_few(self, few: list[tuple[float, Strategy]]) -> None:
        """The most promising orders, each with the least recomputation that fits."""
        few.sort(key=lambda pair: pair[0])
        before = self.fitting
        for about, ordered in few[:LOOKED_AT]:
            if self.fitting - before > ORDERED:
                break
            if about >= self._bar(ordered):
                continue
            # Recomputed layers have no weight gradients that could wait.
            for recompute in RECOMPUTE if ordered.schedule not in SPLIT else RECOMPUTE[:1]:
                each = self.of(ordered, recompute=recompute)
                is_near = each.memory.total <= NEARLY * each.limit
                for placed in (each, _even_in_time(each) if is_near else None):
                    if placed is not None and placed.least_seconds < self._bar(ordered):
                        self._try(placed)
                if each.fits:
                    break

    def _can_cut(self, cut: Strategy) -> bool:
        """Whether model and sequences can be cut in so many slices."""
        config, _, batch, length, *_ = self.given
        try:
            check_model(config, Strategy(**vars(cut)), batch, length)
        except ValueError:
            return False
        return length // cut.slices >= CHUNK

    def balance(self) -> None:
        """Balance the stages of the pipelines that may be fastest."""
        staged = sorted(self.staged, key=lambda pair: pair[0])
        for fits in (True, False):
            few = itertools.islice((each for _, each in staged if each.fits is fits), BALANCED)
            for each in few:
                uneven = _balanced(each)
                if uneven is not None:
                    self._try(uneven)


def _mean_seconds(found: Prediction) -> float:
    return found.parts.total(found.constants.slowdown) / found.strategy.pipeline


def _streamed(layer: Prediction) -> list[Prediction]:
    """If fully recomputed layers do not fit, use the fewest chunks that do (StreamBP)."""
    memory, strategy = layer.memory, layer.strategy
    smallest = memory.total - memory.gathered - memory.working
    if layer.fits or strategy.tensor > 1 or smallest > layer.limit:
        return []
    found = []
    for chunks in BLOCK_CHUNKS:
        streamed = strategy.changed(block_chunks=chunks)
        try:
            check_model(layer.config, streamed, layer.batch, layer.sequence_length)
        except ValueError:
            break
        found.append(
            prediction_of(
                layer.config, layer.cluster, streamed, layer.batch, layer.sequence_length,
                layer.limit, layer.constants,
            )
        )  # fmt: skip
        if found[-1].fits:
            break
    return found


def _mixed(least: Prediction) -> Prediction | None:
    """Choose what each layer recomputes, by a knapsack over the layers of one stage."""
    config, strategy = least.config, least.strategy
    kinds = set(kinds_of(config))
    if len(kinds) > 1 or strategy.pipeline > 1 or least.strategy.recompute != "layer":
        return None
    sequences = least.batch // (strategy.batch_shards * strategy.microbatches)
    kind, layers = kinds.pop(), len(config.layers)
    sizes = (strategy, sequences, least.sequence_length)
    kept = [layer_memory(config, *kind, each, *sizes).kept * config.loops for each in RECOMPUTE]
    free = least.limit - least.memory.total + layers * kept[RECOMPUTE.index("layer")]
    seconds = [
        layer_seconds(
            config, *kind, each, strategy, least.cluster, sequences, least.sequence_length,
            least.constants,
        ).total(least.constants.slowdown)
        for each in RECOMPUTE
    ]  # fmt: skip
    unit = free / UNITS
    units = [math.ceil(size / unit) for size in kept]
    found = assign_layers([units] * layers, [seconds] * layers, budget=UNITS)
    if found is None:
        return None
    count = {name: found.choices.count(index) for index, name in enumerate(RECOMPUTE)}
    runs = [f"{count[name]} {name}" for name in reversed(RECOMPUTE) if count[name]]
    if len(runs) < 2:
        return None
    mixed = strategy.changed(recompute=", ".join(runs))
    return prediction_of(
        config, least.cluster, mixed, least.batch, least.sequence_length, least.limit,
        least.constants,
    )  # fmt: skip


def _balanced(even: Prediction) -> Prediction | None:
    """The same with stages balanced in time, as far as memory allows."""
    config, strategy, sizes = even.config, even.strategy, (even.batch, even.sequence_length)
    kinds = tuple(layer_kinds(config, strategy))
    if len(set(kinds)) > 1 or config.loops > 1:
        return None
    slowdown, count, last = even.constants.slowdown, len(kinds), strategy.pipeline - 1
    sizes_of_stage = range(1, count + 1)

    @functools.cache
    def seconds(stage):
        if 1 < stage < last:  # inner stages are alike
            return seconds(1)
        took = (even.stage_seconds(stage, 0, size) for size in sizes_of_stage)
        return cuts_by_size([each.total(slowdown) for each in took])

    @functools.cache
    def memory(stage):
        found = [math.inf] * count
        for size in sizes_of_stage:  # of more layers than one too many nothing need be known
            found[size - 1] = stage_memory(config, strategy, *sizes, stage, kinds[:size]).total
            if found[size - 1] > even.limit:
                break
        return cuts_by_size(found)

    found = balanced(count, strategy.pipeline, seconds, memory, even.limit)
    if found is None or found == even.stages:
        return None
    return prediction_of(
        config, even.cluster, strategy.changed(stages=found), *sizes, even.limit,
        even.constants,
    )  # fmt: skip


def _even_in_time(even: Prediction) -> Prediction | None:
    """The same with stages balanced in time, whatever their memory: all full to the least limit at
    which all layers find a stage, then the longest shortened."""
    strategy, kinds = even.strategy, layer_kinds(even.config, even.strategy)
    count, stages, slowdown = len(kinds), strategy.stage_count, even.constants.slowdown
    if len(set(kinds)) > 1 or even.config.loops > 1:
        return None

    @functools.cache
    def seconds(stage, layers):
        return even.stage_seconds(stage, 0, layers).total(slowdown)

    like = [0, *[1] * (stages - 2), stages - 1]  # inner stages are alike
    limits = sorted(seconds(s, k) for s in {*like} for k in range(1, 2 + count // stages * 2))
    ways = [seconds(s, 1) for s in like]

    def full(limit):
        room = {s: [k for k in range(1, count + 1) if seconds(s, k) <= limit] for s in {*like}}
        return [max(room[s], default=0) for s in like]

    fits = [limit for limit in limits if limit >= max(ways)]
    at = bisect.bisect_left(fits, count, key=lambda limit: sum(full(limit)))
    if at == len(fits):
        return None
    sizes = full(fits[at])
    while sum(sizes) > count:
        sizes[max(range(stages), key=lambda s: (sizes[s] > 1, seconds(like[s], sizes[s])))] -= 1
    if tuple(sizes) == even.stages:
        return None
    return prediction_of(
        even.config, even.cluster, strategy.changed(stages=tuple(sizes)), even.batch,
        even.sequence_length, even.limit, even.constants,
    )  # fmt: skip
