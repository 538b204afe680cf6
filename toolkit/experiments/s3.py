"""S3, the smallest group whose elements do not commute: does looping a layer help to track it?

One delta-rule step a token reflects once; an element of S3 may need two reflections. Loops give a
layer several steps a token, and negative eigenvalues make the reflections possible.
"""

from toolkit.experiments.experiment import Claim, Results
from toolkit.experiments.state_tracking import (
    SOLVED,
    TRAINED,
    experiment,
    in_words,
    make_draw,
    recipe,
    solved_longer,
)

LOOPS = (1, 2, 4)
STEPS = 2000
# A difference of means that is smaller is not called one.
_MARGIN = 0.05


def _label(loops: int, is_negative: bool) -> str:
    return f"T={loops}, beta up to {1 + is_negative}"


def _mean(results: Results, loops: int, is_negative: bool) -> float:
    found = solved_longer(results, _label(loops, is_negative))
    return sum(found) / len(found)


def _looping_helps(results: Results) -> tuple[bool, str]:
    means = [_mean(results, loops, True) for loops in LOOPS]
    words = in_words(results, [_label(loops, True) for loops in LOOPS])
    return max(means[1:]) > means[0] + _MARGIN, words


def _grows(results: Results) -> tuple[bool, str]:
    one, two, four = (_mean(results, loops, True) for loops in LOOPS)
    return one + _MARGIN < two < four - _MARGIN, f"means {one:.2f}, {two:.2f}, {four:.2f}"


def _is_solved(results: Results) -> tuple[bool, str]:
    labels = [_label(loops, True) for loops in LOOPS]
    best = max(min(solved_longer(results, label)) for label in labels)
    return best >= SOLVED, f"best setting, worst seed: {best:.2f}"


def _negative_helps(results: Results) -> tuple[bool, str]:
    gains = [_mean(results, loops, True) - _mean(results, loops, False) for loops in LOOPS]
    words = ", ".join(f"T={loops}: {gain:+.2f}" for loops, gain in zip(LOOPS, gains, strict=True))
    return max(gains) > _MARGIN and min(gains) > -_MARGIN, f"gain of beta up to 2: {words}"


EXPERIMENT = experiment(
    name="s3",
    title=f"Does looping one layer help to track S3 beyond {TRAINED} elements?",
    settings={
        _label(loops, is_negative): recipe("S3", "gdn", loops, steps=STEPS, is_negative=is_negative)
        for is_negative in (True, False)
        for loops in LOOPS
    },
    claims=(
        Claim("looping helps: T=2 or 4 tracks S3 farther than T=1", _looping_helps),
        Claim("more loops help more: T=4 beats T=2 beats T=1", _grows),
        Claim("some number of loops solves it with every seed", _is_solved),
        Claim("negative eigenvalues help, and at no T hurt", _negative_helps),
    ),
    draw=make_draw(1 / 6, "Running product in S3"),
    beyond="A5 and S5, which no fixed number of commuting steps can follow: "
    "`toolkit.experiments.tasks.WordProblem` draws them, and they want tens of thousands of steps.",
    minutes=14,
)
