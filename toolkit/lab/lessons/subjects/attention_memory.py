"""Lesson 10, attention as a memory: decay, the delta rule, and why chunks beat loops."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from toolkit.attention import delta_net_step, retention, retention_reference
from toolkit.figures import LOOKS
from toolkit.lab.lessons.drawing import draw_lines, draw_matrices, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask_array,
    ask_number,
)
from toolkit.lab.lessons.programs import operations, shapes_made

CHANNELS, PAIRS = 16, 48
TOKENS, CHUNK = 64, 16


@functools.cache
def _recall_errors() -> np.ndarray:
    """Error of the value read back under a key, over the value's size, after n writes."""
    draws = np.random.default_rng(0)
    errors = np.zeros(PAIRS)
    rounds = 100
    for _ in range(rounds):
        keys = draws.normal(size=(PAIRS, CHANNELS))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        values = draws.normal(size=(PAIRS, CHANNELS))
        state = np.cumsum(keys[:, :, None] * values[:, None], axis=0)
        wrong = np.einsum("nkv,k->nv", state, keys[0]) - values[0]
        errors += (np.linalg.norm(wrong, axis=1) / np.linalg.norm(values[0])) ** 2 / rounds
    return np.sqrt(errors)


def _capacity() -> Answer:
    errors = _recall_errors()
    truth = float(errors[31])
    words = (
        f"The error is {truth:.2g} times the value (measured here, 100 draws): each of the 31 "
        "other keys overlaps by 1/16 on average in square, and sqrt(31/16) = 1.39. What is read "
        "is mostly noise: a sum of 32 pairs does not fit 16 channels."
    )

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.74))
        axes.plot(np.arange(1, PAIRS + 1), errors, **LOOKS["full"].line)
        axes.plot([32], [truth], "o", color=LOOKS["full"].colour, markersize=10)
        mark_guess(axes, 32, guess, truth)
        axes.set(xlabel="pairs written", ylabel="error over size of the value")
        axes.set_ylim(bottom=0)

    return Answer(truth, words, draw)


def _same_key() -> Answer:
    words = (
        "It returns the second value: the rule first subtracts what the state holds under the key. "
        "The plain sum would return both added up."
    )
    return Answer("the second value", words)


def _chunk_speed() -> Answer:
    draws = tuple(jax.random.normal(jax.random.key(0), (3, 1, 1024, 2, 64)))

    def loss(draws: tuple[jax.Array, ...], implementation: Any) -> jax.Array:
        return jnp.sum(retention(*draws, implementation=implementation)[0])

    calls = {
        name: jax.jit(jax.grad(functools.partial(loss, implementation=name)))
        for name in ("scan", "xla")
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(6):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(draws))
            if count:
                seconds[name].append(time.perf_counter() - start)
    loop, chunks = (float(np.median(seconds[name])) for name in ("scan", "xla"))
    words = (
        f"Chunks are {loop / chunks:.3g} times faster (measured here: {loop * 1e3:.1f} ms token "
        f"by token, {chunks * 1e3:.1f} ms in chunks): the same mathematics as a few large products "
        "instead of 1,024 small steps one after another, whose states a gradient must all keep."
    )
    return Answer(loop / chunks, words)


def _judge_delta_step(delta_step: Callable[..., Any], show: Show) -> str:
    draws = np.random.default_rng(1)
    state = draws.normal(size=(4, 3))
    keys = np.linalg.qr(draws.normal(size=(4, 4)))[0]
    value = draws.normal(size=3)
    before = state.copy()
    new = ask_array(delta_step, (4, 3), state, keys[0], value, 1.0)
    key, written, memory = (
        jnp.asarray(x, jnp.float32)[None, None] for x in (keys[0], value, before)
    )
    _, wanted = delta_net_step(key, key, written, jnp.ones((1, 1)), memory)
    drawn = draw_matrices(
        new, np.asarray(wanted[0, 0]), xlabel="value channel", ylabel="key channel"
    )
    show(drawn)
    if not np.array_equal(before, state):
        raise WrongAnswer("It changes the state that it was given; return a new one.")
    for other in keys[1:]:
        if not np.allclose(other @ new, other @ state, atol=1e-6):
            raise WrongAnswer("Writing under one key changes what is held under others.")
    if np.allclose(keys[0] @ new, keys[0] @ state + value, atol=1e-6):
        raise WrongAnswer("It adds the value to what was held; the delta rule replaces it.")
    if not np.allclose(keys[0] @ new, value, atol=1e-6):
        raise WrongAnswer("With beta 1 the key does not return the value just written.")
    half = ask_array(delta_step, (4, 3), state, keys[0], value, 0.5)
    if not np.allclose(keys[0] @ half, (keys[0] @ state + value) / 2, atol=1e-6):
        raise WrongAnswer("With beta 0.5 the key must return half old, half new.")
    return "Right: S + beta k (v - S^T k)^T."


def _judge_log_decay(log_decay: Callable[..., Any], show: Show) -> str:
    lives = np.array([1.0, 8.0, 64.0, 1000.0])
    got = np.array([ask_number(log_decay, life) for life in lives])
    times = np.arange(0, 33)
    show(draw_lines(
        times, np.exp(np.clip(got[1] * times, -9, 1)), 0.5 ** (times / 8), xlabel="tokens",
        ylabel="share kept, half-life 8",
    ))  # fmt: skip
    if (got >= 0).any():
        raise WrongAnswer("A log-decay is below 0: its exponential is what is kept.")
    kept = np.exp(got * lives)
    if np.allclose(kept, np.exp(-1)):
        raise WrongAnswer("After that time a share of 1/e is kept, not a half.")
    if not np.allclose(kept, 0.5, rtol=1e-4):
        raise WrongAnswer(
            f"With a half-life of 8, a share of {kept[1]:.3g} is kept after 8 tokens."
        )
    return "Right: -ln 2 over the half-life."


@functools.cache
def _recurrence() -> tuple[Any, ...]:
    """q, k, v, weights of the output's entries, log-decay; output and gradients, token by token."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (jax.random.normal(key, (TOKENS, 8)) for key in keys)
    decay = jnp.float32(-0.05)

    def weighted(*draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, other, third = (x[None, :, None] for x in draws[:3])
        out, _ = retention_reference(first, other, third, scale=1.0, log_decay=draws[3][None])
        return jnp.sum(out[0, :, 0] * weights), out[0, :, 0]

    gradients, out = jax.jit(jax.grad(weighted, (0, 1, 2, 3), has_aux=True))(q, k, v, decay)
    return q, k, v, weights, decay, np.asarray(out), gradients


def _judge_chunked(chunked: Callable[..., Any], show: Show) -> str:
    q, k, v, weights, decay, wanted, wanted_gradients = _recurrence()
    got = ask_array(chunked, (TOKENS, 8), q, k, v, decay, CHUNK)
    show(draw_matrices(got.T, wanted.T, xlabel="token", ylabel="value channel"))
    if not np.allclose(got, wanted, atol=1e-3):
        first = int(np.argmax(np.abs(got - wanted).max(axis=1) > 1e-3))
        where = "inside the first chunk" if first < CHUNK else f"at token {first}, in a later chunk"
        raise WrongAnswer(f"The first difference from the recurrence is {where}.")
    strong = jnp.float32(-30.0)
    if not np.isfinite(ask_array(chunked, (TOKENS, 8), q, k, v, strong, CHUNK)).all():
        raise WrongAnswer(
            "With a decay of exp(-30) per token it is not finite: write exp(a - b), never "
            "exp(a) / exp(b)."
        )

    def weighted(*draws: jax.Array) -> jax.Array:
        return jnp.sum(chunked(*draws, CHUNK) * weights)

    gradients = jax.grad(weighted, (0, 1, 2, 3))
    for name, found, right in zip("qkvg", gradients(q, k, v, decay), wanted_gradients, strict=True):
        if not np.allclose(found, right, rtol=1e-3, atol=1e-2):
            raise WrongAnswer(f"The values are right, the gradient with respect to {name} is not.")
    if not all(np.isfinite(found).all() for found in gradients(q, k, v, strong)):
        raise WrongAnswer(
            "The values are right; with a decay of exp(-30) per token the gradient is not finite: "
            "mask the exponent before exp, not its result after."
        )
    found = operations(lambda *x: chunked(*x, decay, CHUNK), q, k, v)
    if any(shape.count(TOKENS) > 1 for shape in shapes_made(found)):
        raise WrongAnswer("Right, but it builds a matrix of all tokens by all tokens.")
    trips = [each.params["length"] for each in found if each.primitive.name == "scan"]
    products = sum(each.primitive.name == "dot_general" for each in found)
    if any(trip > TOKENS // CHUNK for trip in trips) or products > 8 * TOKENS // CHUNK:
        raise WrongAnswer("Right, but it walks token by token; only chunks may be a loop.")
    return "Right: value and gradient are the recurrence's, in 4 steps instead of 64."


OUTLINE = Outline(
    "Attention as a memory",
    questions=(
        Question(
            "capacity",
            "A state of 16 x 16 numbers gets 32 pairs of random keys (length 1) and values added "
            "up. Read the first value back by its key: how large is the error, as a multiple of "
            "the value's size?",
            _capacity,
            unit="times",
            low=0,
            high=100,
        ),
        Question(
            "same_key",
            "The delta rule writes two values under the same key, one after the other (beta 1). "
            "What does the key return?",
            _same_key,
            options=("the first value", "the sum of both", "their mean", "the second value"),
        ),
        Question(
            "chunk_speed",
            "The gradient of retention over 1,024 tokens (2 heads of 64 channels): once token by "
            "token, once in chunks. How many times faster are chunks on this machine?",
            _chunk_speed,
            unit="times",
            low=0.01,
            high=1e5,
            seconds=4,
        ),
    ),
    exercises=(
        Exercise(
            "delta_step",
            "Write one step of the delta rule: replace what the state holds under a key.",
            _judge_delta_step,
            (
                "What does the state return under k before you write?",
                "Write the difference between the value and that, under k.",
                "state + beta * jnp.outer(k, v - k @ state)",
            ),
            seconds=1,
        ),
        Exercise(
            "log_decay",
            "A state is multiplied by exp(g) at every token. Which g halves it in `half_life` "
            "tokens?",
            _judge_log_decay,
            (
                "After n tokens exp(g n) is left.",
                "Set exp(g n) = 1/2.",
                "g = -log(2) / half_life",
            ),
        ),
        Exercise(
            "chunked",
            "Write S_t = exp(g) S_(t-1) + k_t v_t^T, o_t = S_t^T q_t in chunks: inside a chunk by "
            "products of matrices, between chunks by the state.",
            _judge_chunked,
            (
                "Within a chunk token i sees token j <= i with weight exp(g (i - j)) (q_i . k_j).",
                "What came before the chunk reaches its token i (from 0) as exp(g (i + 1)) q_i S.",
                "The next state is exp(g C) S + sum_j exp(g (C - 1 - j)) k_j v_j^T.",
            ),
            minutes=25,
            seconds=10,
            is_extra=True,
        ),
    ),
)
