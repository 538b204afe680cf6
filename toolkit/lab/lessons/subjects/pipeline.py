"""Lesson 07, draw 1F1B, then beat its bubble: pipeline schedules written, checked and drawn."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import INK, LOOKS
from toolkit.lab.lessons.drawing import draw_lines
from toolkit.lab.lessons.outline import (
    Answer,
    Draw,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_number,
)
from toolkit.schedules import (
    Schedule,
    Task,
    Timeline,
    faults,
    gpipe,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
)

DEVICES, MICROBATCHES = 4, 8
# Colour of the box and of its words: dark, dark, dark, light.
_LOOKS = {
    "F": (LOOKS["full"].colour, "white"),
    "B": (LOOKS["gdn"].colour, "white"),
    "I": (LOOKS["window"].colour, "white"),
    "W": ("#e3d3e8", INK),
}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw_timeline(timeline: Timeline, title: str = "") -> Draw:
    """A row per device, a box per task with its microbatch; what is white is lost."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.1, 0.17, 0.88, 0.66))
        seen = {}
        has_room = timeline.makespan < 40
        letter = lambda task: task.kind if has_room else ""  # noqa: E731
        for device, row in enumerate(timeline.spans):
            for task, start, end in row:
                colour, ink = _LOOKS[task.kind]
                box = axes.barh(
                    device, float(end - start), 0.8, left=float(start), color=colour,
                    edgecolor="white", linewidth=0.8,
                )  # fmt: skip
                seen.setdefault(task.kind, box)
                middle = float(start + end) / 2
                axes.text(
                    middle, device, f"{letter(task)}{task.microbatch}", ha="center", va="center",
                    color=ink, fontsize=8,
                )  # fmt: skip
        axes.set_yticks(
            range(len(timeline.spans)), [f"device {d}" for d in range(len(timeline.spans))]
        )
        axes.invert_yaxis()
        axes.set(xlim=(0, float(timeline.makespan)), xlabel="time, in forwards of one microbatch")
        axes.grid(False)
        words = f"{title}: bubble {float(timeline.bubble):.1%}" if title else ""
        axes.set_title(words, fontsize=10)
        kinds = [kind for kind in _LOOKS if kind in seen]
        axes.legend(
            [seen[kind] for kind in kinds], [_WORDS[kind] for kind in kinds], ncols=4,
            loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2,
        )  # fmt: skip

    return draw


def _draw_guess(timeline: Timeline, title: str) -> Callable[[Figure, Any], None]:
    def draw(figure: Figure, guess: Any) -> None:
        draw_timeline(timeline, title)(figure)
        if isinstance(guess, float) and 0 <= guess < 100:
            # Where the step would end if the guess were true.
            end = float(timeline.busy) / (1 - guess / 100)
            axes = figure.axes[0]
            axes.axvline(end, color=INK, linestyle=(0, (2, 2)))
            axes.set_xlim(0, 1.02 * max(end, float(timeline.makespan)))
            axes.set_ylim(DEVICES - 0.1, -0.5)
            axes.annotate(
                "your guess ends here", (end, DEVICES - 0.3), xytext=(-4, 0), ha="right",
                textcoords="offset points", fontsize=9, annotation_clip=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip

    return draw


def _gpipe_bubble() -> Answer:
    timeline = simulate(gpipe(DEVICES, MICROBATCHES))
    words = (
        f"They idle {float(timeline.bubble):.1%} of the time (modelled, exact: 3/11): the last "
        "device waits for 3 forwards at the start and 3 backwards at the end, the first as long in "
        "between, (p-1)/(m+p-1)."
    )
    return Answer(100 * float(timeline.bubble), words, _draw_guess(timeline, "GPipe"))


def _which_is_better() -> Answer:
    timeline = simulate(one_forward_one_backward(DEVICES, MICROBATCHES))
    words = (
        "It has the same bubble (modelled): warm-up and drain are as long. What it wins is memory: "
        "device 0 holds the activations of 4 microbatches instead of 8."
    )
    return Answer("the same bubble, less memory", words, _draw_guess(timeline, "1F1B"))


def _timeline(orders: Any, is_split: bool) -> Timeline:
    """What learners wrote, run; or the first thing wrong with it."""
    kinds = ("F", "I", "W") if is_split else ("F", "B")
    rows = []
    for device, order in enumerate(orders):
        row = []
        for each in order:
            if not isinstance(each, tuple | list) or len(each) != 2 or each[0] not in kinds:
                raise WrongAnswer(
                    f"Device {device} has {each!r}; wanted pairs such as ('F', 0), of {kinds}."
                )
            row.append(Task(each[0], each[1], device))
        rows.append(tuple(row))
    schedule = Schedule("yours", MICROBATCHES, tuple(range(DEVICES)), tuple(rows))
    if wrong := faults(schedule):
        raise WrongAnswer(f"It cannot run. {wrong[0]}")
    return simulate(schedule)


def _judge_one_f_one_b(one_f_one_b: Callable[..., Any], show: Show) -> str:
    orders = [list(ask(one_f_one_b, device, DEVICES, MICROBATCHES)) for device in range(DEVICES)]
    timeline = _timeline(orders, is_split=False)
    peaks, wanted = (
        timeline.peak_memory(),
        simulate(one_forward_one_backward(DEVICES, MICROBATCHES)),
    )
    show(draw_timeline(timeline, "yours"))
    if peaks[0] > DEVICES:
        raise WrongAnswer(
            f"It runs, but device 0 holds {peaks[0]} microbatches; 1F1B holds {DEVICES}: start no "
            "more forwards than there are devices behind."
        )
    if any(peak > most for peak, most in zip(peaks, wanted.peak_memory(), strict=True)):
        raise WrongAnswer(
            f"The devices hold {', '.join(map(str, peaks))} microbatches; wanted "
            f"{', '.join(map(str, wanted.peak_memory()))}."
        )
    if timeline.makespan > wanted.makespan:
        raise WrongAnswer(
            f"It runs in little memory, but takes {float(timeline.makespan):g}; wanted "
            f"{float(wanted.makespan):g}."
        )
    return f"Right: it ends at {float(timeline.makespan):g} and holds 4, 3, 2, 1."


def _judge_beat(beat: Callable[..., Any], show: Show) -> str:
    orders = [list(ask(beat, device, DEVICES, MICROBATCHES)) for device in range(DEVICES)]
    timeline = _timeline(orders, is_split=True)
    show(draw_timeline(timeline, "yours"))
    plain = simulate(one_forward_one_backward(DEVICES, MICROBATCHES))
    target = simulate(zero_bubble_h1(DEVICES, MICROBATCHES)).makespan
    most = max(timeline.peak_memory())
    if most > DEVICES:
        raise WrongAnswer(
            f"A device holds the activations of {most} microbatches; the memory is for {DEVICES}."
        )
    if timeline.makespan >= plain.makespan:
        raise WrongAnswer(
            f"It ends at {float(timeline.makespan):g}, no earlier than 1F1B "
            f"({float(plain.makespan):g}): weight gradients can wait until a device would idle."
        )
    if timeline.makespan > target:
        raise WrongAnswer(
            f"It ends at {float(timeline.makespan):g} and beats 1F1B; {float(target):g} is "
            "possible in the same memory."
        )
    return f"Right: it ends at {float(timeline.makespan):g} instead of 33."


def _judge_microbatches(microbatches_for: Callable[..., Any], show: Show) -> str:
    devices = [2, 4, 8, 16]
    most = Fraction(1, 10)
    got = [ask_number(microbatches_for, p, most) for p in devices]
    wanted = [9 * (p - 1) for p in devices]
    drawn = draw_lines(
        devices, got, wanted, xlabel="devices", ylabel="microbatches for a bubble of 10%"
    )
    show(drawn)
    for p, m in zip(devices, got, strict=True):
        if m != int(m) or m < 1:
            raise WrongAnswer(f"{p} devices: {m:g} is no number of microbatches.")
        bubble = float(simulate(gpipe(p, int(m))).bubble) if m <= 10_000 else 0.0
        if bubble > most + 1e-12:
            raise WrongAnswer(f"{p} devices: {m:g} microbatches leave a bubble of {bubble:.1%}.")
        if m > 1 and (p - 1) / (m - 1 + p - 1) <= most:
            raise WrongAnswer(f"{p} devices: fewer than {m:g} microbatches do.")
    odd = ask_number(microbatches_for, 5, Fraction(3, 10))
    if odd != 10:
        raise WrongAnswer(f"5 devices, at most 30%: {odd:g}; 10 are the fewest (28.6%).")
    return "Right: m >= (p-1)(1-b)/b, rounded up."


OUTLINE = Outline(
    "Draw 1F1B, then beat its bubble",
    questions=(
        Question(
            "gpipe_bubble",
            "Four devices hold a quarter of the layers each; a batch is cut into eight "
            "microbatches; a backward takes twice as long as a forward. All forwards run first, "
            "then all backwards. Which share of the time does a device idle, in per cent?",
            _gpipe_bubble,
            unit="per cent",
            low=0,
            high=100,
        ),
        Question(
            "which_is_better",
            "1F1B starts a backward as soon as it can, and then alternates. Compared with all "
            "forwards first, it has ...",
            _which_is_better,
            options=(
                "a smaller bubble, the same memory",
                "the same bubble, less memory",
                "a smaller bubble, less memory",
                "a larger bubble, less memory",
            ),
        ),
    ),
    exercises=(
        Exercise(
            "microbatches_for",
            "How many microbatches keep GPipe's bubble at or below a share?",
            _judge_microbatches,
            (
                "The bubble is (p-1)/(m+p-1).",
                "Solve for m; the result need not be whole.",
                "m = ceil((p-1)(1-b)/b); floats round badly, fractions.Fraction does not.",
            ),
        ),
        Exercise(
            "one_f_one_b",
            "Write the order in which one device of a 1F1B pipeline works.",
            _judge_one_f_one_b,
            (
                "How many forwards can device d start before its first backward can come back?",
                "Device d runs p-1-d forwards ahead; the last device none.",
                "Warm-up: F0 ... ; then F(i), B(i - ahead) in turns; then the remaining backwards.",
            ),
            minutes=15,
        ),
        Exercise(
            "beat",
            "Split each backward into its input gradient (I), which the device before waits for, "
            "and its weight gradient (W), for which no other device waits. Beat 1F1B in its own "
            "memory.",
            _judge_beat,
            (
                "In 1F1B's order, replace B by I at once; where could the Ws go?",
                "A W may wait, but activations are freed at I: how many Ws may device d put off?",
                "After each F and I run a W as soon as more than d of them wait; the rest at the "
                "end.",
            ),
            minutes=15,
            is_extra=True,
        ),
    ),
)
