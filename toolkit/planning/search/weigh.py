"""Every way to divide a step over chips, and the fastest variant of each that fits.

Time is bounded from below first, without the pipeline's bubble; a division that cannot be among the
best is neither simulated nor are its bytes counted.
"""

import bisect
import itertools
import math

from toolkit.planning.model_checks import check_model, stages_fault
from toolkit.planning.predict import Prediction, prediction_of
from toolkit.planning.search.divisions import degrees_of, divisors, sharded_ways
from toolkit.planning.search.variants import (
    balanced_in_memory,
    even_in_time,
    mixed_over_layers,
    streamed,
)
from toolkit.planning.strategy import RECOMPUTE, SCHEDULES, SPLIT, Strategy

RUNNERS_UP = 5
CHUNK = 256  # tokens per chunk of a streamed head, and least tokens of a slice
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
        mixed = None if fastest.fits or not found[-1].fits else mixed_over_layers(found[-1])
        for each in [*([mixed] if mixed else []), *streamed(found[-1])]:
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
                for placed in (each, even_in_time(each) if is_near else None):
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
                uneven = balanced_in_memory(each)
                if uneven is not None:
                    self._try(uneven)


def _mean_seconds(found: Prediction) -> float:
    return found.parts.total(found.constants.slowdown) / found.strategy.pipeline
