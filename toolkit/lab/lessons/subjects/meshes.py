"""Lesson 04, one array, many devices: meshes, shardings, and what the compiler must send."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, LOOKS
from toolkit.lab.lessons.drawing import draw_bars
from toolkit.lab.lessons.outline import (
    Answer,
    Draw,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
)
from toolkit.lab.lessons.subjects.parts.eight_devices import mesh_of
from toolkit.measure import collectives

SHAPES = {"x": (64, 32), "w1": (32, 128), "w2": (128, 32)}
MEGATRON = {"x": P("data"), "w1": P(None, "model"), "w2": P("model")}


def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """Two products and tanh between: x [batch, width], w1 [width, hidden], w2 its converse."""
    return jnp.tanh(x @ w1) @ w2


def compile_mlp(layout: dict[str, P], *, scale: int = 1) -> Any:
    """The program for a layout of x, w1 and w2 on a mesh of data=2, model=4; results as x."""
    mesh = mesh_of(data=2, model=4)
    shardings = [NamedSharding(mesh, layout[name]) for name in SHAPES]
    arguments = [
        jax.ShapeDtypeStruct((scale * rows, scale * columns), jnp.float32)
        for rows, columns in SHAPES.values()
    ]
    return (
        jax.jit(mlp, in_shardings=shardings, out_shardings=shardings[0]).lower(*arguments).compile()
    )


def _copies() -> Answer:
    mesh = mesh_of(data=2, model=4)
    array = jax.device_put(jnp.zeros((64, 32)), NamedSharding(mesh, P("model")))
    stored = sum(shard.data.nbytes for shard in array.addressable_shards)
    truth = stored / array.nbytes

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.06, 0.14, 0.5, 0.72))
        colours = [LOOKS[name].colour for name in ("full", "window", "gdn", "fourth")]
        for row in range(2):
            for column in range(4):
                axes.barh(row, 0.94, 0.9, left=column, color=colours[column])
                words = f"device {4 * row + column}\nrows {16 * column}–{16 * column + 15}"
                axes.text(column + 0.47, row, words, ha="center", va="center", color="white")
        axes.set(xticks=[], yticks=[0, 1], yticklabels=["data 0", "data 1"], title="P('model')")
        axes.invert_yaxis()
        axes.grid(False)
        beside = figure.add_axes((0.68, 0.2, 0.28, 0.6))
        beside.barh([0, 1], [truth, guess], 0.6, color=[LOOKS["full"].colour, ACCENT])
        beside.set_yticks([0, 1], ["it is", "your guess"])
        beside.set(xlabel="copies of the array")
        beside.grid(False, axis="y")

    words = (
        f"It is stored {truth:g} times (read from the shards): only 'model' cuts it, into four; "
        "the axis 'data' is not named, so every value of it holds the same."
    )
    return Answer(truth, words, draw)


_SENT = ("nothing", "one all-reduce", "two all-gathers", "an all-to-all")


def _which_collective() -> Answer:
    found = collectives(compile_mlp(MEGATRON))
    kinds = [each.kind for each in found for _ in range(each.count)]
    words = (
        f"The compiled program has: {', '.join(kinds)}. The first product needs nothing, since "
        "each device makes its own columns; the second adds up rows that lie on four devices, so "
        f"partial sums are added over 'model': {found[0].bytes_sent / 1024:.0f} KiB sent per "
        "device."
    )
    return Answer("one all-reduce" if kinds == ["all-reduce"] else ", ".join(kinds), words)


def _judge_local_shape(local_shape: Callable[..., Any], show: Show) -> str:
    mesh = mesh_of(data=2, model=4)
    cases = [
        ((64, 32), (None, None)),
        ((64, 32), ("data", None)),
        ((64, 32), ("data", "model")),
        ((64, 32), (None, ("data", "model"))),
        ((8, 64, 32), ("model",)),
    ]
    sizes = dict(mesh.shape)
    names, yours, wanted = [], [], []
    problem = ""
    for shape, spec in cases:
        right = NamedSharding(mesh, P(*spec)).shard_shape(shape)
        got = ask(local_shape, shape, spec, sizes)
        got = tuple(got) if isinstance(got, tuple | list) else (got,)
        names.append(f"{shape}, {spec}".replace("'", ""))
        yours.append(float(math.prod(got)) if all(isinstance(n, int | float) for n in got) else 0)
        wanted.append(float(math.prod(right)))
        if not problem and got != right:
            problem = f"{shape} cut by {spec}: {got}; jax says {right}."
    xlabel = "numbers on one device; mesh data=2, model=4"
    show(_wide(draw_bars(names, yours, wanted, xlabel=xlabel)))
    if problem:
        raise WrongAnswer(problem)
    return "Right: each length over the sizes of all axes that cut it."


def _wide(draw: Draw) -> Draw:
    """More room for long names on the left."""

    def wide(figure: Figure) -> None:
        draw(figure)
        figure.axes[0].set_position((0.36, 0.17, 0.6, 0.7))

    return wide


def _judge_layout(layout: Callable[..., Any], show: Show) -> str:
    specs = ask(layout)
    if not isinstance(specs, dict) or set(specs) != {"w1", "w2"}:
        raise WrongAnswer("Wanted a dict of two PartitionSpecs: 'w1' and 'w2'.")
    for name, spec in specs.items():
        if not isinstance(spec, P):
            raise WrongAnswer(f"{name} is {type(spec).__name__}; wanted a PartitionSpec.")
    mesh = mesh_of(data=2, model=4)
    program = ask(compile_mlp, {"x": P("data"), **specs})
    found = collectives(program)
    sent = sum(each.total_bytes_sent for each in found) / 1024
    wanted = sum(each.total_bytes_sent for each in collectives(compile_mlp(MEGATRON))) / 1024
    stored = {
        name: math.prod(NamedSharding(mesh, spec).shard_shape(SHAPES[name])) * 4 / 1024
        for name, spec in specs.items()
    }
    show(draw_bars(
        ["w1 held", "w2 held", "sent"], [*stored.values(), sent], [4, 4, wanted],
        xlabel="KiB per device",
    ))  # fmt: skip
    for name, kib in stored.items():
        if kib > 4:
            raise WrongAnswer(f"{name}: every device holds {kib:g} KiB; a quarter of it is 4 KiB.")
    kinds = ", ".join(each.kind for each in found)
    if kinds != "all-reduce":
        raise WrongAnswer(
            f"It runs, but sends {sent:.0f} KiB per device ({kinds}); one all-reduce of "
            f"{wanted:.0f} KiB is enough. Which product sums over what is cut?"
        )
    return f"Right: one all-reduce, {sent:.0f} KiB per device."


OUTLINE = Outline(
    "One array, many devices",
    questions=(
        Question(
            "copies",
            "Eight devices form a mesh of data=2 by model=4. A matrix is placed with "
            "PartitionSpec('model'). How many times over is it stored on all devices together?",
            _copies,
            unit="copies",
            low=0.01,
            high=100,
        ),
        Question(
            "which_collective",
            "tanh(x w1) w2 on that mesh: x cut by 'data' (rows), w1 by 'model' (columns), w2 by "
            "'model' (rows), the result as x. What must be sent?",
            _which_collective,
            options=_SENT,
        ),
    ),
    exercises=(
        Exercise(
            "local_shape",
            "Which shape does one device hold?",
            _judge_local_shape,
            (
                "A dimension whose entry is None stays whole; so do those beyond the spec's end.",
                "An entry may be one axis or several; several cut together.",
                "Divide each length by the product of the sizes of its axes.",
            ),
        ),
        Exercise(
            "layout",
            "Cut both weights by four so that the program sends as little as possible; x is cut "
            "by 'data', and so is the result.",
            _judge_layout,
            (
                "After the first product, which dimension of it is cut?",
                "If w1's columns are cut, each device applies the nonlinearity to its own columns "
                "without asking.",
                "Then w2 must be cut where those columns meet it: in its rows.",
            ),
            minutes=10,
        ),
    ),
)
