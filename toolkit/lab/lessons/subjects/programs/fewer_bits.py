"""Lesson 21, numbers with fewer bits: int8 with a scale, float8, block floating point."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import LOOKS
from toolkit.lab.lessons.drawing import Drawing, draw_lines, png_of
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

LARGEST_E4M3, LEAST_E4M3 = 448.0, 2.0**-9
BLOCK = 32
_FORMATS = ("int8, one scale", "float8 e4m3", "float8 e5m2", "blocks of 32, one exponent each")


def as_int8(numbers: Sequence[float]) -> list[float]:
    """Numbers as multiples of one scale, max |x| / 127, from -127 to 127."""
    scale = max(map(abs, numbers)) / 127 or 1.0
    return [round(x / scale) * scale for x in numbers]


def as_float(x: float, mantissa: int, least_exponent: int, largest: float) -> float:
    """The nearest number with this many bits of mantissa, ties to even; too large is `largest`."""
    if not x:
        return 0.0
    step = 2.0 ** (max(math.frexp(x)[1] - 1, least_exponent) - mantissa)
    return math.copysign(min(abs(round(x / step) * step), largest), x)


def as_e4m3(x: float) -> float:
    """The nearest float8 of four bits of exponent and three of mantissa."""
    return as_float(x, 3, -6, LARGEST_E4M3)


def as_blocks(numbers: Sequence[float], size: int = BLOCK) -> list[float]:
    """Seven bits and a sign per number, and the power of two of its block's largest."""
    out: list[float] = []
    for start in range(0, len(numbers), size):
        block = numbers[start : start + size]
        step = 2.0 ** (math.frexp(max(map(abs, block)))[1] - 1 - 6)
        out += [max(-127, min(127, round(x / step))) * step for x in block]
    return out


FORMATS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    _FORMATS[0]: as_int8,
    _FORMATS[1]: lambda numbers: [as_e4m3(x) for x in numbers],
    _FORMATS[2]: lambda numbers: [as_float(x, 2, -14, 57344.0) for x in numbers],
    _FORMATS[3]: as_blocks,
}


def ordinary(count: int = 4096, seed: int = 0) -> list[float]:
    """Normal numbers."""
    draw = random.Random(seed)
    return [draw.gauss(0, 1) for _ in range(count)]


def with_outliers(count: int = 4096) -> list[float]:
    """Normal numbers, of which one in a thousand is a hundred times as large."""
    return [100 * x if n % 1000 == 500 else x for n, x in enumerate(ordinary(count))]


def error_of_ordinary(numbers: Sequence[float], rounded: Sequence[float]) -> float:
    """Root mean square error over root mean square, of the numbers that are no outliers."""
    kept = [
        (x, y) for n, (x, y) in enumerate(zip(numbers, rounded, strict=True)) if n % 1000 != 500
    ]
    return math.sqrt(sum((x - y) ** 2 for x, y in kept) / sum(x * x for x, _ in kept))


def errors(numbers: Sequence[float]) -> dict[str, float]:
    """format -> its error on these numbers."""
    return {name: error_of_ordinary(numbers, rounded(numbers)) for name, rounded in FORMATS.items()}


def product_errors() -> dict[str, float]:
    """format -> the error of a product of two matrices [64, 512] whose numbers are rounded."""
    import numpy as np

    a, b = (np.reshape(ordinary(64 * 512, seed), (64, 512)) for seed in (1, 2))
    exact = a @ b.T
    found = {}
    for name, rounded in FORMATS.items():
        left, right = (np.reshape(rounded(each.ravel().tolist()), each.shape) for each in (a, b))
        found[name] = float(np.linalg.norm(left @ right.T - exact) / np.linalg.norm(exact))
    return found


def picture() -> Drawing:
    """The error of each format as outliers grow."""
    factors = [2**power for power in range(10)]
    found = {name: [] for name in FORMATS}
    for factor in factors:
        numbers = [factor * x if n % 1000 == 500 else x for n, x in enumerate(ordinary(4000))]
        for name, error in errors(numbers).items():
            found[name].append(100 * error)

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.1, 0.17, 0.86, 0.66))
        for name, look in zip(FORMATS, ("full", "window", "gdn", "fourth"), strict=True):
            axes.loglog(factors, found[name], **LOOKS[look].line, label=name)
        axes.set(xlabel="size of the outliers, times the others", ylabel="error of the others, %")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)

    last = "; ".join(f"{name}: {values[-1]:.2g} per cent" for name, values in found.items())
    return Drawing(png_of(draw), f"Errors with outliers of {factors[-1]} (measured here). {last}.")


def beside_jax(to_e4m3: Callable[..., Any]) -> str:
    """A learner's float8 beside jax's own conversion of a thousand numbers."""
    import jax.numpy as jnp

    if to_e4m3(1.0) is None:
        return "write to_e4m3 first"
    numbers = [float(x) for x in jnp.asarray(ordinary(1000), jnp.float32)]
    theirs = jnp.asarray(numbers, jnp.float32).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    same = sum(to_e4m3(x) == y for x, y in zip(numbers, theirs.tolist(), strict=True))
    return f"{same} of 1000 numbers are those of jnp.float8_e4m3fn"


def _int8_error() -> Answer:
    error = 100 * error_of_ordinary(ordinary(), as_int8(ordinary()))
    return Answer(
        error,
        f"{error:.2g} per cent (measured here): the largest of 4,096 is nearly four standard "
        "deviations, so a step is about 3 per cent of one, and an error is a step over the root of "
        "twelve. One outlier widens the step for all.",
    )


def _outliers() -> Answer:
    found = errors(with_outliers())
    best = min(found, key=lambda name: found[name])
    listed = "; ".join(f"{name}: {error:.1%}" for name, error in found.items())
    return Answer(
        best,
        f"Errors of the ordinary numbers (measured here): {listed}. One scale must reach the "
        "outlier, and an exponent shared by 32 numbers makes the other 31 coarse. A float "
        "carries its own exponent and pays for it everywhere, with three bits of mantissa "
        "instead of seven.",
    )


def _judge_to_int8(to_int8: Callable[..., Any], show: Show) -> str:
    numbers = [0.9, -2.54, 0.0, 1.27, 0.33, -0.014, 2.0]
    found = ask(to_int8, list(numbers))
    if not (isinstance(found, tuple) and len(found) == 2):
        raise WrongAnswer("to_int8 must return two things: a list of codes and the scale.")
    codes, scale = [*found[0]], float(found[1])
    if len(codes) != len(numbers) or any(code != int(code) for code in codes):
        raise WrongAnswer("The codes must be whole numbers, one for each number.")
    back = [code * scale for code in codes]
    show(draw_lines(range(len(numbers)), back, as_int8(numbers), xlabel="number", ylabel="value"))
    if max(map(abs, codes)) > 127:
        raise WrongAnswer(
            f"A code is {max(codes, key=abs)}; eight bits hold -127 to 127: the scale is "
            "max |x| / 127."
        )
    if scale > 2.54 / 127 * 1.001:
        raise WrongAnswer(f"The scale is {scale:.4g}; {2.54 / 127:.4g} uses all codes.")
    worst = max(abs(x - y) for x, y in zip(numbers, back, strict=True))
    if worst > 0.501 * scale:
        raise WrongAnswer(
            f"An error is {worst / scale:.2g} of a step; wanted half at most: round to the nearest."
        )
    if any(code * 1.0 for code in ask(to_int8, [0.0, 0.0])[0]):
        raise WrongAnswer("Zeros alone come back as something else.")
    return "Right: each number is off by half a step at most."


def _judge_to_e4m3(to_e4m3: Callable[..., Any], show: Show) -> str:
    numbers = [
        0.0,
        1.0,
        1.05,
        1.07,
        -1.9,
        17.0,
        19.0,
        0.4,
        300.0,
        460.0,
        1e5,
        0.011,
        0.003,
        -0.0005,
    ]
    got, wanted = [ask_number(to_e4m3, x) for x in numbers], [as_e4m3(x) for x in numbers]
    show(draw_lines(range(len(numbers)), got, wanted, xlabel="number", ylabel="value"))
    for x, mine, truth in zip(numbers, got, wanted, strict=True):
        if mine == truth:
            continue
        if abs(x) > LARGEST_E4M3:
            why = "The largest is 448; what is larger becomes 448 here."
        elif abs(x) < 2**-6:
            why = "Below 2^-6 the steps stay 2^-9 wide: the exponent is no less than -6."
        elif x in (17.0, 19.0):
            why = "It lies in the middle: ties go to the even code, as `round` has it."
        else:
            why = "Steps are 2^(exponent - 3) wide, with 2^exponent <= |x| < 2^(exponent + 1)."
        raise WrongAnswer(f"{x:g} becomes {mine:g}; wanted {truth:g}. {why}")
    return "Right: every number has its own exponent and eight steps to the next."


def _judge_to_blocks(to_blocks: Callable[..., Any], show: Show) -> str:
    numbers = [x * (30 if n >= 8 else 1) for n, x in enumerate(ordinary(16))]
    numbers[0] = 3.999  # rounds to a code of its own, not to the next power
    got = [float(x) for x in ask(to_blocks, list(numbers), 8)]
    wanted = as_blocks(numbers, 8)
    drawn = draw_lines(range(16), got if len(got) == 16 else None, wanted, xlabel="number",
                       ylabel="value")  # fmt: skip
    show(drawn)
    if len(got) != 16:
        raise WrongAnswer(f"to_blocks returned {len(got)} numbers; wanted 16, as given.")
    if got == wanted:
        return "Right: a step per block, a power of two, and seven bits of it."
    if got == as_blocks(numbers, 16):
        raise WrongAnswer("That is one exponent for all: each block of `size` has its own.")
    if all(abs(x - y) < 1e-9 for x, y in zip(got, as_int8(numbers[:8]) + as_int8(numbers[8:]),
                                              strict=True)):  # fmt: skip
        raise WrongAnswer("That is max / 127 per block; the step is to be a power of two.")
    if abs(got[0]) >= 4:
        raise WrongAnswer(f"3.999 becomes {got[0]:g}: a code is at most 127, 1.984 here.")
    at = next(n for n in range(16) if got[n] != wanted[n])
    raise WrongAnswer(
        f"{numbers[at]:.4g} becomes {got[at]:.4g}; wanted {wanted[at]:.4g}. The step is 2^(e - 6), "
        "where 2^e <= max |x| < 2^(e + 1) in its block."
    )


OUTLINE = Outline(
    "Numbers with fewer bits",
    questions=(
        Question(
            "int8_error",
            "4,096 normal numbers are rounded to int8 with one scale for all, so that the largest "
            "becomes 127. What is the root mean square error, in per cent of a standard deviation?",
            _int8_error,
            unit="per cent",
            low=0.001,
            high=1000,
        ),
        Question(
            "outliers",
            "Now one number in a thousand is a hundred times as large, as in some channels of "
            "large models. All formats have eight bits per number. Which keeps the other 999 best?",
            _outliers,
            options=_FORMATS,
        ),
    ),
    exercises=(
        Exercise(
            "to_int8",
            "Codes from -127 to 127 and one scale for a list of numbers.",
            _judge_to_int8,
            (
                "The largest number in size becomes 127 or -127. What is one step then?",
                "scale = max |x| / 127; a code is x / scale, rounded to the nearest.",
                "scale = max(map(abs, numbers)) / 127 or 1.0",
            ),
        ),
        Exercise(
            "to_e4m3",
            "The nearest float8 with four bits of exponent and three of mantissa.",
            _judge_to_e4m3,
            (
                "math.frexp(x)[1] - 1 is the exponent e with 2^e <= |x| < 2^(e + 1).",
                "A step is 2^(max(e, -6) - 3); round(x / step) * step goes to the nearest, ties to "
                "even.",
                "Last, cut at 448 in size, and treat 0 by itself.",
            ),
            minutes=15,
        ),
        Exercise(
            "to_blocks",
            "Block floating point: one power of two per block, seven bits and a sign per number.",
            _judge_to_blocks,
            (
                "Take the numbers `size` at a time. What is the largest in size, and its exponent?",
                "The step is 2^(e - 6): the largest then has a code of 64 to 127.",
                "Codes are round(x / step), kept between -127 and 127.",
            ),
            minutes=10,
        ),
    ),
)
