"""Lesson 02, a benchmark that lies, and one that doesn't: what clocks see and what they miss."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, LOOKS
from toolkit.lab.lessons.drawing import draw_bars
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_number,
)

SIZE = 1024
ONE_CALL, FIRST_CALL, HICCUP = 0.004, 0.12, 0.06


def _clocked(call: Callable[[], Any], times: int = 5) -> float:
    samples = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return float(np.median(samples))


def _without_waiting() -> Answer:
    x = jnp.ones((SIZE, SIZE))
    product = jax.jit(lambda x: x @ x @ x)
    waited = _clocked(lambda: product(x).block_until_ready())
    started = []
    for _ in range(5):
        start = time.perf_counter()
        result = product(x)
        started.append(time.perf_counter() - start)
        result.block_until_ready()
    ratio = waited / float(np.median(started))
    return Answer(
        ratio,
        f"It looks {ratio:.3g} times faster (measured here: {waited * 1e3:.2f} ms waited for, "
        f"{np.median(started) * 1e3:.3f} ms without). The call returns when the work has been "
        "handed over, not when it is done.",
    )


def _first_call() -> Answer:
    x = jnp.ones((64, 64))
    # A number of its own makes a program that no cache knows.
    unlike = float(np.random.default_rng().random())
    function = jax.jit(lambda x: jnp.tanh(x @ x * unlike).sum())
    first = _clocked(lambda: function(x).block_until_ready(), 1)
    later = _clocked(lambda: function(x).block_until_ready(), 50)
    return Answer(
        first / later,
        f"It takes {first / later:,.0f} times as long (measured here: {first * 1e3:.0f} ms, then "
        f"{later * 1e6:.0f} µs): the first call traces and compiles.",
    )


def _unused_result() -> Answer:
    x = jnp.ones((SIZE, SIZE))
    function = jax.jit(lambda x: ((x @ x @ x).sum(), x[0, 0])[1])
    whole = jax.jit(lambda x: (x @ x @ x).sum())
    unused, used = (_clocked(lambda f=f: f(x).block_until_ready(), 9) for f in (function, whole))
    return Answer(
        "next to nothing",
        f"It takes next to nothing (measured here: {unused * 1e6:.0f} µs, where the products alone "
        f"take {used * 1e3:.1f} ms): what no output needs, the compiler removes.",
    )


class _Work:
    """A result that is ready only when it has been waited for, as jax's are."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def block_until_ready(self) -> "_Work":
        time.sleep(self.seconds)
        self.seconds = 0.0
        return self


def _judge_seconds_per_call(seconds_per_call: Callable[..., Any], show: Show) -> str:
    taken: list[float] = []

    def program() -> _Work:
        count = len(taken)
        taken.append(FIRST_CALL if count == 0 else HICCUP if count % 6 == 4 else ONE_CALL)
        return _Work(taken[-1])

    got = ask_number(seconds_per_call, program)

    def drawn(figure: Figure) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.72, 0.72))
        axes.plot(
            range(len(taken)), [1e3 * each for each in taken], "o", color=LOOKS["full"].colour
        )
        axes.axhline(1e3 * got, color=ACCENT, linestyle=(0, (4, 2)))
        axes.annotate(
            " you report", (1.0, 1e3 * got), xycoords=("axes fraction", "data"), va="center",
            color=ACCENT,
        )  # fmt: skip
        axes.set(xlabel="call", ylabel="milliseconds it takes")

    show(drawn)
    if not taken:
        raise WrongAnswer("The program was never called.")
    if len(taken) < 5:
        raise WrongAnswer(
            f"The program was called {len(taken)} times; five at least show a spread."
        )
    if got < 0.5 * ONE_CALL:
        raise WrongAnswer(
            "Too short: the clock was stopped before the result was ready. Wait for it."
        )
    if got > 2.5 * ONE_CALL:
        raise WrongAnswer(
            "Too long: the first call compiles, and now and then something else runs. Neither "
            "belongs to a usual call."
        )
    return f"Right: {got * 1e3:.1f} ms, hiccups and compilation left out."


def _judge_speedup(speedup: Callable[..., Any], show: Show) -> str:
    order: list[tuple[str, float]] = []

    def contender(name: str) -> Callable[[], _Work]:
        def call() -> _Work:
            # The machine grows warm: every call takes a little longer than the one before.
            seconds = 0.001 * (1 + 0.06 * len(order))
            order.append((name, seconds))
            return _Work(seconds)

        return call

    got = ask_number(speedup, contender("a"), contender("b"))

    def drawn(figure: Figure) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.68))
        for name, look in (("a", LOOKS["full"]), ("b", LOOKS["gdn"])):
            places = [n for n, (who, _) in enumerate(order) if who == name]
            heights = [1e3 * order[n][1] for n in places]
            axes.plot(places, heights, look.marker, color=look.colour, label=name)
        axes.set(xlabel="call", ylabel="milliseconds", title="When you called which")
        axes.legend()

    show(drawn)
    names = "".join(name for name, _ in order)
    if min(names.count("a"), names.count("b")) < 5:
        raise WrongAnswer(
            f"{names.count('a')} calls of a and {names.count('b')} of b; five each at least."
        )
    turns = sum(before != after for before, after in itertools.pairwise(names))
    if turns < min(names.count("a"), names.count("b")) - 1:
        raise WrongAnswer(
            f"It says {got:.2f} times, yet both do the same work. All of one ran before the "
            "other, while the machine grew slower: call them in turns."
        )
    if not 0.75 < got < 1.33:
        raise WrongAnswer(f"Called in turns, and yet {got:.2f} times: take medians.")
    return f"Right: {got:.2f} times, which for equal work is 1."


def _judge_is_faster(is_faster: Callable[..., Any], show: Show) -> str:
    draws = np.random.default_rng(0)
    rounds, samples, noise = 200, 15, 0.08

    def share(ratio: float) -> float:
        accepted = 0
        for _ in range(rounds):
            first = np.exp(noise * draws.normal(size=samples))
            other = ratio * np.exp(noise * draws.normal(size=samples))
            accepted += bool(ask(is_faster, first, other))
        return 100 * accepted / rounds

    alike, better, worse = share(1.0), share(1.3), share(1 / 1.3)
    show(draw_bars(
        ["both alike", "a faster by 30%", "a slower by 30%"], [alike, better, worse], [0, 100, 0],
        xlabel="how often you say that a is faster, per cent",
    ))  # fmt: skip
    if worse > 5:
        raise WrongAnswer("It calls a faster where a is slower: less time is faster.")
    if alike > 8:
        raise WrongAnswer(
            f"Of two programs that are alike it calls the first faster in {alike:.0f}% of all "
            "cases: look at the spread, not only at the medians."
        )
    if better < 85:
        raise WrongAnswer(
            f"It sees 30% only in {better:.0f}% of all cases: too careful to be of use."
        )
    return f"Right: {alike:.0f}% false alarms, {better:.0f}% of the gains seen."


OUTLINE = Outline(
    "A benchmark that lies, and one that doesn't",
    questions=(
        Question(
            "without_waiting",
            "Two products of 1024 x 1024 matrices are timed twice: waiting for the result, and "
            "stopping the clock as soon as the call returns. How many times faster does the "
            "second look?",
            _without_waiting,
            unit="times",
            low=0.1,
            high=1e6,
            seconds=1,
        ),
        Question(
            "first_call",
            "A small jitted function (64 x 64) is called for the first time, and then again. How "
            "many times as long does the first call take?",
            _first_call,
            unit="times",
            low=0.1,
            high=1e7,
        ),
        Question(
            "unused_result",
            "A jitted function computes large products, uses them for nothing, and returns one "
            "entry of its input. How long does a call take?",
            _unused_result,
            options=("as long as the products", "next to nothing", "jax refuses to compile it"),
            seconds=1,
        ),
    ),
    exercises=(
        Exercise(
            "seconds_per_call",
            "Time a program: the usual seconds of one call, whatever happens at the first call or "
            "now and then.",
            _judge_seconds_per_call,
            (
                "Which calls should not count, and how do you know that a result is there?",
                "Call it once before the clock runs; stop the clock after block_until_ready.",
                "Keep one duration per call, and return the median of at least five.",
            ),
            minutes=10,
        ),
        Exercise(
            "speedup",
            "Compare two programs on a machine that grows slower as it grows warm.",
            _judge_speedup,
            (
                "What differs between the first and the last call, besides the program?",
                "Let both programs see the same machine: a, b, a, b, ...",
                "Median of a's durations over the median of b's, taken in turns.",
            ),
            minutes=10,
        ),
        Exercise(
            "is_faster",
            "Say from samples whether a is faster than b, or whether it is noise.",
            _judge_is_faster,
            (
                "Draw both sets of samples. When would you bet on one of them?",
                "The quartiles say where half of the samples lie.",
                "Say yes only if a's upper quartile lies below b's lower quartile.",
            ),
        ),
    ),
)
