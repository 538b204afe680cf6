"""Lesson 03, the memory ledger: what training keeps, who can share it, what can be recomputed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, LOOKS, in_words
from toolkit.lab.lessons.drawing import draw_bars, draw_lines
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
from toolkit.measure import ProgramCost, program_cost

LAYERS, WIDTH, TOKENS = 8, 64, 512
TARGET_BYTES = 3 * 2**20

Weights = tuple[jax.Array, jax.Array]


def block(x: jax.Array, weights: Weights) -> jax.Array:
    """One residual block of two products: x + tanh(x w1) w2, x [tokens, width]."""
    into, back = weights
    return x + jnp.tanh(x @ into) @ back


def stack_loss(weights: Weights, x: jax.Array) -> jax.Array:
    """The blocks one after another, and the mean square of what comes out: nothing is thrifty."""
    out, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)
    return jnp.mean(out**2)


def stack_inputs() -> tuple[Weights, jax.Array]:
    """Weights ([layers, width, hidden], [layers, hidden, width]) and x [tokens, width]."""
    keys = jax.random.split(jax.random.key(0), 3)
    into = jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * WIDTH**-0.5
    back = jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * WIDTH**-0.5 / 2
    return (into, back), jax.random.normal(keys[2], (TOKENS, WIDTH))


def gradient_cost(loss: Callable[..., Any]) -> ProgramCost:
    """What the compiler says of the gradient of a loss with respect to the weights."""
    return program_cost(jax.jit(jax.grad(loss)).lower(*stack_inputs()).compile())


def _recomputed_loss(weights: Weights, x: jax.Array) -> jax.Array:
    each = jax.checkpoint(lambda x, w: (block(x, w), None))  # pyright: ignore
    out, _ = jax.lax.scan(each, x, weights)
    return jnp.mean(out**2)


@functools.cache
def _both_costs() -> tuple[ProgramCost, ProgramCost]:
    return gradient_cost(stack_loss), gradient_cost(_recomputed_loss)


def _adam_ledger() -> Answer:
    tree = {"w": jnp.zeros((64, 64))}
    moments = sum(x.nbytes for x in jax.tree.leaves(optax.adam(1e-3).init(tree)) if x.ndim)
    per = {"parameters": 4, "gradients": 4, "Adam's moments": moments / 64**2}
    total = sum(per.values())

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.06, 0.3, 0.9, 0.34))
        left = 0.0
        looks = ("full", "window", "gdn")
        for (name, size), look in zip(per.items(), looks, strict=True):
            axes.barh(0, size, 0.8, left=left, color=LOOKS[look].colour, edgecolor="white")
            axes.text(
                left + size / 2, 0, f"{name}\n{size:g} GB", ha="center", va="center", color="white"
            )
            left += size
        axes.plot([guess], [0.62], marker="v", color=ACCENT, markersize=9)
        axes.annotate("your guess", (guess, 0.85), ha="center", color=ACCENT, annotation_clip=False)
        axes.set(yticks=[], ylim=(-0.5, 0.75), xlabel="GB for 1,000,000,000 parameters")
        axes.set_xlim(0, max(total, guess) * 1.05)

    words = (
        f"It needs {total:g} GB before the first activation (modelled; the moments are counted in "
        "optax's own state): 4 bytes each for a parameter, its gradient and Adam's two moments."
    )
    return Answer(total, words, draw)


def _scratch_memory() -> Answer:
    plain, thrifty = _both_costs()
    ratio = plain.temp_bytes / thrifty.temp_bytes
    words = (
        f"It needs {ratio:.3g} times less: {in_words(thrifty.temp_bytes, 'bytes')} instead of "
        f"{in_words(plain.temp_bytes, 'bytes')} (the compiler's own count, on this machine). Per "
        "layer it keeps a block's input, a vector of 64 per token, and not the vectors of 256 "
        "inside."
    )
    return Answer(ratio, words)


def _extra_work() -> Answer:
    plain, thrifty = _both_costs()
    more = round(100 * (thrifty.flops / plain.flops - 1))
    words = (
        f"It grows by {more}% (the compiler's own count). A forward is a third of a training "
        "step, so running it again costs a third at most; here half of that: nobody needs the "
        "second product of a block again."
    )
    return Answer(float(more), words)


def _judge_bytes_per_device(bytes_per_device: Callable[..., Any], show: Show) -> str:
    parameters, devices = 7_500_000_000, 64
    wanted = [
        2 * parameters * (1 if stage < 3 else 1 / devices)
        + 2 * parameters * (1 if stage < 2 else 1 / devices)
        + 12 * parameters * (1 if stage < 1 else 1 / devices)
        for stage in range(4)
    ]
    got = [ask_number(bytes_per_device, parameters, devices, stage) for stage in range(4)]
    names = ["nothing divided", "1: optimiser", "2: and gradients", "3: and parameters"]
    show(draw_bars(
        names, [g / 1e9 for g in got], [w / 1e9 for w in wanted],
        xlabel="GB per device; 7.5 billion parameters, 64 devices",
    ))  # fmt: skip
    alone = [ask_number(bytes_per_device, parameters, 1, stage) for stage in range(4)]
    if max(alone) - min(alone) > 1:
        raise WrongAnswer("On one device no stage can save anything; yours differ.")
    if not np.isclose(alone[0], 16 * parameters):
        raise WrongAnswer(
            f"One device needs {alone[0] / parameters:g} bytes per parameter; wanted 16: 2 for "
            "the parameter, 2 for its gradient, 12 for the optimiser."
        )
    for stage, (name, answer, right) in enumerate(zip(names, got, wanted, strict=True)):
        if not np.isclose(answer, right, rtol=1e-6):
            raise WrongAnswer(
                f"Stage {stage} ({name}): {answer / 1e9:.4g} GB; wanted {right / 1e9:.4g}."
            )
    return "Right: 120, 31.4, 16.6 and 1.9 GB, as in the ZeRO paper."


def _judge_checkpoint_every(checkpoint_every: Callable[..., Any], show: Show) -> str:
    layers = [4, 16, 36, 64, 100, 12, 30]

    def kept(total: int, every: int) -> int:
        return -(-total // every) + every

    got = [ask_number(checkpoint_every, n) for n in layers]
    best = [min(kept(n, every) for every in range(1, n + 1)) for n in layers]
    yours = [kept(n, int(e)) if e >= 1 else None for n, e in zip(layers, got, strict=True)]
    order = np.argsort(layers)
    can_draw = None not in yours
    show(draw_lines(
        np.array(layers)[order], np.array(yours)[order] if can_draw else None,
        np.array(best)[order], xlabel="layers", ylabel="activations kept at once",
    ))  # fmt: skip
    for n, every, mine, least in zip(layers, got, yours, best, strict=True):
        if every != int(every) or not 1 <= every <= n:
            raise WrongAnswer(f"{n} layers: every {every:g} is no number of layers.")
        if mine != least:
            raise WrongAnswer(
                f"{n} layers: every {every:g} keeps {mine} at once, {least} is possible."
            )
    return "Right: about the square root of the number of layers."


def _judge_thrifty_loss(thrifty_loss: Callable[..., Any], show: Show) -> str:
    weights, x = stack_inputs()
    value = ask(thrifty_loss, weights, x)
    if jnp.shape(value) != ():
        raise WrongAnswer(f"The loss has shape {list(jnp.shape(value))}; wanted one number.")
    if not np.isclose(float(value), float(stack_loss(weights, x)), rtol=1e-4):
        raise WrongAnswer(
            f"The loss is {float(value):.5g}; wanted {float(stack_loss(weights, x)):.5g}."
        )
    cost = ask(gradient_cost, thrifty_loss)
    plain = _both_costs()[0]
    show(draw_bars(
        ["as written first", "now"],
        [plain.temp_bytes / 2**20, cost.temp_bytes / 2**20], [TARGET_BYTES / 2**20] * 2,
        xlabel="MiB of scratch memory of the gradient; wanted: at most",
    ))  # fmt: skip
    mine, theirs = (ask(jax.jit(jax.grad(f)), weights, x) for f in (thrifty_loss, stack_loss))
    for answer, right in zip(mine, theirs, strict=True):
        if not np.allclose(answer, right, atol=1e-5, rtol=1e-3):
            raise WrongAnswer("The loss is right, its gradient is not.")
    if cost.temp_bytes > TARGET_BYTES:
        raise WrongAnswer(
            f"The gradient needs {in_words(cost.temp_bytes, 'bytes')}; the target is "
            f"{in_words(TARGET_BYTES, 'bytes')}."
        )
    return f"Right: {in_words(cost.temp_bytes, 'bytes')}, the same gradient."


OUTLINE = Outline(
    "The memory ledger",
    questions=(
        Question(
            "adam_ledger",
            "A model of one billion parameters is trained with Adam, all numbers in float32. How "
            "many GB do parameters, gradients and optimiser need, before any activation?",
            _adam_ledger,
            unit="GB",
            low=0.1,
            high=1000,
        ),
        Question(
            "scratch_memory",
            "Eight blocks (512 tokens, 64 channels, 256 inside). Instead of keeping what the "
            "backward pass needs, each block keeps its input only and runs again. How many times "
            "less scratch memory does the compiled gradient need?",
            _scratch_memory,
            unit="times",
            low=0.1,
            high=1000,
            seconds=2,
        ),
        Question(
            "extra_work",
            "By how many per cent does the work of the step grow through that?",
            _extra_work,
            unit="per cent",
            low=0,
            high=1000,
        ),
    ),
    exercises=(
        Exercise(
            "bytes_per_device",
            "Mixed precision: parameters and gradients in 2 bytes, the optimiser keeps a float32 "
            "copy and two moments. ZeRO divides the optimiser (stage 1), also gradients (2), also "
            "parameters (3). Count the bytes per device.",
            _judge_bytes_per_device,
            (
                "Which of the three parts does every device hold whole in this stage?",
                "Per parameter: 2 + 2 + 12 bytes; what is divided counts 1/devices.",
                "Stage 2: 2 P + (2 + 12) P / devices.",
            ),
        ),
        Exercise(
            "checkpoint_every",
            "L layers keep their input at every n-th layer, and the n layers between are "
            "recomputed one group at a time: ceil(L/n) + n activations at once. Which n is best?",
            _judge_checkpoint_every,
            (
                "Write down what is kept for n = 1 and for n = L.",
                "Try all n; there are only L of them.",
                "min(range(1, L + 1), key=lambda n: math.ceil(L / n) + n)",
            ),
        ),
        Exercise(
            "thrifty_loss",
            "Write the loss of the eight blocks so that its compiled gradient needs at most 3 MiB "
            "of scratch memory.",
            _judge_thrifty_loss,
            (
                "Look at memory_ledger.stack_loss: what does scan keep at every step?",
                "jax.checkpoint(f) is f, but its backward pass runs f again.",
                "Wrap the function that jax.lax.scan applies.",
            ),
            minutes=10,
            seconds=10,
        ),
    ),
)
