"""Lesson 09, kill a worker and restart bit-exactly: real processes, one of which dies."""

import functools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import toolkit
from toolkit.figures import ACCENT, LOOKS
from toolkit.lab.lessons.drawing import draw_lines, draw_matrices
from toolkit.lab.lessons.outline import (
    Answer,
    Draw,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask_number,
    ask_numbers,
)
from toolkit.lab.lessons.subjects.parts.disk import judge_save

KILL_AT, SECONDS = 13, 600  # a job computes for half a minute; the machine may be busy


@dataclass(frozen=True)
class Run:
    """What a job said: (update, loss) of each attempt, and the digest of its final state."""

    attempts: tuple[tuple[tuple[int, float], ...], ...]
    digest: str


def run_job(kill_at: int = 0) -> Run:
    """Two processes train a tiny model; the second dies after an update (0: never) and restarts."""
    launcher = [
        sys.executable, "-m", "toolkit", "launch", "--processes", "2", "--devices", "1",
        "--restarts", "1", "--",
    ]  # fmt: skip
    package = str(Path(toolkit.__file__).parents[1])
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    with tempfile.TemporaryDirectory() as folder:
        worker = [
            sys.executable,
            "-m",
            "toolkit.lab.lessons.subjects.parts.worker",
            folder,
            str(kill_at),
        ]
        # Workers watch the launcher and end with it, also when this process ends or is stopped.
        try:
            done = subprocess.run(
                launcher + worker, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the job did not end within {SECONDS // 60} minutes, and was stopped: is the "
                "machine busy with something else? Run the cell again when it is not."
            ) from None
    return read_run(done.stdout, done.stderr)


def read_run(output: str, errors: str = "") -> Run:
    """A `Run` from what the first process said."""
    attempts: list[list[tuple[int, float]]] = []
    digest = ""
    for words in map(str.split, output.splitlines()):
        if words[:1] == ["update"]:
            step = int(words[1])
            if not attempts or step <= attempts[-1][-1][0]:
                attempts.append([])
            attempts[-1].append((step, float(words[2])))
        elif words[:1] == ["sha256"]:
            digest = words[1]
    if not digest:
        raise RuntimeError(f"the job did not end well: {errors.strip()[-400:]}")
    return Run(tuple(map(tuple, attempts)), digest)


def draw_runs(undisturbed: Run, killed: Run, guess: float) -> Draw:
    """The losses of both, where the second died, and where it went on, as guessed too."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.09, 0.17, 0.88, 0.68))
        known = LOOKS["full"]
        steps, losses = zip(*undisturbed.attempts[0], strict=True)
        axes.plot(
            steps, losses, color=known.colour, linewidth=7, alpha=0.35, label="left alone"
        )  # fmt: skip
        for number, attempt in enumerate(killed.attempts):
            steps, losses = zip(*attempt, strict=True)
            look = LOOKS[("window", "gdn")[number % 2]]
            label = ("killed", "restarted")[number % 2]
            axes.plot(steps, losses, **look.line, marker=look.marker, label=label)
            if number + 1 < len(killed.attempts):
                axes.plot(steps[-1], losses[-1], color=ACCENT, marker="X", markersize=14, zorder=6)
        first = killed.attempts[-1][0][0]
        for step, words, height in (
            (first, "went on with", 0.24),
            (KILL_AT - guess + 1, "by your guess with", 0.08),
        ):
            colour = ACCENT if words.startswith("by") else LOOKS["gdn"].colour
            axes.axvline(step, color=colour, linestyle=":")
            axes.annotate(
                f" {words} {step:g} ", (step, height), xycoords=("data", "axes fraction"),
                ha="left" if step < 6 else "right", color=colour,
            )  # fmt: skip
        axes.set(xlabel="update", ylabel="loss, nats per byte")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)

    return draw


@functools.cache
def _both() -> tuple[Run, Run]:
    return run_job(), run_job(KILL_AT)


def _computed_again() -> Answer:
    undisturbed, killed = _both()
    first = killed.attempts[-1][0][0]
    truth = KILL_AT - first + 1
    words = (
        f"{truth} are computed twice (counted: one of two real processes was killed just now): the "
        f"job began again with update {first}, after the last state that was saved whole. The "
        "other process lost its work too: a sum over two needs both."
    )
    return Answer(
        float(truth), words, lambda figure, guess: draw_runs(undisturbed, killed, guess)(figure)
    )


_BATCHES = "a batch is computed from the seed and the step"


def _same_batches() -> Answer:
    undisturbed, killed = _both()
    is_equal = undisturbed.digest == killed.digest
    words = (
        f"Their final states are {'equal in every bit' if is_equal else 'different'}: digests "
        f"{undisturbed.digest[:12]} and {killed.digest[:12]} (SHA-256, measured). The checkpoint "
        "holds parameters, moments and the step. The step is enough to draw the same batch again, "
        "on any number of processes."
    )
    return Answer(_BATCHES, words)


def _best_minutes() -> Answer:
    truth = math.sqrt(2 * 1 * 600)
    words = (
        f"Every {truth:.0f} minutes (modelled: Young's formula, the root of twice the save's time "
        "times the time between failures). Saving then costs "
        f"{100 / truth:.1f}% of the time, and failures cost as much again. At a thousand times "
        "the machines it is about one minute: one saves all the time."
    )
    return Answer(truth, words, _draw_lost)


def _draw_lost(figure: Figure, guess: float | None) -> None:
    """Time lost by the interval, with its two causes: one minute a save, a failure in 600."""
    axes = figure.add_axes((0.1, 0.17, 0.86, 0.68))
    minutes = np.geomspace(2, 600, 100)
    for name, label, shares in (
        ("window", "saving", 1 / minutes),
        ("gdn", "failures", minutes / 1200),
        ("full", "both", 1 / minutes + minutes / 1200),
    ):
        axes.loglog(minutes, 100 * shares, **LOOKS[name].line, label=label)
    best = math.sqrt(1200)
    axes.plot([best], [200 / best], "o", color=LOOKS["full"].colour, markersize=10)
    if guess is not None:
        axes.axvline(guess, color=ACCENT, linestyle=":", label="your guess")
    axes.set(xlabel="minutes between saves", ylabel="time lost, per cent", xlim=(2, 600))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)


def _judge_batch_at(batch_at: Callable[..., Any], show: Show) -> str:
    data = list(range(1000))
    steps = list(range(8))
    first = [ask_numbers(batch_at, 6, step, 7, data, 6) for step in steps]
    after = [ask_numbers(batch_at, 6, step, 7, data, 6) for step in steps[::-1]][::-1]
    drawn = draw_matrices(
        first, after, xlabel="entry of the batch", ylabel="step", title="asked again, in reverse"
    )
    show(drawn)
    if not {*data}.issuperset(entry for batch in first for entry in batch):
        raise WrongAnswer("There are entries that data does not have.")
    if first != after:
        at = next(step for step in steps if first[step] != after[step])
        raise WrongAnswer(
            f"Step {at} has another batch when it is asked for again: after a restart the run "
            "would see other data."
        )
    if len({*map(tuple, first)}) < len(steps):
        raise WrongAnswer("Some steps have the same batch: nothing new is ever seen.")
    if first[0] == ask_numbers(batch_at, 6, 0, 8, data, 6):
        raise WrongAnswer("Another seed gives the same batch.")
    return "Right: a function of step and seed; nobody has to remember where it was."


def _judge_best_interval(best_interval: Callable[..., Any], show: Show) -> str:
    saves = [1.0, 10.0, 60.0, 300.0]
    between = 36_000.0

    def lost(interval: float, save: float) -> float:
        return save / interval + interval / (2 * between)

    grid = [10 ** (6 * n / 20_000) for n in range(20_001)]
    wanted = [min(grid, key=lambda each, save=save: lost(each, save)) for save in saves]
    got = [ask_number(best_interval, save, between) for save in saves]
    show(draw_lines(
        saves, got if min(got) > 0 else None, wanted, xlabel="time of a save",
        ylabel="time between saves", units=("seconds", "seconds"),
    ))  # fmt: skip
    for save, answer, right in zip(saves, got, wanted, strict=True):
        if not answer > 0:
            raise WrongAnswer(f"A save of {save:g} s: every {answer:g} s is no interval.")
        if lost(answer, save) > 1.001 * lost(right, save):
            raise WrongAnswer(
                f"A save of {save:g} s, a failure per {between:,.0f} s: saving every {answer:,.0f} "
                f"s loses {100 * lost(answer, save):.3g}% of the time, "
                f"{100 * lost(right, save):.3g}% is possible."
            )
    return "Right: the root of twice the save's time times the time between failures."


OUTLINE = Outline(
    "Kill a worker; restart bit-exactly",
    questions=(
        Question(
            "computed_again",
            "Two processes train together for 20 updates and save after every fifth. One is "
            f"killed just after update {KILL_AT}; the job is started again. How many updates are "
            "computed twice?",
            _computed_again,
            unit="updates",
            low=0,
            high=KILL_AT,
            seconds=40,
        ),
        Question(
            "same_batches",
            "It ends with the very bits of a job that was left alone, although it was stopped in "
            "the middle of its data. How does it come back to the same batches?",
            _same_batches,
            options=(
                "the checkpoint holds the place in the data",
                "the other process remembers it",
                _BATCHES,
                "the data are read from the beginning again",
            ),
        ),
        Question(
            "best_minutes",
            "A save takes one minute, and something fails every 600 minutes on average. How many "
            "minutes should lie between two saves?",
            _best_minutes,
            unit="minutes",
            low=0.1,
            high=10_000,
        ),
    ),
    exercises=(
        Exercise(
            "batch_at",
            "Choose the entries of a batch so that a restarted run sees exactly what it would have "
            "seen.",
            _judge_batch_at,
            (
                "What must a checkpoint hold if your function remembers something?",
                "A generator made anew for each step remembers nothing.",
                'random.Random(f"{seed} {step}").sample(data, size)',
            ),
        ),
        Exercise(
            "save",
            "Replace the file “state” so that a power cut at any moment leaves the old state or "
            "the new one.",
            judge_save,
            (
                "While “state” itself is written, there is neither.",
                "Write under another name, and rename: that happens in one moment.",
                "A renamed file that never reached the disk is empty after a cut: sync it before.",
            ),
            minutes=10,
        ),
        Exercise(
            "best_interval",
            "A save takes some seconds, failures come every so many on average, and each loses "
            "half an interval. Which interval loses least?",
            _judge_best_interval,
            (
                "Write down the share of time lost: save / interval + interval / (2 x between).",
                "Where is the derivative by the interval zero?",
                "math.sqrt(2 * save * between)",
            ),
        ),
    ),
)
