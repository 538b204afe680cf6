"""Lesson 16, four bits are enough, one needs a memory: rounding, feedback, codes."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, look
from toolkit.lab.gradients.sent import stored_runs
from toolkit.lab.lessons.drawing import draw_bars, draw_lines, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_array,
)
from toolkit.parallel.gradients import COMPRESSORS, PATTERNS, cyclic_code
from toolkit.parallel.gradients.peers import Along

DEVICES, NUMBERS, STEPS = 4, 64, 6
CONSERVED = 1e-4
FOUR = "integers from -7 to 7"
# Where no words lie on those of another point.
BESIDE = {
    "ternary": (-6, 4), "sign, feedback": (5, -13), "top 1 %, feedback": (5, -13),
    "int4": (-8, -4), "int4, feedback": (8, -4),
}  # fmt: skip
ENOUGH = {
    "the largest 1 %": "top 1 %",
    "signs with a scale": "sign",
    FOUR: "int4",
    "the integers -1, 0 and 1": "ternary",
}


def _which() -> Answer:
    runs = {label: (sent, loss) for label, sent, loss in stored_runs()}
    above = {label: runs[label][1] - runs["dense"][1] for label in ENOUGH.values()}
    fed = {label: runs[f"{label}, feedback"][1] - runs["dense"][1] for label in ("sign", "top 1 %")}
    words = (
        "Four bits (recorded here, a small model on eight replicas, five seeds, each at its own "
        f"best rate): {above['int4']:+.3f} nats from dense. Three values cost "
        f"{above['ternary']:+.3f}, signs {above['sign']:+.3f}, the largest 1 % "
        f"{above['top 1 %']:+.3f}. With a memory signs cost {fed['sign']:+.3f} and the largest 1 % "
        f"{fed['top 1 %']:+.3f}."
    )

    def draw(figure: Figure, guess: str) -> None:
        axes = figure.add_axes((0.12, 0.2, 0.84, 0.72))
        for label, (sent, loss) in runs.items():
            own = look("full" if "feedback" in label else "window")
            axes.plot([sent], [loss], own.marker, color=own.colour, markersize=8)
            place = BESIDE.get(label, (5, 4))
            side = "left" if place[0] > 0 else "right"
            axes.annotate(label, (sent, loss), place, textcoords="offset points", ha=side)
        sent, loss = runs[ENOUGH[guess]]
        axes.plot(
            [sent], [loss], "D", color=ACCENT, markersize=16, markerfacecolor="none",
            markeredgewidth=2,
        )  # fmt: skip
        axes.set(xscale="log", xlabel="bytes that a device sends per step", ylabel="loss, nats")

    return Answer(FOUR, words, draw)


def _bytes() -> Answer:
    along, how = Along.over({"data": 8}, 8), PATTERNS["scatter_gather"]
    sent = {
        bits: sum(each for _, each in how.sends(COMPRESSORS[f"int{bits}"](64), along, 512))
        for bits in (4, 8)
    }

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.12, 0.2, 0.84, 0.72))
        axes.plot([4, 8, 32], [sent[4], sent[8], 28_672], **look("full").line, marker="o")
        mark_guess(axes, 4, guess, sent[4])
        axes.set(xlabel="bits", ylabel="bytes sent per device", ylim=(0, 31_000))

    return Answer(
        sent[4],
        f"{sent[4]:,.0f} bytes, as the compiled program's collectives count (modelled here, tested "
        "there): 2,048 for the nibbles and 64 scales of 4 bytes are 2,304; a device sends 7/8 of "
        f"them in the all-to-all, and 7/8 in the all-gather. Eight bits send {sent[8]:,.0f}.",
        draw,
    )


def _wrapped() -> Answer:
    found = int(jnp.sum(jnp.full(8, 100, jnp.int8), dtype=jnp.int8))
    return Answer(
        float(found),
        f"{found} (computed here): 800 modulo 256. `psum` adds in the type that it is given, and "
        "nothing warns. Codes are decoded first and added in float32; that is why all exchanges "
        "here move codes (all-to-all, all-gather) and never add them.",
    )


def _sign(x: np.ndarray) -> np.ndarray:
    return np.abs(x).mean(-1, keepdims=True) * np.where(x >= 0, 1.0, -1.0)


def _run(feedback: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was sent and given in all, means over devices, and the last memory."""
    rng = np.random.default_rng(3)
    scale = np.arange(1, DEVICES + 1.0)[:, None]  # devices differ, and so must their memories
    memory, sent, given = np.zeros((DEVICES, NUMBERS)), 0.0, 0.0
    for _ in range(STEPS):
        gradients = scale * rng.normal(0.3, 1.0, (DEVICES, NUMBERS))
        value = ask(feedback, gradients, memory, _sign)
        if not isinstance(value, tuple) or len(value) != 2:
            raise WrongAnswer("error_feedback must return two things: what is sent, the memory.")
        now, memory = (
            ask_array(lambda part=part: part, (DEVICES, NUMBERS)) for part in value
        )  # fmt: skip
        sent, given = sent + now.mean(0), given + gradients.mean(0)
    return np.asarray(sent), np.asarray(given), memory


def _wanted(gradients: np.ndarray, memory: np.ndarray, compress: Any, wrong: str = "") -> tuple:
    given = gradients + (0 if wrong == "unused" else memory)
    sent = compress(given)
    left = (gradients if wrong == "before" else given) - sent
    if wrong == "averaged":
        left = np.broadcast_to(left.mean(0), left.shape)
    if wrong == "first":
        left = np.broadcast_to(left[0], left.shape)
    return sent, memory + left if wrong == "twice" else left


_WRONG = {
    "before": "The memory is of p = gradient + memory, which was compressed, not of the gradient.",
    "averaged": "The memories were averaged over devices: each must keep its own.",
    "first": "All devices have the memory of the first: that is what out_specs=P() would do.",
    "twice": "The old memory is in p already; added again it grows without end.",
    "unused": "The memory is kept and never sent: compress gradient + memory.",
}


def _judge_feedback(feedback: Callable[..., Any], show: Show) -> str:
    sent, given, memory = _run(feedback)
    show(draw_lines(
        np.arange(NUMBERS), sent + memory.mean(0), given,
        xlabel="number", ylabel="sent so far + mean memory",
    ))  # fmt: skip
    for wrong, reason in _WRONG.items():
        other = _run(functools.partial(_wanted, wrong=wrong))
        if np.allclose(sent, other[0], atol=CONSERVED) and np.allclose(
            memory, other[2], atol=CONSERVED
        ):
            raise WrongAnswer(reason)
    if np.abs(sent + memory.mean(0) - given).max() > CONSERVED:
        raise WrongAnswer(
            "What was sent and the mean memory are not what was given: something is lost."
        )
    if not np.allclose(memory, _run(_wanted)[2], atol=CONSERVED):
        raise WrongAnswer("Nothing is lost, but it is not compress(...) that was sent.")
    return "Right: nothing is lost, only late."


def _judge_decode(decode: Callable[..., Any], show: Show) -> str:
    code = cyclic_code(8, 3)
    worst, shown = 0.0, np.ones(8)
    for late in itertools.combinations(range(8), 3):
        answered = [worker for worker in range(8) if worker not in late]
        weights = ask_array(decode, (8,), code.copy(), list(answered))
        if np.abs(weights[list(late)]).max() > 1e-9:
            raise WrongAnswer(f"Workers {late} did not answer: their weights must be 0.")
        off = float(np.abs(weights @ code - 1).max())
        if not off <= worst:
            worst, shown = off, weights @ code
    drawn = draw_bars(
        [f"part {n}" for n in range(8)], list(shown), [1.0] * 8, xlabel="times in the sum"
    )
    show(drawn)
    if not worst < 1e-6:
        raise WrongAnswer(
            "Each part must be in the sum once; for some three late workers it is not."
        )
    return "Right: whichever three are late, the sum is whole."


OUTLINE = Outline(
    "Four bits are enough, one needs a memory",
    questions=(
        Question(
            "bytes",
            "Eight devices average 4,096 gradients. A ring of float32 sends 28,672 bytes per "
            "device. How many does a device send if they go in four bits, with a float32 scale per "
            "64, by an all-to-all of parts and an all-gather of the means?",
            _bytes,
            unit="bytes",
            low=1,
            high=1e6,
        ),
        Question(
            "which",
            "Nothing remembers what was not sent. Which of these trains as well as dense "
            "gradients, to 0.02 nats?",
            _which,
            options=tuple(ENOUGH),
        ),
        Question(
            "wrapped",
            "Eight devices hold the eight-bit integer 100 and add by `jax.lax.psum`. What is the "
            "sum?",
            _wrapped,
            unit="in int8",
            low=-1000,
            high=1000,
            seconds=1,
        ),
    ),
    exercises=(
        Exercise(
            "error_feedback",
            "What is sent, and what each device remembers.",
            _judge_feedback,
            (
                "Compress p = gradient + memory.",
                "The new memory is what p lost: p - sent, for every device by itself.",
                "p = gradients + memory; sent = compress(p); return sent, p - sent",
            ),
            minutes=10,
        ),
        Exercise(
            "decode",
            "Weights of the workers that answered, so that each part counts once.",
            _judge_decode,
            (
                "a^T B = 1^T with a = 0 for who is late: solve for the others only.",
                "B[answered].T @ a = ones: more equations than unknowns, but solvable.",
                "a = np.zeros(len(code)); a[answered] = np.linalg.lstsq(code[answered].T, "
                "np.ones(len(code)), rcond=None)[0]; return a",
            ),
            minutes=10,
        ),
    ),
)
