"""Lesson 20, read a real trace: what ran when, what waited, and which messages were exposed."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

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
from toolkit.lab.lessons.subjects.programs.traces import Trace, busy_time, record

_ALIKE = 1e-6


def idle_by(busy: Callable[..., Any], trace: Trace) -> str:
    """What a learner's `busy` says of a trace."""
    found = busy(trace.spans())
    if found is None:
        return "write busy first"
    length = max(event.end for event in trace.operations)
    return f"busy for {found:,.0f} of {length:,.0f} microseconds, idle for {1 - found / length:.0%}"


def _idle() -> Answer:
    trace = record()
    length = max(event.end for event in trace.operations)
    idle = 100 * (1 - busy_time(trace.spans()) / length)
    return Answer(
        idle,
        f"{idle:.0f} per cent (measured here): between two calls Python takes the result, waits "
        "for it, checks the next arguments and hands them over. A larger step hides that; so does "
        "calling the next one before the last is waited for.",
    )


def _exposed_ms() -> Answer:
    return Answer(
        4.0,
        "4 ms (counted): products cover 20 of the 24 ms, so at least 4 of the 8 ms of messages run "
        "beside nothing. What is hidden costs nothing; what is exposed is what a faster network "
        "would save.",
    )


_SPANS = {
    "two apart": [("a", 0, 4), ("b", 6, 8)],
    "not in order": [("b", 6, 8), ("a", 0, 4)],
    "one inside another": [("a", 0, 10), ("b", 2, 5)],
    "two that overlap": [("a", 0, 4), ("b", 2, 7)],
    "three, one long": [("a", 0, 9), ("b", 1, 2), ("c", 3, 12)],
    "none": [],
}


def _judge_busy(busy: Callable[..., Any], show: Show) -> str:
    got = [ask_number(busy, list(spans)) for spans in _SPANS.values()]
    wanted = [busy_time(spans) for spans in _SPANS.values()]  # pyright: ignore[reportArgumentType]
    show(draw_bars(list(_SPANS), got, wanted, xlabel="time in which something runs"))
    for name, mine, truth in zip(_SPANS, got, wanted, strict=True):
        if abs(mine - truth) > _ALIKE:
            spans = _SPANS[name]
            if mine == sum(end - start for _, start, end in spans):
                why = "That is the sum of all lengths: what runs at the same time counts once."
            elif spans and mine == max(s[2] for s in spans) - min(s[1] for s in spans):
                why = "That is from the first start to the last end: gaps do not count."
            else:
                why = "Go by start, and remember how far you have come."
            raise WrongAnswer(f"“{name}”: {mine:g}; wanted {truth:g}. {why}")
    return "Right: a moment counts once, however many run in it, and gaps do not count."


_NESTED = {
    "one": [("step", 0, 10)],
    "a child": [("step", 0, 10), ("dot", 2, 5)],
    "two children": [("step", 0, 10), ("dot", 2, 5), ("tanh", 5, 9)],
    "a grandchild": [("step", 0, 10), ("dot", 2, 9), ("copy", 3, 4)],
    "twice": [("step", 0, 4), ("dot", 1, 2), ("step", 6, 10), ("dot", 7, 10)],
}


def own_times(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """name -> time in which it is the innermost that runs; spans are nested or apart."""
    own: dict[str, float] = defaultdict(float)
    open_spans: list[tuple[str, float]] = []
    for name, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        own[name] += end - start
        if open_spans:
            own[open_spans[-1][0]] -= end - start
        open_spans.append((name, end))
    return dict(own)


def _judge_self_time(self_time: Callable[..., Any], show: Show) -> str:
    for case, spans in _NESTED.items():
        found = ask(self_time, list(spans))
        if not isinstance(found, dict):
            raise WrongAnswer(f"self_time returned {type(found).__name__}; wanted a dict.")
        wanted = own_times(spans)  # pyright: ignore[reportArgumentType]
        mine = {name: float(found.get(name, 0)) for name in wanted}
        drawn = draw_bars(
            list(wanted), [*mine.values()], [*wanted.values()], xlabel=f"own time, “{case}”"
        )
        show(drawn)
        for name, truth in wanted.items():
            if abs(mine[name] - truth) <= _ALIKE:
                continue
            whole = sum(end - start for each, start, end in spans if each == name)
            if mine[name] == whole:
                why = "That is with what runs inside it."
            elif case == "a grandchild":
                why = "Only what is directly inside is taken off; its own children are inside it."
            elif case == "twice":
                why = "A name that comes twice has both times."
            else:
                why = "Its length less what runs directly inside it."
            raise WrongAnswer(f"“{case}”: {name} has {mine[name]:g}; wanted {truth:g}. {why}")
    return "Right: own times add up to the time in which something runs."


_MESSAGES = {
    "all hidden": ([(2, 4)], [(0, 10)]),
    "none hidden": ([(2, 4)], [(5, 10)]),
    "half": ([(2, 6)], [(4, 10)]),
    "in a gap": ([(0, 10)], [(0, 3), (6, 10)]),
    "two messages at once": ([(0, 6), (2, 8)], [(0, 1)]),
    "no products": ([(0, 3), (5, 6)], []),
}


def exposed_time(messages: list[Any], compute: list[Any]) -> float:
    """Time in which a message is under way and nothing is computed."""
    covered = busy_time([("", *span) for span in compute])
    return busy_time([("", *span) for span in (*messages, *compute)]) - covered


def _judge_exposed(exposed: Callable[..., Any], show: Show) -> str:
    got = [ask_number(exposed, list(m), list(c)) for m, c in _MESSAGES.values()]
    wanted = [exposed_time(m, c) for m, c in _MESSAGES.values()]
    show(draw_bars(list(_MESSAGES), got, wanted, xlabel="exposed time of messages"))
    for (name, (messages, _)), mine, truth in zip(_MESSAGES.items(), got, wanted, strict=True):
        if abs(mine - truth) > _ALIKE:
            if mine == sum(end - start for start, end in messages):
                why = "That is all of the messages, hidden or not."
            elif name == "two messages at once":
                why = "Two messages that wait at once cost their time once."
            else:
                why = "Take what either covers, less what the products cover."
            raise WrongAnswer(f"“{name}”: {mine:g}; wanted {truth:g}. {why}")
    return "Right: what is exposed is what either covers, less what the products cover."


OUTLINE = Outline(
    "Read a real trace",
    questions=(
        Question(
            "idle",
            "A small train step, 0.2 GFLOP, is called ten times, and each result is waited for. "
            "From the first operation of the trace to the last: for which share of the time does "
            "no operation run, in per cent?",
            _idle,
            unit="per cent",
            low=0,
            high=100,
            seconds=2,
        ),
        Question(
            "exposed_ms",
            "A step takes 24 ms. In its trace products run for 20 ms and messages for 8 ms, and at "
            "every moment one or the other runs. How many ms of messages are exposed, with no "
            "product beside them?",
            _exposed_ms,
            unit="ms",
            low=0,
            high=24,
        ),
    ),
    exercises=(
        Exercise(
            "busy",
            "Time in which at least one of some events runs.",
            _judge_busy,
            (
                "Events may lie inside one another or overlap; a moment counts once.",
                "Sort by start. How far has the time been counted when the next one begins?",
                "total += max(0, end - max(start, reached)); reached = max(reached, end)",
            ),
            minutes=10,
        ),
        Exercise(
            "self_time",
            "Own time of every name: its events less what runs directly inside them.",
            _judge_self_time,
            (
                "Which event is a given one directly inside of? The last that is still open.",
                "Sort by start, the longest first; keep a stack of open events, and close those "
                "that ended.",
                "Add each length to its name, and take it off the name on top of the stack.",
            ),
            minutes=15,
        ),
        Exercise(
            "exposed",
            "Time in which a message is under way and nothing is computed.",
            _judge_exposed,
            (
                "What do messages and products cover together?",
                "You have a function for the time that some events cover.",
                "busy of both, less busy of the products; give them a name each.",
            ),
        ),
    ),
)
