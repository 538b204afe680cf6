"""Lesson 19: a Pallas kernel, interpreted here, real on a GPU or TPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from toolkit.lab.lessons.drawing import draw_matrices
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    name_of,
)
from toolkit.lab.lessons.programs import operations
from toolkit.measure import time_contenders

ROWS, COLUMNS, BLOCK = 16, 128, 8


def is_interpreted() -> bool:
    """Whether kernels run in Pallas's interpreter: there is no chip for them."""
    return jax.default_backend() == "cpu"


def run_kernel(kernel: Callable[..., None], x: jax.Array) -> jax.Array:
    """A kernel (x_ref, out_ref) once for every block of 8 rows of x [rows, columns]."""
    spec = pl.BlockSpec((BLOCK, x.shape[1]), lambda row: (row, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // BLOCK,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=is_interpreted(),
    )(x)


def timed(kernel: Callable[..., None]) -> str:
    """The kernel beside the compiler's softmax on this machine's chip, if there is one."""
    if is_interpreted():
        return "Interpreted: right or wrong is exact, seconds mean nothing. Open this on a GPU."
    x = jax.random.normal(jax.random.key(0), (65_536, 1024))
    if not jnp.allclose(run_kernel(kernel, x), jax.nn.softmax(x), atol=1e-5):
        return "Not right yet, so nothing is timed."
    calls = {
        "your kernel": jax.jit(functools.partial(run_kernel, kernel)),
        "by the compiler": jax.jit(jax.nn.softmax),
    }
    least = _seconds(calls, x)
    rates = (f"{name}: {1e3 * s:.3f} ms, {2 * x.nbytes / s / 1e12:.2f} TB/s" for name, s in least)
    return f"{jax.devices()[0].device_kind}, 268 MB. " + "; ".join(rates)


def _seconds(calls: dict[str, Callable[..., Any]], x: jax.Array) -> list[tuple[str, float]]:
    """The median of seven calls of each, taken in turn, after one that does not count."""
    asked = {name: functools.partial(call, x) for name, call in calls.items()}
    return [(name, timing.median) for name, timing in time_contenders(asked, min_seconds=0).items()]


def _bus() -> Answer:
    largest = jax.jit(lambda x: x.max(axis=-1, keepdims=True))
    raised = jax.jit(lambda x, top: jnp.exp(x - top))
    total = jax.jit(lambda e: e.sum(axis=-1, keepdims=True))
    divided = jax.jit(lambda e, total: e / total)

    def four(x: jax.Array) -> jax.Array:
        e = raised(x, largest(x))
        return divided(e, total(e))

    x = jax.random.normal(jax.random.key(0), (4096, 1024))
    calls = {"four": four, "one": jax.jit(jax.nn.softmax)}
    (_, slow), (_, fast) = _seconds(calls, x)
    words = (
        "384 MB (counted): the first and the third read 64 MB each, the second and the fourth read "
        "and write as much. One program that keeps a row where it computes moves 128 MB, a third. "
        f"On this machine, with 17 MB: {1e3 * slow:.0f} ms by four programs, {1e3 * fast:.0f} ms "
        "by the compiler's one (measured here; where they are alike, exponentials bind and not the "
        "bus, as on most CPUs)."
    )
    return Answer(384.0, words)


def _judge_softmax_kernel(softmax_kernel: Callable[..., Any], show: Show) -> str:
    x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS))

    @functools.wraps(softmax_kernel)  # errors name what the learner wrote
    def run(x: jax.Array) -> jax.Array:
        return run_kernel(softmax_kernel, x)

    @functools.wraps(softmax_kernel)
    def program() -> list[str]:
        return [each.primitive.name for each in operations(run, x)]

    done = ask(program)  # a kernel returns nothing: what it does is in its program
    reads, writes = done.count("get"), done.count("swap")
    if not writes:
        raise WrongAnswer(f"Not written yet: {name_of(softmax_kernel)} leaves out_ref as it was.")
    got, wanted = np.asarray(ask(run, x)), np.asarray(jax.nn.softmax(x))
    show(draw_matrices(got, wanted, xlabel="column", ylabel="row"))
    if not np.allclose(got, wanted, atol=1e-5):
        if np.allclose(got.reshape(-1, BLOCK * COLUMNS).sum(axis=1), 1):
            raise WrongAnswer(
                "The numbers of a block sum to 1, those of a row are to: axis=-1, keepdims=True."
            )
        sums = got.sum(axis=1)
        raise WrongAnswer(
            f"The rows sum to {sums.min():.3g} to {sums.max():.3g}; wanted 1 each, and each "
            "number exp(x) over its row's sum."
        )
    if not np.isfinite(np.asarray(ask(run, 200 * x))).all():
        raise WrongAnswer("With scores of some hundreds it overflows: subtract the largest.")
    if reads > 1 or writes > 1:
        raise WrongAnswer(
            f"The values are right, but reads and writes of the block are {reads} and {writes}; "
            "the target is one of each: read x_ref into a variable first."
        )
    return "Right: a softmax in one pass, each number read once and written once."


OUTLINE = Outline(
    "A kernel of your own",
    questions=(
        Question(
            "bus",
            "The softmax of the rows of an array of 64 MB, by four programs one after another: the "
            "largest of each row; exp(x - largest); the sum of each row; the quotient. How many MB "
            "cross the memory bus? (Numbers per row do not count.)",
            _bus,
            unit="MB",
            low=1,
            high=1e5,
        ),
    ),
    exercises=(
        Exercise(
            "softmax_kernel",
            "A Pallas kernel for the softmax of every row of a block, reading and writing it once.",
            _judge_softmax_kernel,
            (
                "x_ref[...] reads the whole block, out_ref[...] = y writes it; between is plain "
                "jnp.",
                "Read once into x; subtract each row's largest; exp; divide by each row's sum.",
                "e = jnp.exp(x - x.max(-1, keepdims=True)); out_ref[...] = e / e.sum(-1, "
                "keepdims=True)",
            ),
            minutes=15,
            seconds=8,
        ),
    ),
)
