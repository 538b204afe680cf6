"""Lesson 12: a loop that carries its state to the next one sees the future."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, look
from toolkit.lab.lessons.drawing import draw_bars, draw_matrices
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

TOKENS, WIDTH, LOOPS = 32, 8, 3
_WEIGHTS = np.random.default_rng(0).normal(size=(3, WIDTH, WIDTH)) / np.sqrt(WIDTH)
EMPTY = np.zeros((WIDTH, WIDTH))


def step(x_t: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token [width] of linear attention with a residual; its output, the new state."""
    q, k, v = _WEIGHTS @ x_t
    state = state + np.outer(k, v)
    return x_t + np.tanh(q @ state / 4), state


def layer(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same over a sequence [time, width], from a state on."""
    rows = []
    for x_t in x:
        row, state = step(x_t, state)
        rows.append(row)
    return np.stack(rows), state


def looped(x: np.ndarray, loops: int, *, carries_state: bool) -> np.ndarray:
    """The layer run several times; every loop begins with an empty state or the last one's."""
    state = EMPTY
    for _ in range(loops):
        x, state = layer(x, state if carries_state else EMPTY)
    return x


def text(seed: int = 1) -> np.ndarray:
    """Something to read [time, width]."""
    return np.random.default_rng(seed).normal(size=(TOKENS, WIDTH))


def _outputs_changed() -> Answer:
    x, changed = text(), text()
    changed[-1] = text(2)[-1]
    moved = {
        carries: np.abs(
            looped(changed, 2, carries_state=carries) - looped(x, 2, carries_state=carries)
        ).max(axis=1)
        for carries in (True, False)
    }
    shares = {carries: 100 * float((each[:-1] > 0).mean()) for carries, each in moved.items()}
    words = (
        f"{shares[True]:.0f} per cent (measured here): the first loop ends having read the last "
        "token, and the second starts from there. Such a model learns to look up the answer, and "
        "its training loss is one that it never reaches when it writes. With an empty state per "
        "loop "
        f"none of them changes ({shares[False]:.0f} per cent)."
    )

    def draw(figure: Figure, guess: float | None) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.68))
        place = np.arange(1, TOKENS + 1)
        if guess is not None:
            least = TOKENS - 0.5 - guess / 100 * (TOKENS - 1)
            axes.axvspan(least, TOKENS - 0.5, color=ACCENT, alpha=0.15, linewidth=0)
            axes.text(TOKENS - 0.6, 0.97, "your guess", color=ACCENT, ha="right", va="top",
                      transform=axes.get_xaxis_transform())  # fmt: skip
        for carries, name, words in (
            (True, "full", "state carried"), (False, "window", "state reset"),
        ):  # fmt: skip
            own = look(name)
            axes.plot(place, moved[carries], **own.line, marker=own.marker, label=words)
        axes.set(xlabel="token", ylabel="change of the output", xlim=(0.5, TOKENS + 0.8))
        axes.set_yscale("log")  # what does not change is not drawn
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)

    return Answer(shares[True], words, draw)


def _one_ahead(x: np.ndarray) -> np.ndarray:
    return x + 0.5 * np.concatenate([x[1:], x[:1] * 0])


def _first_sees_last(x: np.ndarray) -> np.ndarray:
    out = np.cumsum(x, axis=0)
    out[0] += x[-1]
    return out


def _open_first_chunk(x: np.ndarray) -> np.ndarray:
    out = np.cumsum(x, axis=0)
    out[:8] = out[7]
    return out


MODELS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool]] = {
    "one loop": (lambda x: looped(x, 1, carries_state=False), False),
    "two loops, state reset": (lambda x: looped(x, 2, carries_state=False), False),
    "two loops, state carried": (lambda x: looped(x, 2, carries_state=True), True),
    "looks one token ahead": (_one_ahead, True),
    "first token sees the last": (_first_sees_last, True),
    "first chunk without mask": (_open_first_chunk, True),
    "a faint leak of the mean": (lambda x: np.cumsum(x, axis=0) + 1e-3 * x.mean(axis=0), True),
}
"""Model -> whether it sees the future."""


def _judge_sees_future(sees_future: Callable[..., Any], show: Show) -> str:
    answers = [ask(sees_future, model, text()) for model, _ in MODELS.values()]
    for answer in answers:
        if not isinstance(answer, bool | np.bool_):
            raise WrongAnswer(
                f"sees_future returned {type(answer).__name__}; wanted True or False. Is an any() "
                "missing?"
            )
    truth = [sees for _, sees in MODELS.values()]
    show(draw_bars(
        list(MODELS), [float(s) for s in answers], [float(t) for t in truth],
        xlabel="sees the future: 1, is causal: 0",
    ))  # fmt: skip
    for name, mine, sees in zip(MODELS, answers, truth, strict=True):
        if mine and not sees:
            raise WrongAnswer(
                f"“{name}” is causal, and yours says that it sees the future. An output may well "
                "change where its own token does."
            )
        if sees and not mine:
            why = {
                "looks one token ahead": "Compare every output before the change.",
                "first token sees the last": "Compare every output before the change.",
                "first chunk without mask": "Change tokens at every place, not at the end only.",
                "a faint leak of the mean": "A thousandth is a leak: the past is to be equal.",
            }.get(name, "Change a token and look at the outputs before it.")
            raise WrongAnswer(f"“{name}” sees the future, and yours does not notice. {why}")
    return "Right: all five leaks are found, and no causal model is blamed."


def _one_state(x: np.ndarray) -> np.ndarray:
    """What comes of writing with one state for all loops."""
    rows, state = [], EMPTY
    for row in x:
        for _ in range(LOOPS):
            row, state = step(row, state)
        rows.append(row)
    return np.stack(rows)


def _judge_decode(decode: Callable[..., Any], show: Show) -> str:
    x, rows = text(), []
    states: Any = [EMPTY] * LOOPS
    for x_t in x:
        value = ask(decode, step, x_t, list(states))
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list)):
            raise WrongAnswer("decode must return two things: the output and a list of states.")
        rows.append(ask_array(lambda row: row, (WIDTH,), value[0]))
        if len(value[1]) != LOOPS:
            raise WrongAnswer(f"decode returned {len(value[1])} states; wanted {LOOPS}, as given.")
        states = list(value[1])
    got, wanted = np.stack(rows), looped(x, LOOPS, carries_state=False)
    drawn = draw_matrices(
        got.T, wanted.T, xlabel="token", ylabel="channel", title="all tokens at once"
    )
    show(drawn)
    if not np.allclose(got, wanted, atol=1e-9):
        if not any(np.any(state) for state in states):
            raise WrongAnswer("The states come back empty: nothing is remembered.")
        if np.allclose(got, looped(x, 1, carries_state=False)):
            raise WrongAnswer("That is one loop; there is a state for each of three.")
        if np.allclose(got, _one_state(x), atol=1e-9):
            raise WrongAnswer(
                "That is one state for all loops: the second loop reads what the first has just "
                "written. Every loop has its own."
            )
        first = int(np.argmax(np.abs(got - wanted).max(axis=1) > 1e-9)) + 1
        raise WrongAnswer(
            f"From token {first} on it is not what the model computes from all tokens at once."
        )
    return "Right: one state per loop, and writing is what training was."


OUTLINE = Outline(
    "The causality trap",
    questions=(
        Question(
            "outputs_changed",
            "A layer of linear attention reads 32 tokens twice. The state with which the first "
            "loop ends is the one with which the second begins. Somebody changes the last token: "
            "which share of the outputs before it change, in per cent?",
            _outputs_changed,
            unit="per cent",
            low=0,
            high=100,
        ),
    ),
    exercises=(
        Exercise(
            "sees_future",
            "A test of causality: does any output depend on a later token?",
            _judge_sees_future,
            (
                "Causal means: change tokens from some place on, and no output before it moves.",
                "Do that for every place, and compare every output before it, exactly.",
                "for t in range(1, len(x)): y = x.copy(); y[t:] += 1; "
                "if (model(y)[:t] != model(x)[:t]).any(): return True",
            ),
            minutes=10,
        ),
        Exercise(
            "decode",
            "One token through all loops of a model, so that writing equals reading.",
            _judge_decode,
            (
                "When all tokens are read at once, which earlier tokens has loop 2 seen, and in "
                "what form?",
                "Loop 2 has its own state, made of the outputs of loop 1.",
                "for n, state in enumerate(states): x_t, states[n] = step(x_t, state)",
            ),
            minutes=10,
        ),
    ),
)
