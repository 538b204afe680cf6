"""Lesson 08, fit a model into a cluster: memory, time and the choice, on paper before on chips."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, LOOKS
from toolkit.lab.lessons.drawing import GUESS, draw_bars
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
from toolkit.looped import parameter_count
from toolkit.planning import MODELS, Prediction, Strategy, plan, predict

MODEL, CHIPS, BATCH, LENGTH = "llama-3-8b", "h100:8", 8, 8192
TARGET_SECONDS, LIMIT = 1.35, 72e9  # a tenth of the 80 GB is left to what predictions miss
# (model, chips, sequences, tokens of each): the last has fewer sequences than chips.
SEARCHED = (
    ("llama-3-8b", "h100:8", 8, 8192),
    ("qwen-3-14b", "h100:16", 32, 4096),
    ("llama-3-70b", "h100:64", 32, 4096),
)
RECOMPUTE = ("none", "elementwise", "layer")


def predicted(strategy: Strategy) -> Prediction:
    """The lesson's own case: eight billion parameters on eight chips, a long text on each."""
    return predict(MODEL, CHIPS, strategy, batch=BATCH, sequence_length=LENGTH, memory=LIMIT)


def draw_predictions(found: Sequence[tuple[str, Prediction]], guess: float | None = None) -> Draw:
    """Memory by category, a row each: with a guess in GB in the first, else with seconds too."""

    def draw(figure: Figure) -> None:
        first = found[0][1]
        left = figure.add_axes((0.17, 0.2, 0.39 if guess is None else 0.8, 0.6))
        state = ("parameters", "optimizer", "gradients")
        categories = {
            "state": [sum(getattr(p.memory, name) for name in state) / 1e9 for _, p in found],
            "activations": [p.memory.activations / 1e9 for _, p in found],
            "the rest": [(p.memory.gathered + p.memory.working) / 1e9 for _, p in found],
        }
        _stack(left, categories)
        left.axvline(first.limit / 1e9, color=ACCENT, linewidth=2)
        left.set_yticks(range(len(found)), [name for name, _ in found])
        left.set_xlabel(f"GB per chip; line: {first.limit / 1e9:g} GB")
        if guess is not None:
            left.plot([guess], [0], **GUESS, clip_on=False)
            left.annotate(
                "your guess", (guess, 0), xytext=(9, 0), textcoords="offset points", va="center",
                color=INK, annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
            return  # the next question is about seconds
        right = figure.add_axes((0.6, 0.2, 0.38, 0.6))
        shares = {
            "forward, backward": [p.seconds["forward"] + p.seconds["backward"] for _, p in found],
            "recomputed": [p.seconds["recomputed"] for _, p in found],
        }
        shares["the rest"] = [
            p.step_seconds - sum(part[i] for part in shares.values())
            for i, (_, p) in enumerate(found)
        ]
        _stack(right, shares)
        right.set(yticks=[], xlabel=f"seconds per step; line: {TARGET_SECONDS:g} s")
        right.axvline(TARGET_SECONDS, color=ACCENT, linewidth=2)

    return draw


def _stack(axes: Any, parts: dict[str, list[float]]) -> None:
    """Parts of each row behind one another, with their names above."""
    rows = len(next(iter(parts.values())))
    starts = [0.0] * rows
    for (name, sizes), look in zip(parts.items(), ("full", "window", "gdn"), strict=True):
        known = LOOKS[look]
        axes.barh(
            range(rows), sizes, 0.62, left=starts, color=known.colour, hatch=known.hatch,
            edgecolor="white", label=name,
        )  # fmt: skip
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    margin = 1.0 if rows == 1 else 0.5
    axes.set_ylim(rows - 1 + margin, -margin)
    axes.grid(False, axis="y")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, columnspacing=1,
        handlelength=1.2,
    )  # fmt: skip


@functools.cache
def _three() -> tuple[Prediction, ...]:
    return tuple(predicted(Strategy(fsdp=8, recompute=word)) for word in RECOMPUTE)


def _activations() -> Answer:
    none, elementwise, layer = _three()
    truth = none.memory.activations / 1e9

    def draw(figure: Figure, guess: float) -> None:
        before = none.memory.parameters + none.memory.optimizer + none.memory.gradients
        pairs = list(zip(("keep all", "elementwise anew", "layer anew"), _three(), strict=True))
        draw_predictions(pairs, before / 1e9 + guess)(figure)

    words = (
        f"They need {truth:.0f} GB (modelled; toolkit.planning): ten times all parameters and "
        f"moments. With norms, gates and attention computed anew it is "
        f"{elementwise.memory.activations / 1e9:.0f} GB, with whole layers "
        f"{layer.memory.activations / 1e9:.1f} GB."
    )
    return Answer(truth, words, draw)


def _longer() -> Answer:
    none, elementwise, layer = _three()
    truth = 100 * (layer.step_seconds / none.step_seconds - 1)
    cheap = 100 * (elementwise.step_seconds / none.step_seconds - 1)
    words = (
        f"It gets {truth:.0f}% longer (modelled): the forward pass of every layer, a third of the "
        f"work, less what the head does. Computing only norms, gates and attention anew costs "
        f"{cheap:.0f}%, and that fits too."
    )
    return Answer(truth, words)


def _least_chips() -> Answer:
    for chips in (8, 16, 32, 64, 128):
        try:
            best = plan("llama-3-70b", f"h100:{chips}", batch=128, sequence_length=4096).best
        except ValueError:  # no strategy fits
            continue
        words = (
            f"It takes {chips} (modelled; the best of all strategies tried, a tenth of the memory "
            "kept free): 16 bytes per parameter are 1.1 TB, the memory of 14; with gathered "
            f"layers, logits and what layers keep, each of {chips} holds "
            f"{best.memory.total / 1e9:.0f} GB ({best.strategy})."
        )
        return Answer(float(chips), words)
    raise AssertionError("128 chips have room for it")


def _judge_state_bytes(state_bytes: Callable[..., Any], show: Show) -> str:
    cases = [
        ("data 8", {"data": 8}),
        ("data 8, optimiser cut", {"data": 8, "shard_optimizer": True}),
        ("fsdp 8", {"fsdp": 8}),
        ("tensor 8", {"tensor": 8}),
        ("data 2, fsdp 4", {"data": 2, "fsdp": 4}),
        ("the same, optimiser cut", {"data": 2, "fsdp": 4, "shard_optimizer": True}),
    ]
    parameters = parameter_count(MODELS[MODEL])
    defaults = {"data": 1, "fsdp": 1, "tensor": 1, "shard_optimizer": False}
    got = [ask_number(state_bytes, parameters, **(defaults | case)) / 1e9 for _, case in cases]
    memories = [predicted(Strategy(**case)).memory for _, case in cases]
    wanted = [(memory.parameters + memory.optimizer) / 1e9 for memory in memories]
    names = [name for name, _ in cases]
    show(draw_bars(names, got, wanted, xlabel="GB per chip; eight billion parameters, 8 chips"))
    for name, answer, right in zip(names, got, wanted, strict=True):
        if abs(answer - right) > 0.01 * right:
            raise WrongAnswer(f"{name}: {answer:.4g} GB; wanted {right:.4g}.")
    return "Right: within one per cent of toolkit.planning, which counts every tensor."


def _judge_strategy(strategy: Callable[..., Any], show: Show) -> str:
    chosen = _strategy_of(strategy)
    found = ask(predicted, chosen)
    show(draw_predictions([("yours", found)]))
    if not found.fits:
        name, most = max(found.memory._asdict().items(), key=lambda part: part[1])
        raise WrongAnswer(
            f"{chosen} needs {found.memory.total / 1e9:.0f} GB per chip, of which {name} "
            f"{most / 1e9:.0f}; there are {LIMIT / 1e9:.0f}."
        )
    if found.step_seconds > TARGET_SECONDS:
        # Besides the products, which every strategy has.
        parts = {k: v for k, v in found.seconds.items() if k not in ("forward", "backward")}
        name = max(parts, key=lambda part: parts[part])
        raise WrongAnswer(
            f"{chosen} fits, but a step takes {found.step_seconds:.2f} s; {TARGET_SECONDS} s is "
            f"wanted. Beside the products most goes to: {name}, {parts[name]:.2f} s."
        )
    return (
        f"Right: {found.memory.total / 1e9:.0f} GB, {found.step_seconds:.2f} s, "
        f"{100 * found.utilisation:.0f}% of the chips' peak (modelled)."
    )


def _strategy_of(function: Callable[..., Any], *args: Any) -> Strategy:
    chosen = ask(function, *args)
    if not isinstance(chosen, Strategy):
        raise WrongAnswer(f"That is {type(chosen).__name__}; wanted a Strategy.")
    return chosen


def _judge_search(search: Callable[..., Any], show: Show) -> str:
    yours, best, problem = [], [], ""
    for model, chips, batch, length in SEARCHED:

        def paper(
            strategy: Strategy, model=model, chips=chips, batch=batch, length=length
        ) -> Prediction | None:
            try:
                return predict(
                    model, chips, strategy, batch=batch, sequence_length=length, memory=LIMIT
                )
            except ValueError:  # does not divide the model, the batch or the chips
                return None

        count = int(chips.partition(":")[2])
        least = min(
            found.step_seconds
            for strategy in _all_strategies(count)
            if (found := paper(strategy)) is not None and found.fits
        )
        chosen = _strategy_of(search, count, paper)
        found, case = paper(chosen), f"{model} on {chips}, {batch} sequences"
        yours.append(0.0 if found is None else found.step_seconds)
        best.append(least)
        if problem:
            continue
        if found is None:
            problem = f"{case}: {chosen} does not divide the chips, the model or the batch."
        elif not found.fits:
            needs = found.memory.total / 1e9
            problem = f"{case}: {chosen} needs {needs:.0f} GB per chip and does not fit."
        elif found.step_seconds > 1.001 * least:
            problem = (
                f"{case}: {chosen} takes {found.step_seconds:.2f} s; {least:.2f} s is possible."
            )
    names = [f"{model}, {chips}" for model, chips, *_ in SEARCHED]
    show(draw_bars(names, yours, best, xlabel="seconds per step (modelled)"))
    if problem:
        raise WrongAnswer(problem)
    return "Right: the fastest that fits, on all three clusters."


def _all_strategies(chips: int) -> list[Strategy]:
    degrees = [n for n in range(1, chips + 1) if chips % n == 0]
    return [
        Strategy(data=data, fsdp=chips // data // tensor, tensor=tensor, recompute=recompute)
        for data in degrees
        for tensor in degrees
        for recompute in RECOMPUTE
        if chips % (data * tensor) == 0
    ]


OUTLINE = Outline(
    "Fit a model into a cluster, on paper before on chips",
    questions=(
        Question(
            "activations",
            "Llama-3-8B on eight H100 (80 GB each), everything cut by ZeRO-3, bfloat16 products, "
            "one text of 8,192 tokens per chip. Nothing is recomputed, attention runs in tiles. "
            "How many GB per chip does the forward pass keep for the backward pass?",
            _activations,
            unit="GB",
            low=0.01,
            high=10_000,
        ),
        Question(
            "longer",
            "If every layer keeps its input only and runs again, it fits. By how many per cent "
            "does the step get longer?",
            _longer,
            unit="per cent",
            low=0,
            high=1000,
        ),
        Question(
            "least_chips",
            "Llama-3-70B with Adam, 128 texts of 4,096 tokens per step, any strategy. How many "
            "H100 does it take at least (8, 16, 32, 64 or 128)?",
            _least_chips,
            unit="chips",
            low=1,
            high=10_000,
            seconds=6,
        ),
    ),
    exercises=(
        Exercise(
            "state_bytes",
            "Count the bytes per chip of parameters and Adam's two moments, all in float32, under "
            "data x fsdp x tensor.",
            _judge_state_bytes,
            (
                "Four bytes per parameter, eight for its two moments. Which degrees cut which?",
                "fsdp and tensor cut both; data copies both.",
                "With shard_optimizer, data cuts the eight bytes too, not the four.",
            ),
        ),
        Exercise(
            "strategy",
            "Train Llama-3-8B on eight H100, eight texts of 8,192 tokens, in at most 72 GB per "
            "chip and 1.35 s per step.",
            _judge_strategy,
            (
                "Look at which category is largest in what does not fit.",
                "Cutting the state with fsdp=8 leaves 12 GB of it; what about the activations?",
                "Between nothing and whole layers there is a third word for recompute.",
            ),
            minutes=10,
        ),
        Exercise(
            "search",
            "Write the search: of all data x fsdp x tensor that multiply to the chips, and all "
            "three words for recompute, the fastest strategy that fits.",
            _judge_search,
            (
                "Two loops over the divisors of chips; the third degree is what is left.",
                "predicted(strategy) is None where the strategy does not divide something.",
                "Keep the strategy whose prediction has .fits and the least .step_seconds.",
            ),
            minutes=15,
        ),
    ),
)
