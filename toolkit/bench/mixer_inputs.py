"""Random inputs for any row of `MIXERS`, and its forms as functions of them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from toolkit.attention import Mixer
from toolkit.bench.harness import weighted_gradient

SUBSTEPS = 2  # delta steps a token, of the mixers that take several
RWKV7_LEAST_LOG_DECAY = -(math.e**-0.5)  # its layer's, on which its fast kernels rely
UNIT_LENGTH = ("q", "k", "removal_key")


def mixer_inputs(
    row: Mixer,
    time: int,
    heads: int,
    size: int,
    *,
    batch: int = 1,
    dtype: jnp.dtype | type = jnp.float32,
    seed: int = 0,
) -> list[jax.Array]:
    """Inputs as a trained layer would make them: unit keys, mild decay, strengths in (0, 1).

    Args:
        row: the mixer whose inputs and gates to draw.
        time: tokens.
        heads: heads of all of them.
        size: key and value size of a head.
        batch: sequences.
        dtype: of the inputs; gates are float32, and all but log-decays hold numbers of `dtype`.
        seed: of the draw.

    Returns:
        The row's inputs `[batch, time, heads, size]` and gates `[batch, time, heads]`, or
        `[..., size]` for gates of channels; those of `row.step_inputs` have an axis of
        `SUBSTEPS` after the heads.

    Cost:
        A random draw each.
    """
    drawn = []
    for number, name in enumerate((*row.inputs, *row.gates)):
        shape = (batch, time, heads)
        if name in row.step_inputs:
            shape += (SUBSTEPS,)
        if name in row.inputs or name in row.channel_gates:
            shape += (size,)
        x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), shape)
        if name in UNIT_LENGTH:
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        elif name == "g" and row.name == "rwkv7":
            x = RWKV7_LEAST_LOG_DECAY * jax.nn.sigmoid(x)
        elif name == "g":
            x = jax.nn.log_sigmoid(x) / 4
        elif name in row.gates:
            x = jax.nn.sigmoid(x)
        if name != "g":
            x = x.astype(dtype)
        # A gate is float32 and holds numbers that a peer may keep in `dtype` without rounding.
        drawn.append(x if name in row.inputs else x.astype(jnp.float32))
    return drawn


def direction(backward: bool) -> str:
    """How names of cases say whether they differentiate.

    Args:
        backward: whether they do.

    Returns:
        "forward" or "forward+backward".
    """
    return "forward+backward" if backward else "forward"


def output_weight(row: Mixer, arrays: list[jax.Array]) -> jax.Array:
    """A cotangent of the row's output, every number with a gradient of its own.

    Args:
        row: the mixer.
        arrays: what `mixer_inputs` drew.

    Returns:
        Normal numbers `[batch, time, heads, value]` in the dtype of v.

    Cost:
        A random draw.
    """
    v = arrays[row.inputs.index("v")]
    return jax.random.normal(jax.random.key(1), (*v.shape[:3], v.shape[-1]), v.dtype)


def mixer_form(row: Mixer, implementation: str | None, *, backward: bool) -> Callable:
    """One form of the row as a function of arrays alone.

    Args:
        row: the mixer.
        implementation: "xla", "scan", "pallas"; None lets the row choose.
        backward: whether to differentiate.

    Returns:
        (*inputs) -> output, or (weight, *inputs) -> gradients of the inputs.

    Cost:
        That of the form when it is called.
    """

    def form(*arrays: jax.Array) -> jax.Array:
        return row.function(*arrays, implementation=implementation, **row.options)[0]

    count = len(row.inputs) + len(row.gates)
    return weighted_gradient(form, count) if backward else form
