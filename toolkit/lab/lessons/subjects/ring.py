"""Lesson 05, write a ring all-reduce and predict its bytes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from toolkit.lab.lessons.drawing import draw_lines, draw_matrices
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    are_close,
    ask,
    ask_number,
)
from toolkit.lab.lessons.subjects.parts.eight_devices import DEVICES, mesh_of
from toolkit.measure import collectives

ENTRIES = 64


def on_the_ring(function: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function of one device's [entries], run on all eight; arrays are [devices, entries]."""
    mesh = mesh_of(ring=DEVICES)

    @functools.wraps(function)  # errors name what the learner wrote
    def local(x: jax.Array) -> jax.Array:
        return ask(function, x[0], "ring", DEVICES)[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("ring"), out_specs=P("ring")))


def compile_ring(function: Callable[..., jax.Array], entries: int = ENTRIES) -> Any:
    """The program of a function of one device's [entries]."""
    x = jax.ShapeDtypeStruct((DEVICES, entries), jnp.float32)
    return on_the_ring(function).lower(x).compile()


def sent_by(function: Callable[..., jax.Array]) -> tuple[float, int, set[str]]:
    """(bytes one device sends, messages, kinds of collectives), as the compiler made them."""
    found = collectives(compile_ring(function))
    total = sum(each.total_bytes_sent for each in found)
    return total, sum(each.count for each in found), {each.kind for each in found}


def hand_round(part: jax.Array, axis: str, devices: int) -> jax.Array:
    """The second half of the ring: the sum [entries] on all, from part (d + 1) % devices on d."""
    device = jax.lax.axis_index(axis)
    right = [(d, (d + 1) % devices) for d in range(devices)]
    parts = jnp.zeros((devices, *part.shape), part.dtype).at[(device + 1) % devices].set(part)
    for step in range(devices - 1):
        part = jax.lax.ppermute(part, axis, right)
        parts = parts.at[(device - step) % devices].set(part)
    return parts.reshape(-1)


def _least_bytes() -> Answer:
    total, *_ = sent_by(lambda x, axis, devices: jax.lax.psum(x, axis))
    truth = total / (4 * ENTRIES) * 64
    words = (
        f"Each device sends {truth:g} MB (modelled, the least that is possible; "
        "toolkit.measure.collectives says the same of a compiled psum): 7/8 of 64 MB to add up "
        "and 7/8 to hand out, 2(n-1)/n of the array."
    )
    return Answer(truth, words)


def _more_devices() -> Answer:
    words = (
        "It stays nearly the same (modelled): 2(n-1)/n is 1.75 for 8 devices and 1.998 for 1,024. "
        "What grows with the devices is the number of messages, 2(n-1), one after another."
    )
    return Answer("nearly the same", words)


def _judge_ring_bytes(ring_bytes: Callable[..., Any], show: Show) -> str:
    devices = [1, 2, 4, 8, 64]
    got = [ask_number(ring_bytes, n, 1000.0) for n in devices]
    wanted = [2 * (n - 1) / n * 1000 for n in devices]
    show(draw_lines(devices, got, wanted, xlabel="devices", ylabel="bytes sent of 1,000"))
    if got[0] != 0:
        raise WrongAnswer(f"One device has nobody to send to; yours sends {got[0]:g}.")
    if are_close(got, [half / 2 for half in wanted]):
        raise WrongAnswer(
            "Half: that adds the parts up (reduce-scatter), but nobody learns the whole sum."
        )
    if got[-1] > 2000:
        raise WrongAnswer(
            f"With 64 devices yours sends {got[-1] / 1000:.3g} times the array; in parts, less "
            "than twice is enough."
        )
    if not are_close(got, wanted):
        raise WrongAnswer(f"For 8 devices: {got[3]:g}; wanted {wanted[3]:g}.")
    return "Right: 2 (n-1)/n of the array."


def _judge_ring_all_reduce(ring_all_reduce: Callable[..., Any], show: Show) -> str:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (DEVICES, ENTRIES)), jnp.float32)
    got = ask(ask(on_the_ring, ring_all_reduce), x)
    if got.shape != x.shape:
        raise WrongAnswer(f"A device returns {list(got.shape[1:])}; wanted [{ENTRIES}].")
    got, wanted = np.asarray(got), np.tile(np.asarray(x).sum(0), (DEVICES, 1))
    show(draw_matrices(got, wanted, xlabel="entry", ylabel="device", title="the sum, everywhere"))
    right = got == wanted
    if not right.all():
        parts = right.reshape(DEVICES, DEVICES, -1).all(axis=2).sum(axis=1)
        if (parts == 1).all():
            raise WrongAnswer(
                "Every device has one part of the sum: that is a reduce-scatter, the first half. "
                "Now hand the parts round, by ring.hand_round."
            )
        raise WrongAnswer(
            "Of the eight parts of the sum, the devices have "
            f"{', '.join(map(str, parts))} right; wanted 8 each."
        )
    total, messages, kinds = sent_by(ring_all_reduce)
    if kinds != {"collective-permute"}:
        others = ", ".join(sorted(kinds - {"collective-permute"}))
        raise WrongAnswer(f"Right, but it uses {others}; write it with ppermute alone.")
    least = 2 * (DEVICES - 1) / DEVICES * ENTRIES * 4
    if total > least * 1.01:
        raise WrongAnswer(
            f"The sum is right, but a device sends {total / (4 * ENTRIES):.3g} times its array; "
            f"{least / (4 * ENTRIES):.3g} times is enough: send an eighth at a time."
        )
    return f"Right: {total:.0f} bytes in {messages} messages, the least that is possible."


OUTLINE = Outline(
    "Write a ring all-reduce, predict its bytes",
    questions=(
        Question(
            "least_bytes",
            "Eight devices each hold 64 MB of gradients; all need the sum. How many MB must each "
            "device send, at least?",
            _least_bytes,
            unit="MB",
            low=0.1,
            high=1e5,
        ),
        Question(
            "more_devices",
            "Now 1,024 devices instead of 8, each with 64 MB. What each must send at least ...",
            _more_devices,
            options=(
                "is 128 times as much",
                "grows with the logarithm: about 3 times",
                "nearly the same",
                "is less",
            ),
        ),
    ),
    exercises=(
        Exercise(
            "ring_bytes",
            "Bytes each of n devices sends to sum an array of some bytes, by the ring.",
            _judge_ring_bytes,
            (
                "The array is cut into n parts; how often does a device send one part?",
                "n - 1 times while sums are made, n - 1 times while they are handed round.",
                "2 (n - 1) / n times the array.",
            ),
        ),
        Exercise(
            "ring_all_reduce",
            "Write the first half of an all-reduce with jax.lax.ppermute; the second is given.",
            _judge_ring_all_reduce,
            (
                "First half: at each step a device sends one part to its neighbour, who adds its "
                "own. Which part, after s steps, does device d send?",
                "With parts [n, ...] and d = jax.lax.axis_index(axis): send parts[(d - s) % n], "
                "add what comes to parts[(d - s - 1) % n].",
                "After n - 1 steps device d holds the sum of part (d + 1) % n: return "
                "ring.hand_round(parts[(d + 1) % n], axis, n).",
            ),
            minutes=15,
            seconds=4,
        ),
    ),
)
