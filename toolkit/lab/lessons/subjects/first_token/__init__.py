"""Lesson 17, why is the first token late: queues, the knee, a scheduler, two pools by hand."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, look
from toolkit.lab.lessons.drawing import mark_guess
from toolkit.lab.lessons.outline import Answer, Exercise, Outline, Question
from toolkit.lab.lessons.subjects.first_token.pools import judge_pools
from toolkit.lab.lessons.subjects.first_token.race import judge_plan
from toolkit.lab.serving.knee import LOADS, SHARE, GoodputPanel


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
            seconds=12,
        ),
    ),
    exercises=(
        Exercise(
            "plan",
            "A scheduler in fifteen lines, raced against first come, first served and an oracle.",
            judge_plan,
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
            judge_pools,
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
