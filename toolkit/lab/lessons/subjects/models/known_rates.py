"""Lesson 18: a noisy quadratic, where the answer of a search is known."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, look
from toolkit.lab.lessons.outline import (
    Answer,
    Draw,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask_number,
)
from toolkit.lr import NoisyQuadratic

SHORT, LONG, TRIES = 20, 1000, 12
LOW, HIGH = 1e-4, 10.0
MOST = 1.05  # times the best loss


def loss_at(problem: NoisyQuadratic, rate: float, steps: int) -> float:
    """Expected loss after `steps` at one rate; infinite where the steepest direction diverges."""
    if not 0 < rate < 2 / problem.curvatures.max():
        return np.inf
    return problem.loss(problem.constant_rate_moment(rate, steps))


def _curve(problem: NoisyQuadratic, steps: int) -> tuple[np.ndarray, np.ndarray]:
    rates = np.geomspace(LOW, 1.99 / problem.curvatures.max(), 400)
    return rates, np.array([loss_at(problem, rate, steps) for rate in rates])


def _horizon() -> Answer:
    problem = NoisyQuadratic.harmonic(batch=10, dimensions=100)
    curves = {steps: _curve(problem, steps) for steps in (SHORT, LONG)}
    best = {steps: rates[losses.argmin()] for steps, (rates, losses) in curves.items()}
    truth = float(best[SHORT] / best[LONG])
    rates, losses = curves[LONG]
    price = float(np.interp(best[SHORT], rates, losses) / losses.min())
    words = (
        f"It is {truth:.2g} times smaller: {best[LONG]:.2g} against {best[SHORT]:.2g} (computed, "
        "without sampling). Early on a large rate pays; in the end what is left is noise, which "
        f"grows with the rate. Who takes the winner of {SHORT} steps for {LONG:,} ends at "
        f"{price:.2g} times the loss that was possible: this is called short-horizon bias."
    )

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.68))
        for steps, name in ((SHORT, "window"), (LONG, "full")):
            own = look(name)
            rates, losses = curves[steps]
            axes.loglog(rates, losses, **own.line, label=f"after {steps:,} steps")
            axes.plot([best[steps]], [losses.min()], own.marker, color=own.colour, markersize=10)
        at = best[SHORT] / guess
        axes.axvline(at, color=ACCENT, linewidth=1.5, linestyle=":")
        axes.annotate(
            "your guess", (at, 0.97), xytext=(6, 0), textcoords="offset points", va="top",
            xycoords=axes.get_xaxis_transform(), color=ACCENT, annotation_clip=True,
        )  # fmt: skip
        axes.set(xlabel="learning rate", ylabel="expected loss", xlim=(LOW, 8))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)

    return Answer(truth, words, draw)


PROBLEMS = {
    "noise as usual": NoisyQuadratic.harmonic(batch=10, dimensions=100),
    "little noise": NoisyQuadratic.harmonic(batch=200, dimensions=100),
    "forty times as steep": NoisyQuadratic(
        40 / np.arange(1, 51), 40 / np.arange(1, 51), np.ones(50)
    ),
}


def _judge_search_rate(search_rate: Callable[..., Any], show: Show) -> str:
    worst = 0.0
    for name, problem in PROBLEMS.items():
        tried: list[float] = []

        def loss(rate: Any, problem: NoisyQuadratic = problem, tried: list[float] = tried) -> float:
            tried.append(float(rate))
            if len(tried) > TRIES:
                raise WrongAnswer(f"{TRIES} tries were allowed; yours asks for another.")
            return loss_at(problem, float(rate), 200)

        found = ask_number(search_rate, loss, LOW, HIGH, TRIES)
        rates, losses = _curve(problem, 200)
        show(_tries(name, rates, losses, problem, tried, found))
        ratio = loss_at(problem, found, 200) / losses.min()
        if not np.isfinite(ratio):
            raise WrongAnswer(
                f"“{name}”: at the rate {found:.3g} it diverges. Infinite losses are answers too: "
                "the best rate lies below."
            )
        if ratio > MOST:
            inside = sum(rate < rates[losses.argmin()] for rate in tried)
            hint = (
                "Nearly all tries were above the best rate: divide the range in its logarithm."
                if inside < 2
                else "Once a rough place is known, spend what is left around it."
            )
            raise WrongAnswer(
                f"“{name}”: {found:.3g} ends at {ratio:.2f} times the best loss, that of "
                f"{rates[losses.argmin()]:.2g}; {MOST} is the target. {hint}"
            )
        worst = max(worst, ratio)
    return f"Right: within {100 * (worst - 1):.2g} % of the best on all three."


def _tries(
    name: str,
    rates: np.ndarray,
    losses: np.ndarray,
    problem: NoisyQuadratic,
    tried: list[float],
    found: float,
) -> Draw:
    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.1, 0.17, 0.86, 0.7))
        axes.loglog(rates, losses, **look("full").line, label=name)
        top = losses.max() * 2  # where it diverges
        heights = [min(loss_at(problem, rate, 200), top) for rate in tried]
        places = np.maximum(tried, LOW / 10)  # also what is no rate
        axes.plot(places, heights, "D", color=ACCENT, markersize=6, label="your tries")
        if np.isfinite(found) and found > 0:
            axes.axvline(found, color=ACCENT, linestyle=":", label="your answer")
        axes.set(xlabel="learning rate (top row: it diverges)", ylabel="loss after 200 steps")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)

    return draw


OUTLINE = Outline(
    "A search whose answer is known",
    questions=(
        Question(
            "horizon",
            "A quadratic of 100 directions, curvatures 1, 1/2, 1/3, ..., noisy gradients. One rate "
            "ends lowest after 20 steps, another after 1,000. How many times smaller is the "
            "second?",
            _horizon,
            unit="times",
            low=0.01,
            high=1e4,
        ),
    ),
    exercises=(
        Exercise(
            "search_rate",
            "Find the best constant rate between two bounds with twelve runs.",
            _judge_search_rate,
            (
                "Rates matter by their ratios: walk in log(rate).",
                "The loss falls and then rises: of two tries the worse one says which end of the "
                "range to drop. Twice infinite: drop the upper one.",
                "Golden section: tries at 0.382 and 0.618 of the range in log(rate); the one that "
                "stays inside is used again, so each round costs one try.",
            ),
            minutes=15,
        ),
    ),
)
