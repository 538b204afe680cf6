"""Lesson 01, what attention costs: arithmetic of scores, caches and partial softmaxes."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from toolkit.attention import mixer
from toolkit.figures import in_words, log_axes, look
from toolkit.lab.lessons.drawing import draw_bars, draw_lines, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    are_close,
    ask,
    ask_number,
    ask_numbers,
)

HEADS, SIZE = 8, 64
CONTEXTS = 2 ** np.arange(7, 18)


def prefill_flops(tokens: int, name: str = "full") -> float:
    """Operations of one layer that reads a context."""
    return mixer(name).forward_flops(1, tokens, HEADS, SIZE, SIZE)


def step_bytes(tokens: int, name: str = "full") -> float:
    """Bytes one layer moves to write a token after a context, keys and values in 16 bits."""
    return mixer(name).step_bytes(1, tokens, HEADS, SIZE, SIZE, element_bytes=2)


def _curves(
    figure: Figure, cost: Callable[..., float], unit: str, title: str, marked: int, guess: float
) -> None:
    axes = figure.add_axes((0.13, 0.18, 0.7, 0.74))
    for name, words in (("full", "softmax"), ("gdn", "gated delta net")):
        costs = [cost(int(n), name) for n in CONTEXTS]
        axes.plot(CONTEXTS, costs, **look(name).line)
        axes.annotate(
            words, (CONTEXTS[-1], costs[-1]), xytext=(6, 0), textcoords="offset points",
            va="center", color=look(name).colour,
        )  # fmt: skip
    truth = cost(marked)
    axes.plot([marked], [truth], color=look("full").colour, marker="o", markersize=10)
    mark_guess(axes, marked, guess, truth)
    log_axes(axes, x_unit="tokens", y_unit=unit)
    axes.set(xlabel="context, tokens", ylabel=title)


def _doubled() -> Answer:
    short, long = prefill_flops(4096), prefill_flops(8192)
    linear = prefill_flops(8192, "gdn") / prefill_flops(4096, "gdn")
    words = (
        f"It grows {long / short:.3g} times, from {in_words(short, 'FLOP')} to "
        f"{in_words(long, 'FLOP')} (modelled): every token looks at every earlier one, so twice "
        f"the tokens make four times the pairs. A gated delta net's work grows {linear:.3g} times "
        "here, because its program takes longer chunks for the longer text: that is the kink. "
        "With chunks of one length it would double."
    )

    def draw(figure: Figure, guess: float) -> None:
        title = "FLOP to read the context"
        _curves(figure, prefill_flops, "FLOP", title, 8192, guess * prefill_flops(4096))

    return Answer(long / short, words, draw)


def _read_per_token() -> Answer:
    truth = step_bytes(65_536)
    words = (
        f"It reads {truth / 1e6:.0f} MB (modelled): 65,536 tokens x 8 heads x 64 channels x 2 "
        "(a key and a value) x 2 bytes. A gated delta net moves "
        f"{step_bytes(65_536, 'gdn') / 1e6:.2f} MB, whatever the context."
    )

    def draw(figure: Figure, guess: float) -> None:
        title = "bytes moved per written token"
        _curves(figure, step_bytes, "bytes", title, 65_536, guess * 1e6)

    return Answer(truth / 1e6, words, draw)


def _judge_score_flops(score_flops: Callable[..., Any], show: Show) -> str:
    contexts = [64, 256, 1024, 4096]
    wanted = [prefill_flops(n) for n in contexts]
    got = [ask_number(score_flops, n, HEADS, SIZE) for n in contexts]
    show(draw_lines(
        contexts, got if min(got) > 0 else None, wanted, xlabel="context, tokens", ylabel="FLOP",
        units=("tokens", "FLOP"),
    ))  # fmt: skip
    growth = got[-1] / got[-2] if got[-2] else 0.0
    if not 13 < growth < 17:
        raise WrongAnswer(
            f"Four times the context must make about sixteen times the pairs; yours grows "
            f"{growth:.3g} times."
        )
    for more, what in (((2 * HEADS, SIZE), "heads"), ((HEADS, 2 * SIZE), "channels")):
        if not math.isclose(ask_number(score_flops, 256, *more), 2 * got[1]):
            raise WrongAnswer(f"Twice the {what} must make twice the work; yours does not.")
    ratio = got[-1] / wanted[-1]
    if math.isclose(ratio, 0.5, rel_tol=0.01):
        raise WrongAnswer(
            "Half of it: there are two products (scores, and weights times values), and a "
            "multiplication with its addition is 2 FLOP."
        )
    if math.isclose(ratio, 2, rel_tol=0.01):
        raise WrongAnswer("Twice too much: token t looks at t tokens, not at the future.")
    if not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(got, wanted, strict=True)):
        raise WrongAnswer(f"The shape is right; the size is {ratio:.4g} times ours.")
    return "Right: 2 products x 2 FLOP x T(T+1)/2 pairs x heads x channels."


def _judge_longest_context(longest_context: Callable[..., Any], show: Show) -> str:
    cases = [
        ("32 layers, 32 heads", (80e9, 32, 32, 128, 2)),
        ("32 layers, 8 shared heads", (80e9, 32, 8, 128, 2)),
        ("the same in int8", (80e9, 32, 8, 128, 1)),
        ("a small model", (1e6, 2, 2, 16, 4)),
    ]
    got = [ask_number(longest_context, *case) for _, case in cases]
    per_token = [2 * layers * heads * size * width for _, (_, layers, heads, size, width) in cases]
    wanted = [case[0] // each for (_, case), each in zip(cases, per_token, strict=True)]
    names = [name for name, _ in cases[:3]]
    show(draw_bars(names, got[:3], wanted[:3], xlabel="tokens that fit 80 GB"))
    for (name, case), tokens, each in zip(cases, got, per_token, strict=True):
        if math.isclose(tokens * each / case[0], 2, rel_tol=0.01):
            raise WrongAnswer(f"{name}: twice too many; a token leaves a key and a value.")
        if tokens * each > case[0]:
            raise WrongAnswer(
                f"{name}: {tokens:,.0f} tokens need {in_words(tokens * each, 'bytes')}, more than "
                f"the {in_words(case[0], 'bytes')} there are."
            )
        if (tokens + 1) * each <= case[0]:
            raise WrongAnswer(f"{name}: after {tokens:,.0f} tokens one more would fit.")
        if tokens != int(tokens):
            raise WrongAnswer(f"{name}: tokens come whole; yours are {tokens}.")
    return f"Right: {wanted[0]:,.0f} tokens with all heads, {wanted[1]:,.0f} with shared."


def _judge_merge(merge: Callable[..., Any], show: Show) -> str:
    draws = random.Random(0)
    scores = [2 * draws.gauss(0, 1) for _ in range(12)]
    values = [[draws.gauss(0, 1) for _ in range(3)] for _ in scores]

    def attend(at: slice, scores: list[float]) -> tuple[list[float], float]:
        top = max(scores[at])
        weights = [math.exp(score - top) for score in scores[at]]
        total = sum(weights)
        out = [
            sum(w * v for w, v in zip(weights, channel, strict=True)) / total
            for channel in zip(*values[at], strict=True)
        ]
        return out, top + math.log(total)

    def merged(cut: int, scores: list[float]) -> tuple[list[float], float]:
        parts = *attend(slice(cut), scores), *attend(slice(cut, None), scores)
        answer = ask(merge, *parts)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise WrongAnswer("merge is to return two things: the output and its log-sum.")
        return ask_numbers(lambda: answer[0], 3), ask_number(lambda: answer[1])

    whole, total = attend(slice(None), scores)
    out, log_sum = merged(4, scores)
    channels = [f"channel {n}" for n in range(3)]
    show(draw_bars(channels, out, whole, xlabel="output of attention"))
    parts = attend(slice(4), scores)[0], attend(slice(4, None), scores)[0]
    if are_close(out, [sum(both) / 2 for both in zip(*parts, strict=True)]):
        raise WrongAnswer("Both parts count alike; the part with more weight must count more.")
    if not are_close(out, whole):
        raise WrongAnswer("The output is not that of attention to all twelve tokens.")
    if not are_close([log_sum], [total]):
        raise WrongAnswer(
            f"The output is right, its log-sum is not: {log_sum:.4g}, wanted {total:.4g}."
        )
    try:
        large, _ = merged(7, [score + 1000 for score in scores])
    except WrongAnswer:
        large = [math.inf] * 3
    if not are_close(large, whole):
        raise WrongAnswer(
            "With scores around 1,000 it is not finite or not the same: take the maximum out "
            "before exp."
        )
    return "Right: any number of parts can be merged, which is how long contexts are read."


OUTLINE = Outline(
    "What attention costs",
    questions=(
        Question(
            "doubling",
            "One layer of softmax attention reads 4,096 tokens, then a text of 8,192. By how many "
            "times does the work of reading grow?",
            _doubled,
            unit="times",
            low=0.1,
            high=1000,
        ),
        Question(
            "bytes_per_token",
            "The same layer (8 heads of 64 channels, 16 bits per number) has read 65,536 tokens "
            "and writes one more. How many megabytes does it read from its cache?",
            _read_per_token,
            unit="MB",
            low=1e-3,
            high=1e6,
        ),
    ),
    exercises=(
        Exercise(
            "score_flops",
            "Count the operations of causal softmax attention over a context: the scores and the "
            "weighted sum of values, without softmax itself.",
            _judge_score_flops,
            (
                "How many pairs (token, earlier token or itself) are there among T tokens?",
                "A score of one pair costs head_size multiplications and as many additions.",
                "Two products x 2 FLOP x T(T+1)/2 pairs x heads x head_size.",
            ),
        ),
        Exercise(
            "longest_context",
            "How many tokens fit into a memory that holds nothing but the cache?",
            _judge_longest_context,
            (
                "What does one token leave behind in one layer?",
                "A key and a value, each of kv_heads x head_size numbers, in every layer.",
                "Divide the memory by 2 x layers x kv_heads x head_size x bytes; round down.",
            ),
        ),
        Exercise(
            "merge",
            "Two devices each attended to half of a context. Merge what they found into what "
            "attention to the whole would give.",
            _judge_merge,
            (
                "L is the log of the sum of exp(score) over a part: how much weight the part has.",
                "The sums add up: exp(L) = exp(L_a) + exp(L_b). But exp(1000) is no float.",
                "out = exp(L_a - L) out_a + exp(L_b - L) out_b, number by number.",
            ),
            minutes=10,
            is_extra=True,
        ),
    ),
)
