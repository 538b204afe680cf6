"""The engine: one loop that reads prompts piece by piece and lets all rows write together.

A turn is what the scheduler plans: pieces of prompts, each read into a cache of its own row, then
one step for all rows that write. The pieces are programs of their own, beside the step: where a
chunk and the rows are one program, as in Sarathi-Serve, the weights are read once for both.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit._checks import checked
from toolkit.looped import LoopedCache, LoopedLM, read_sparsely
from toolkit.looped.decoding.early_exit import exit_rule
from toolkit.serving import programs
from toolkit.serving.active import Active, inputs_of_step
from toolkit.serving.prefixes import PageTable
from toolkit.serving.requests import Progress, Reason, Request, Written
from toolkit.serving.rows import PagedCache, RowCache
from toolkit.serving.runs import Work
from toolkit.serving.scheduler import Iteration, Job, Scheduler, SchedulingPolicy


class Engine:
    """Continuous batching of a looped model: requests come and go, the batch goes on.

    Every request gets the tokens that `toolkit.looped.generate` writes for it alone, whatever
    shares its batch; only the rounding of the logits depends on the number of slots and on the
    pieces in which a prompt is read. In bfloat16, whose rounding is coarse, a token may therefore
    differ from that of `generate`, but not with the neighbours. (With `quantised_cache`, the first
    piece of a prompt, not all of it, sets the factor of each channel.)

    Args:
        model: of any layers; it is not copied.
        slots: rows, the most requests that write together.
        capacity: tokens of a row, prompt and text; a multiple of `page`.
        page: the largest piece in which prompts are read, and tokens of a page; a power of two.
        pages: pages that all rows share, and with them beginnings of prompts; None gives every row
            its full capacity.
        scheduler: what to read and write in each turn; None reads at most a page per turn.
        sparse, dense_layers, exit: how steps read their cache and when they stop looping, as of
            `generate`; rows read sparsely lie in no pages.
        prefill_device: where prompts are read (a second copy of the model); their caches are then
            sent to the device that writes, as in DistServe. None uses one device.
        clock: seconds now.

    Attributes:
        progress: number -> `Progress` of every request that has not been collected.
        sent_bytes: bytes of caches sent from one device to the other.

    Cost: a step computes all `slots`, taken or not. Programs: one per size of piece (a page, a
        quarter of it, ... one token), one to insert, one to step, and with pages two more.

    Source: Yu et al., "Orca", 2022 (OSDI), section 3; Zhong et al., "DistServe", 2024
        (arXiv:2401.09670), section 4, for reading and writing on different devices.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> [result] = Engine(model, capacity=16, page=4).serve([Request((5, 3), length=4)])
        >>> len(result.tokens)
        4
    """

    @checked
    def __init__(
        self, model: LoopedLM, *,
        slots: int = 8, capacity: int = 512, page: int = 64, pages: int | None = None,
        scheduler: Any = None, sparse: str | None = None, dense_layers: int = 0,
        exit: str | None = None, prefill_device: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise ValueError(f"slots: got {slots}, wanted at least 1")
        if page < 1 or page & (page - 1):
            raise ValueError(f"page: got {page}, wanted a power of two")
        if capacity < page or capacity % page:
            raise ValueError(f"capacity: got {capacity}, wanted a multiple of page, {page}")
        if sparse is not None and (pages is not None or exit is not None):
            raise ValueError("sparse: rows read sparsely take neither pages nor an exit; want None")
        self.config, self.slots, self.capacity, self.page = model.config, slots, capacity, page
        self._rule = None if exit is None else exit_rule(exit, self.config)
        self._index = lambda cache: cache
        if sparse is not None:
            self._index = jax.jit(
                lambda cache: read_sparsely(self.config, cache, sparse, dense_layers=dense_layers)
            )
        self._model = self._reader = programs.Weights.of(model)
        self._prefill_device = prefill_device
        if prefill_device is not None:
            self._reader = jax.device_put(self._model, prefill_device)
        self._decode_device = next(iter(self._model.arrays[0].devices()))
        self.scheduler: SchedulingPolicy = Scheduler(page) if scheduler is None else scheduler
        self.clock = clock
        self.pages = None
        if pages is not None:
            if capacity == page or pages * page < capacity:
                raise ValueError(
                    f"pages: got {pages} of {page} tokens, wanted at least the {capacity} of a "
                    "row, which must hold more than one page"
                )
            self.pages = PageTable(pages, page)
        self._empty_row = jax.jit(lambda: LoopedCache.empty(self.config, 1, capacity))
        self._batch = self._empty_batch(pages)
        self._seen = jnp.zeros((slots, self.config.vocabulary), bool)
        self._table = np.full((slots, capacity // page), pages or 0, np.int32)
        self._rows: list[int | None] = [None] * slots
        self._active: dict[int, Active] = {}
        self.progress: dict[int, Progress] = {}
        self._next = 0
        self.sent_bytes = 0

    def _empty_batch(self, pages: int | None) -> RowCache | PagedCache:
        sizes = self.config, self.slots, self.capacity
        if pages is not None:
            return PagedCache.empty(*sizes, self.page, pages)
        return RowCache(self._index(LoopedCache.empty(*sizes)))

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or goes on."""
        return any(progress.reason is None for progress in self.progress.values())

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._active)

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit: one line that names what is wrong."""
        request.check_tokens(self.config.vocabulary)
        if (total := len(request.prompt) + request.length) > self.capacity:
            raise ValueError(
                f"length: got {len(request.prompt)} tokens of prompt and {request.length} to "
                f"write, {total} in all; wanted at most {self.capacity}"
            )

    @checked
    def submit(self, request: Request, arrival: float | None = None) -> int:
        """Let a request wait for its turn, and return its number.

        Args:
            request: what is asked.
            arrival: seconds, for its times; None is now.
        """
        self.check(request)
        number, self._next = self._next, self._next + 1
        arrival = self.clock() if arrival is None else arrival
        self.progress[number] = Progress(request, arrival)
        self.scheduler.admit(Job(number, len(request.prompt), request.length, arrival))
        return number

    def cancel(self, number: int) -> None:
        """End a request where it is; its row is free at once."""
        progress = self.progress.get(number)
        if progress is not None and progress.reason is None:
            self._end(number, "cancelled")

    def collect(self, number: int) -> Progress:
        """The result of a request that has ended; the engine forgets it."""
        if self.progress[number].reason is None:
            raise ValueError(f"number: request {number} has not ended; cancel it first")
        return self.progress.pop(number)

    def serve(self, requests: Sequence[Request]) -> list[Progress]:
        """Run requests until all have ended; their results in order."""
        numbers = [self.submit(request) for request in requests]
        while self.is_busy:
            self.turn()
        return [self.collect(number) for number in numbers]

    def turn(self) -> list[Written]:
        """Run one iteration; the tokens it wrote."""
        iteration = self.plan()
        return [] if iteration is None else self.run(iteration)

    def plan(self) -> Iteration | None:
        """What the scheduler wants next; waiting requests that it begins have their rows now."""
        return self.scheduler.plan(self._reserve)

    def work(self, iteration: Iteration) -> Work:
        """What a planned iteration will compute."""
        progress = [self.progress[number] for number in iteration.rows]
        return Work(
            programs.works(
                [(self._active[number].read, count) for number, count in iteration.pieces],
                self.page,
            ),
            tuple(len(each.request.prompt) + len(each.tokens) for each in progress),
        )

    def run(self, iteration: Iteration) -> list[Written]:
        """Run an iteration that the scheduler planned."""
        read = [number for number, count in iteration.pieces if self._read(number, count)]
        # Dispatched, not awaited: the step below waits for it on the same device only.
        stepped = self._step(iteration.rows) if iteration.rows else None
        tokens = []
        if stepped is not None:
            sampled = np.asarray(stepped)
            tokens = [(number, sampled[self._active[number].slot]) for number in iteration.rows]
        for number in read:
            tokens.append((number, np.asarray(self._active[number].token)[0]))
            self._insert(number)
        self.scheduler.done(iteration)
        return [self._write(number, int(token)) for number, token in tokens]

    def _reserve(self, number: int) -> int | None:
        """A row and pages for a waiting request: the tokens of its prompt that are there."""
        if None not in self._rows:
            return None
        request, lease, shared = self.progress[number].request, None, 0
        if self.pages is not None:
            if (lease := self.pages.reserve(request.prompt, request.length)) is None:
                return None
            shared = lease.shared * self.page
        slot = self._rows.index(None)
        self._rows[slot] = number
        seen = np.zeros((1, self.config.vocabulary), bool)
        seen[0, list(request.prompt)] = True
        key = np.asarray(jax.random.key_data(jax.random.key(request.seed)))
        active = self._active[number] = Active(slot, lease, key, seen, read=shared)
        if shared:
            assert lease is not None
            assert self.pages is not None
            table = self.pages.row(lease, self._table.shape[1])
            states = self.pages.states[lease.pages[lease.shared - 1]]
            active.cache = self._on_reader(programs.load(self._batch, table, states))
        else:
            active.cache = self._on_reader(self._empty_row())
        self.progress[number].shared = shared
        return shared

    def _read(self, number: int, count: int) -> bool:
        """Read `count` tokens of a prompt; whether it is read to its end."""
        active, prompt = self._active[number], self.progress[number].request.prompt
        how = programs.numbers_of([self.progress[number].request], self.config.vocabulary)
        for size in programs.pieces(active.read, count, self.page):
            tokens = np.array([prompt[active.read : active.read + size]], np.int32)
            active.token, active.cache = programs.read(
                self._reader, tokens, active.cache, how, active.key[None], active.seen
            )
            active.read += size
            if active.lease is not None and active.read % self.page == 0:
                kept = programs.keep(self._batch, active.cache)
                active.lease.states[active.read // self.page - 1] = kept
        return active.read == len(prompt)

    def _on_reader(self, cache: LoopedCache) -> LoopedCache:
        where = self._prefill_device
        return cache if where is None else jax.device_put(cache, where)

    def _insert(self, number: int) -> None:
        """A prompt that has been read goes from the cache it was read into to its row."""
        active, first = self._active[number], 0
        if active.lease is not None and self.pages is not None:
            first, row = active.lease.shared, self._table[active.slot]
            row[:] = self.pages.row(active.lease, len(row))
        self._put(active.slot, active.cache, active.token, active.seen, first)
        if active.lease is not None and self.pages is not None:
            self.pages.publish(active.lease, self.progress[number].request.prompt)
        active.cache = active.token = None

    def _put(self, slot: int, cache: Any, token: Any, seen: np.ndarray, first: int) -> None:
        if self._prefill_device is not None:
            cache, token = jax.device_put((cache, token), self._decode_device)
            leaves = jax.tree.leaves(cache)
            self.sent_bytes += sum(x.nbytes for x in leaves if x.dtype != jnp.int32)
        self._batch, self._seen = programs.insert(
            self._batch, self._seen, np.int32(slot), self._index(cache), self._table[slot].copy(),
            np.int32(first), token, seen,
        )  # fmt: skip

    def _step(self, rows: Sequence[int]) -> Any:
        """One token for every row that writes, on the device."""
        writing = {number for number, active in self._active.items() if active.cache is None}
        if {*rows} != writing:
            raise ValueError(f"rows: the scheduler planned {sorted(rows)} of {sorted(writing)}")
        inputs = inputs_of_step(self._active, self.progress, self.slots, self.config.vocabulary)
        sampled, self._batch, self._seen = programs.step(
            self._model, batch=self._batch, seen=self._seen, table=self._table.copy(),
            rule=self._rule, **inputs,
        )  # fmt: skip
        return sampled

    def _write(self, number: int, token: int) -> Written:
        progress = self.progress[number]
        progress.tokens.append(token)
        progress.times.append(self.clock())
        reason: Reason | None = None
        if token in progress.request.stop_tokens:
            reason = "stop"
        elif len(progress.tokens) == progress.request.length:
            reason = "length"
        if reason is not None:
            self._end(number, reason)
        return Written(number, token, reason)

    def _end(self, number: int, reason: Reason) -> None:
        self.progress[number].reason = reason
        self.scheduler.leave(number)
        active = self._active.pop(number, None)
        if active is None:
            return
        self._rows[active.slot] = None
        if active.lease is not None and self.pages is not None:
            self.pages.release(active.lease)
            self._table[active.slot] = self.pages.count

    def warm(self) -> None:
        """Compile every program now, so that no request waits for it."""
        how = programs.numbers_of([None], self.config.vocabulary)
        key, seen = np.zeros((1, 2), np.uint32), np.zeros((1, self.config.vocabulary), bool)
        for size in programs.piece_sizes(self.page):
            cache = self._on_reader(self._empty_row())
            tokens = np.zeros((1, size), np.int32)
            token, cache = programs.read(self._reader, tokens, cache, how, key, seen)
        if isinstance(self._batch, PagedCache):
            states = programs.keep(self._batch, cache)
            self._on_reader(programs.load(self._batch, self._table[0], states))
        # Into a row that no request has, which the step empties.
        self._put(self._rows.index(None), cache, token, seen, first=0)
        jax.block_until_ready(self._step(()))
