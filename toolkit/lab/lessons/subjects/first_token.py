"""Lesson 17, why is the first token late: queues, the knee, a scheduler, two pools by hand."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, look
from toolkit.lab.lessons.drawing import draw_bars, draw_matrices, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Draw,
    Exercise,
    Outline,
    Question,
    WrongAnswer,
    ask,
    ask_array,
)
from toolkit.lab.serving.knee import LOADS, SHARE, GoodputPanel
from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    generate,
    pad_prompts,
    prefill,
)
from toolkit.serving import Instance, Iteration, Job, Scheduler, TracedRequest, simulate

SLOTS, BUDGET = 4, 64
KINDS = (8, 80)  # expected tokens of an answer and of a story
FASTER = 0.8  # of the mean time of first come, first served
PROMPTS = (b"The state ", b"A model that", b"def read(")
WRITTEN, CAPACITY = 8, 32


def _busy() -> Answer:
    loads = np.linspace(0.05, 0.95, 60)

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.12, 0.2, 0.84, 0.72))
        axes.plot(10 * loads, 0.1 + 0.05 * loads / (1 - loads), **look("full").line)
        mark_guess(axes, 9, guess, 0.55)
        axes.set(xlabel="requests per second", ylabel="mean seconds", ylim=(0, 1.2))

    return Answer(
        0.55,
        "0.55 seconds (modelled; the simulator's own test): 0.1 of service and 0.9 x 0.1 / (2 x "
        "0.1) = 0.45 of waiting, by Pollaczek and Khinchine. At 5 per second it is 0.15.",
        draw,
    )


def _knee() -> Answer:
    panel = GoodputPanel(count=480)
    panel.finish()
    view: Any = panel.view
    rates = view.knees

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.12, 0.2, 0.84, 0.72))
        axes.plot(LOADS, view.shares["first"], label="prompts first", **look("gdn").line)
        axes.plot(LOADS, view.shares["chunks"], label="in chunks", **look("full").line)
        axes.axvline(guess, color=ACCENT, label="your guess")
        axes.axhline(SHARE, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel="requests per second", ylabel="within both bounds", ylim=(0, 1.05))
        axes.legend()

    return Answer(
        round(rates["chunks"]),
        f"{rates['chunks']:.0f} requests per second (modelled, 480 requests). Prompts first break "
        f"at {rates['first']:.0f}: not the first token is late then, but whoever writes "
        "stands still while another is read.",
        draw,
    )


@functools.cache
def race_trace() -> tuple[tuple[TracedRequest, ...], tuple[int, ...]]:
    """Requests faster than four slots serve, and the expected length of each one's kind."""
    draw = np.random.default_rng(5)
    kinds = draw.choice(KINDS, 60, p=(0.7, 0.3))
    lengths = np.maximum(1, draw.gamma(4, kinds / 4)).astype(int)
    arrivals, prompts = np.cumsum(draw.exponential(0.06, 60)), draw.integers(20, 200, 60)
    rows = zip(arrivals.tolist(), prompts.tolist(), lengths.tolist(), strict=True)
    return tuple(TracedRequest(*row) for row in rows), tuple(kinds.tolist())


def race(scheduler: Scheduler) -> float:
    """Mean seconds from arrival to end; a turn takes 10 ms and 0.1 ms per token that is read."""

    def cost(work: Any) -> float:
        return 0.01 + 1e-4 * sum(new for new, _ in work.pieces)

    run = simulate(race_trace()[0], [Instance(scheduler, cost, SLOTS)])
    return float(np.mean([request.completion for request in run.requests]))


class _Yours(Scheduler):
    """A scheduler whose plan is a learner's; it knows a text's kind, not its length."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(BUDGET)
        self.function = function

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        begun = set[int]()

        def take(number: int) -> int | None:
            found = reserve(number)
            begun.update([number] if found is not None else [])
            return found

        expected = race_trace()[1]
        queue = sorted(job.number for *_, job in self.waiting)
        by_number = {job.number: job for *_, job in self.waiting}
        waiting, reading, writing = (
            [dataclasses.replace(job, output=expected[job.number]) for job in jobs]
            for jobs in ([by_number[number] for number in queue], self.reading, self.writing)
        )
        if not waiting and not reading and not writing:
            return None
        value = ask(self.function, waiting, reading, writing, BUDGET, take)
        if not isinstance(value, tuple) or len(value) != 2:
            raise WrongAnswer("plan must return two lists: pieces and rows.")
        pieces, rows = [tuple(piece) for piece in value[0]], list(value[1])
        self._check(pieces, rows, begun, writing)
        if not pieces and not rows:
            raise WrongAnswer("Nothing was planned although a request waits: it starves.")
        self.waiting = [each for each in self.waiting if each[1] not in begun]
        self.reading += [by_number[number] for number in queue if number in begun]
        return Iteration(tuple(pieces), tuple(rows))

    def _check(
        self, pieces: list[tuple[int, int]], rows: list[int], begun: set[int], writing: list[Job]
    ) -> None:
        if sorted(rows) != sorted(job.number for job in writing):
            raise WrongAnswer("Rows that write must all have their token in every turn: no stall.")
        left = {job.number: job.prompt - job.read for job in self.reading}
        left |= {job.number: job.prompt for *_, job in self.waiting if job.number in begun}
        if begun - {number for number, _ in pieces}:
            raise WrongAnswer("A request was reserved and not read: its slot stands empty.")
        for number, tokens in pieces:
            if number not in left:
                raise WrongAnswer(f"Request {number} has no slot: reserve(number) returned None.")
            if not 1 <= tokens <= left[number]:
                raise WrongAnswer(
                    f"A piece of {tokens} tokens of request {number}: wanted 1 to {left[number]}."
                )
        if (total := sum(tokens for _, tokens in pieces) + len(rows)) > BUDGET:
            raise WrongAnswer(f"{total} tokens in a turn of {BUDGET}: rows count, too.")


def _judge_plan(plan: Callable[..., Any]) -> tuple[str, Draw]:
    yours, first = race(_Yours(plan)), race(Scheduler(BUDGET))
    oracle = race(Scheduler(BUDGET, order=lambda job: (job.output, job.number)))
    names = ["first come, first served", "yours", "oracle"]
    drawn = draw_bars(names, [first, yours, oracle], [oracle] * 3, xlabel="mean seconds to the end")
    if yours > FASTER * first:
        raise WrongAnswer(
            f"It runs, in {yours:.2f} s on average; first come, first served takes {first:.2f}, an "
            f"oracle {oracle:.2f}. Which of the waiting frees its slot soonest?",
            drawn,
        )
    return (
        f"Right: {yours:.2f} s on average instead of {first:.2f}; an oracle that knows every "
        f"length takes {oracle:.2f}.",
        drawn,
    )


class Handed(NamedTuple):
    """A cache in the memory of the device that reads or of the one that writes."""

    cache: LoopedCache
    is_sent: bool


class Machines:
    """A device that reads prompts and one that writes, and a count of what they were asked."""

    def __init__(self) -> None:
        config = LoopedConfig.tiny("full", loops=1, width=32, heads=2)
        self.model = LoopedLM(config, rngs=nnx.Rngs(0))
        self.reads, self.steps = 0, 0
        self._batch = LoopedCache.empty(self.model.config, len(PROMPTS), CAPACITY)
        self._tokens = jnp.zeros(len(PROMPTS), jnp.int32)

    def read(self, prompt: bytes) -> tuple[int, Handed]:
        """The first token after a prompt, and its cache, in the reader's memory."""
        self.reads += 1
        tokens, lengths = pad_prompts([prompt])
        logits, cache = prefill(self.model, tokens, CAPACITY, lengths=lengths)
        return int(logits.argmax()), Handed(cache, is_sent=False)

    def send(self, handed: Handed) -> Handed:
        """The cache in the writer's memory."""
        return Handed(jax.device_put(handed.cache, self._tokens.sharding), is_sent=True)

    def insert(self, row: int, handed: Handed, token: int) -> None:
        """Put a cache and the last token into a row of the writer's batch."""
        if not handed.is_sent:
            raise WrongAnswer("The cache is in the reader's memory: send it first.")
        self._batch = self._batch.insert(jnp.array([row]), handed.cache)
        self._tokens = self._tokens.at[row].set(token)

    def step(self) -> list[int]:
        """The next token of every row."""
        self.steps += 1
        if self.steps >= WRITTEN:
            raise WrongAnswer(f"{self.steps} steps; one writes a token of every row.")
        logits, self._batch = decode_step(self.model, self._tokens, self._batch)
        self._tokens = logits.argmax(-1).astype(jnp.int32)
        return self._tokens.tolist()


def _judge_pools(pools: Callable[..., Any]) -> tuple[str, Draw]:
    machines = Machines()
    acts = machines.read, machines.send, machines.insert, machines.step
    texts = ask_array(pools, (len(PROMPTS), WRITTEN), list(PROMPTS), WRITTEN, *acts)
    tokens, lengths = pad_prompts(PROMPTS)
    wanted = np.asarray(generate(machines.model, tokens, WRITTEN, lengths=lengths))
    drawn = draw_matrices(texts, wanted, xlabel="token", ylabel="request", title="alone")
    if machines.reads > len(PROMPTS):
        raise WrongAnswer(f"{machines.reads} prompts were read; the cache is there to go on from.")
    if (texts[:, :-1] == wanted[:, 1:]).all():
        raise WrongAnswer("The first token is missing: reading the prompt gives it.", drawn)
    if not (texts == wanted).all():
        raise WrongAnswer("These are not the texts that each prompt gets alone.", drawn)
    size = len(PROMPTS) * cache_bytes_per_sequence(machines.model.config, CAPACITY)
    return (
        f"Right: {len(PROMPTS)} caches, {size:,} bytes, were sent; the texts are the same.",
        drawn,
    )


OUTLINE = Outline(
    "Why is the first token late?",
    questions=(
        Question(
            "busy",
            "A server takes exactly 0.1 seconds per request. Requests come at random, nine per "
            "second on average. How long does one take from arrival to end, on average?",
            _busy,
            unit="seconds",
            low=0.1,
            high=100,
        ),
        Question(
            "knee",
            "Llama 3 8B on two H100, 16 slots each, reads prompts (about 350 tokens) in chunks "
            "beside rows that write (about 40). Nine of ten requests should have their first token "
            "within 200 ms and no gap above 50 ms. Up to how many requests per second do they?",
            _knee,
            unit="per second",
            low=1,
            high=1000,
        ),
    ),
    exercises=(
        Exercise(
            "plan",
            "A scheduler in fifteen lines, raced against first come, first served and an oracle.",
            _judge_plan,
            (
                "Rows come first: budget - len(rows) tokens are left for prompts, then those that "
                "are begun.",
                "Take the waiting in the order of job.output, the expected length of their kind; "
                "stop at the first for which reserve(job.number) is None.",
                "left = budget - len(writing); for each job: tokens = min(left, job.prompt - "
                "job.read); if tokens: pieces.append((job.number, tokens)); left -= tokens",
            ),
            minutes=15,
        ),
        Exercise(
            "pools",
            "Read on one device, write on another: the hand-over of the caches.",
            _judge_pools,
            (
                "read, send and insert each prompt; then step for all together.",
                "The first token of each text comes from read.",
                "for row, prompt in enumerate(prompts): token, cache = read(prompt); insert(row, "
                "send(cache), token); then length - 1 times: tokens = step()",
            ),
            minutes=10,
        ),
    ),
)
