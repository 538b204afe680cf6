"""Lesson 06, shard a transformer block and read the compiled program."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
from toolkit.lab.lessons.subjects.parts.eight_devices import mesh_of
from toolkit.measure import collectives

BATCH, TIME, WIDTH, HEADS, HEAD_SIZE, HIDDEN = 4, 16, 32, 8, 4, 128
PROJECTION = (WIDTH, HEADS, HEAD_SIZE)
SHAPES = {
    "query": PROJECTION,
    "key": PROJECTION,
    "value": PROJECTION,
    "out": (HEADS, HEAD_SIZE, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
MEGATRON = {
    **dict.fromkeys(("query", "key", "value"), P(None, "model")),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}
Weights = dict[str, jax.Array]
Three = tuple[jax.Array, jax.Array, jax.Array]


def three_products(h: jax.Array, weights: Weights) -> Three:
    """Query, key and value [batch, time, heads, head_size] of h [batch, time, width]."""
    query, key, value = (
        jnp.einsum("btw,whs->bths", h, weights[name]) for name in ("query", "key", "value")
    )
    return query, key, value


def block(
    x: jax.Array, weights: Weights, projections: Callable[..., Three] = three_products
) -> jax.Array:
    """A transformer block, x [batch, time, width]: causal attention, then two products."""
    query, key, value = projections(_normed(x), weights)
    scores = jnp.einsum("bths,buhs->bhtu", query, key) / math.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhtu,buhs->bths", jax.nn.softmax(scores), value)
    x = x + jnp.einsum("bths,hsw->btw", mixed, weights["out"])
    return x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"]


def gradients(
    x: jax.Array, weights: Weights, projections: Callable[..., Three] = three_products
) -> tuple[jax.Array, Weights]:
    """Gradients of the block's mean square by x and by the weights: forward and backward."""
    return jax.grad(lambda x, w: jnp.mean(block(x, w, projections) ** 2), (0, 1))(x, weights)


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def compile_block(
    layout: dict[str, P],
    *,
    with_gradients: bool = False,
    projections: Callable[..., Three] = three_products,
    scale: int = 1,
) -> Any:
    """The program on data=2 by model=4: weights as the layout says, x by batch, gradients alike.

    `scale` multiplies time, width, head size and hidden columns, not batch and heads.
    """
    mesh = mesh_of(data=2, model=4)
    cut = {name: NamedSharding(mesh, layout[name]) for name in SHAPES}
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((BATCH, scale * TIME, scale * WIDTH), jnp.float32)
    weights = {
        name: jax.ShapeDtypeStruct(
            [size if size == HEADS else scale * size for size in shape], jnp.float32
        )
        for name, shape in SHAPES.items()
    }
    function, results = (gradients, (rows, cut)) if with_gradients else (block, rows)
    function = functools.partial(function, projections=projections)
    jitted = jax.jit(function, in_shardings=(rows, cut), out_shardings=results)
    return jitted.lower(x, weights).compile()


def sent_between_models(compiled: Any) -> float:
    """Bytes a device sends to the other three of its axis 'model'; the rest is of axis 'data'."""
    return sum(each.total_bytes_sent for each in collectives(compiled) if each.group_size == 4)


@functools.cache
def _forward() -> Any:
    return compile_block(MEGATRON)


def _forward_sums() -> Answer:
    found = collectives(_forward())
    kinds = {each.kind for each in found}
    count = sum(each.count for each in found)
    words = (
        f"It has {count} (counted in the compiled program; nothing but {', '.join(kinds)}): one "
        "where heads meet in the product `out`, one where the hidden columns meet in `down`. "
        "Softmax and gelu work on what a device has."
    )
    return Answer(float(count), words)


def _large_block() -> Answer:
    x_bytes = BATCH // 2 * TIME * WIDTH * 4
    times = sent_between_models(_forward()) / x_bytes
    truth = times * 8192 * 8192 * 2 / 1e6
    words = (
        f"It sends {truth:.0f} MB: {times:g} times x (read from the small compiled program, which "
        "has the same messages), and x has 134 MB. At 100 GB/s that is 4 ms per block, and every "
        "block waits for it."
    )
    return Answer(truth, words)


def _backward() -> Answer:
    program = compile_block(MEGATRON, with_gradients=True)
    truth = sent_between_models(program) / sent_between_models(_forward())
    words = (
        f"It sends {truth:g} times as much (compiled here). The paper has twice: each all-reduce "
        "has a mirror image. But query, key and value are three products here, and the compiler "
        "sums up three gradients of their input over 'model' before it adds them."
    )
    return Answer(truth, words)


def _judge_megatron(megatron: Callable[..., Any], show: Show) -> str:
    layout = ask(megatron)
    if not isinstance(layout, dict) or set(layout) != set(SHAPES):
        raise WrongAnswer(f"Wanted a dict of PartitionSpecs with the keys {', '.join(SHAPES)}.")
    for name, spec in layout.items():
        if not isinstance(spec, P):
            raise WrongAnswer(f"{name} is {type(spec).__name__}; wanted a PartitionSpec.")
    found = collectives(ask(compile_block, layout))
    mesh = mesh_of(data=2, model=4)
    stored = {
        name: math.prod(NamedSharding(mesh, layout[name]).shard_shape(shape)) * 4 / 1024
        for name, shape in SHAPES.items()
    }
    sent = sum(each.total_bytes_sent for each in found) / 1024
    quarters = [math.prod(shape) / 1024 for shape in SHAPES.values()]
    wanted = sent_between_models(_forward()) / 1024
    show(draw_bars(
        [*(f"{name}, held" for name in stored), "sent"], [*stored.values(), sent],
        [*quarters, wanted], xlabel="KiB per device",
    ))  # fmt: skip
    for (name, kib), quarter in zip(stored.items(), quarters, strict=True):
        if kib > quarter:
            raise WrongAnswer(
                f"{name}: every device holds {kib:g} KiB; a quarter of it is {quarter:g} KiB."
            )
    kinds = [each.kind for each in found for _ in range(each.count)]
    if kinds != ["all-reduce"] * 2 or sent > wanted:
        raise WrongAnswer(
            f"It runs, but sends {sent:.3g} KiB per device ({', '.join(kinds)}); two all-reduces "
            f"with {wanted:g} KiB are enough. Where does a product sum over what is cut?"
        )
    return f"Right: two all-reduces, {sent:g} KiB per device, a quarter of every weight."


def _judge_feed_forward(feed_forward: Callable[..., Any], show: Show) -> str:
    mesh = mesh_of(model=4, data=2)
    random = np.random.default_rng(0)
    x, up, down, bias = (
        jnp.asarray(random.normal(size=shape) / 4, jnp.float32)
        for shape in ((16, WIDTH), SHAPES["up"], SHAPES["down"], (WIDTH,))
    )

    # Stacked by device: what each of them has in the end is drawn, also where they differ.
    @functools.wraps(feed_forward)
    def local(*parts: jax.Array) -> jax.Array:
        return ask(feed_forward, *parts, "model")[None]

    specs = (P(), P(None, "model"), P("model"), P())
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("model"))
    compiled = ask(lambda: jax.jit(sharded).lower(x, up, down, bias).compile())
    each = ask_array(lambda: compiled(x, up, down, bias), (4, 16, WIDTH))
    wanted = np.asarray(jax.nn.gelu(x @ up) @ down + bias, np.float64)
    drawn = draw_matrices(
        each[0], wanted, xlabel="channel", ylabel="token, on device 0", title="wanted"
    )
    show(drawn)
    if not np.allclose(each, wanted, atol=1e-4):
        if np.allclose(each - wanted, 3 * np.asarray(bias), atol=1e-4):
            raise WrongAnswer(
                "The bias is in the sum four times: every device adds it before they are summed."
            )
        if not np.allclose(each, each[:1], atol=1e-4):
            raise WrongAnswer(
                "The devices end with different numbers: each has the sum over its own hidden "
                "columns only."
            )
        gap = np.abs(each - wanted).max()
        raise WrongAnswer(f"All devices agree, but are off by up to {gap:.2g}.")
    found = collectives(compiled)
    kinds = [collective.kind for collective in found for _ in range(collective.count)]
    if kinds != ["all-reduce"] or sum(collective.bytes for collective in found) > 16 * WIDTH * 4:
        raise WrongAnswer(
            f"Right, but it needs {', '.join(kinds)}; one all-reduce of [tokens, width] is enough."
        )
    return "Right: one all-reduce, and the bias once."


def _judge_projections(projections: Callable[..., Any], show: Show) -> str:
    random = np.random.default_rng(0)
    h = jnp.asarray(random.normal(size=(2, TIME, WIDTH)), jnp.float32)
    weights = {
        name: jnp.asarray(random.normal(size=shape) / 4, jnp.float32)
        for name, shape in SHAPES.items()
    }
    got, wanted = ask(projections, h, weights), three_products(h, weights)
    if not isinstance(got, list | tuple) or len(got) != 3:
        raise WrongAnswer("Wanted three arrays: query, key and value.")
    for name, answer, right in zip(("query", "key", "value"), got, wanted, strict=True):
        if jnp.shape(answer) != right.shape:
            raise WrongAnswer(
                f"{name} has shape {list(jnp.shape(answer))}; wanted {list(right.shape)}."
            )
        if not np.allclose(answer, right, atol=1e-4):
            raise WrongAnswer(f"{name} is not the product of h with its weights.")
    yours, theirs = (
        sent_between_models(ask(compile_block, MEGATRON, with_gradients=True, projections=function))
        / 1024
        for function in (projections, three_products)
    )
    target = 2 * sent_between_models(_forward()) / 1024
    show(draw_bars(
        ["three products", "yours"], [theirs, yours], [target, target],
        xlabel="KiB sent over 'model', forward and backward; wanted: at most",
    ))  # fmt: skip
    if yours > target:
        raise WrongAnswer(
            f"The numbers are right, but forward and backward send {yours:.3g} KiB over 'model'; "
            f"{target:g} are enough. How many gradients of h are summed?"
        )
    return f"Right: {yours:g} KiB instead of {theirs:g}: one gradient of h is summed."


OUTLINE = Outline(
    "Shard a transformer and read the compiled program",
    questions=(
        Question(
            "forward_sums",
            "A transformer block: attention with eight heads, then two products with a gelu "
            "between them. Heads and hidden columns are cut over four devices, x is not. How many "
            "collectives does the compiled forward program have?",
            _forward_sums,
            unit="collectives",
            low=0,
            high=1000,
        ),
        Question(
            "large_block",
            "The same on a larger model: 8,192 tokens of width 8,192 in bfloat16, four devices. "
            "How many MB must each device send in the forward pass of one block?",
            _large_block,
            unit="MB",
            low=0.1,
            high=1e6,
        ),
        Question(
            "backward",
            "Now forward and backward, as the compiler makes them. How many times what the forward "
            "pass alone sends does a device send over 'model'?",
            _backward,
            unit="times",
            low=0.1,
            high=100,
            seconds=1,
        ),
    ),
    exercises=(
        Exercise(
            "megatron",
            "Cut all six weights by four so that the block needs two all-reduces and nothing else.",
            _judge_megatron,
            (
                "What can a device do with whole heads of its own, without asking anybody?",
                "query, key and value [width, heads, head_size]: cut the heads. up: its columns.",
                "out [heads, head_size, width] and down meet what was cut: in their first "
                "dimension.",
            ),
            minutes=10,
            seconds=3,
        ),
        Exercise(
            "feed_forward",
            "Write gelu(x up) down + bias as each of four devices runs it, on its part of up and "
            "down, with one message.",
            _judge_feed_forward,
            (
                "Run the formula on the parts as they are; what does each device then have?",
                "jax.lax.psum(y, axis) adds up what all devices of an axis have.",
                "The bias is whole on every device: add it after the sum.",
            ),
            minutes=10,
            seconds=3,
        ),
        Exercise(
            "projections",
            "Compute query, key and value so that the backward pass sums one gradient of h instead "
            "of three.",
            _judge_projections,
            (
                "Each product with h has a gradient of h of its own. How many products must be?",
                "jnp.stack the three weights, and let one einsum use them all.",
                'jnp.einsum("btw,cwhs->cbths", h, stacked)',
            ),
            minutes=10,
            seconds=10,
        ),
    ),
)
