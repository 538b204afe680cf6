"""Every recurrent mixer in chunks against its own scan over tokens, forward and backward."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from toolkit.attention import MIXERS, Mixer
from toolkit.bench.harness import Case, agree, bound, weighted_gradient

TIME, HEADS, SIZE = 2048, 8, 64
TOLERANCE = 1e-3
LEAST_RATIO = 10.0  # of the token scan's time over ours: it keeps one state a token


def inputs(row: Mixer, seed: int = 0) -> list[jax.Array]:
    """Random inputs as a trained layer would make them: unit keys, mild decay.

    Args:
        row: the mixer whose inputs and gates to draw.
        seed: of the draw.

    Returns:
        The row's inputs `[1, TIME, HEADS, SIZE]` and gates, float32.

    Cost:
        A random draw each.
    """
    shape = (1, TIME, HEADS, SIZE)
    drawn = []
    for number, name in enumerate((*row.inputs, *row.gates)):
        key = jax.random.fold_in(jax.random.key(seed), number)
        is_wide = name in row.inputs or name in row.channel_gates
        x = jax.random.normal(key, shape if is_wide else shape[:3])
        if name in ("q", "k"):
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        elif name == "g":
            x = jax.nn.log_sigmoid(x) / 4
        elif name in row.gates:
            x = jax.nn.sigmoid(x)
        drawn.append(x)
    return drawn


def _form(row: Mixer, implementation: str) -> Callable[..., jax.Array]:
    return lambda *args: row.function(*args, implementation=implementation, **row.options)[0]


def cases(cores: int) -> Iterator[Case]:
    """Forward+backward of every row of `MIXERS` that is a recurrence.

    Args:
        cores: cores this process may use.

    Returns:
        The comparisons; both contenders are ours, so what is compared is the form.

    Cost:
        A second or two a round and mixer, nearly all of it in the scans over tokens.
    """
    for row in MIXERS.values():
        if row.name in ("full", "window"):
            continue
        arrays = inputs(row)
        values = arrays[row.inputs.index("v")]
        args = (jax.random.normal(jax.random.key(1), values.shape), *arrays)
        flops = row.forward_flops(1, TIME, HEADS, SIZE, SIZE, **row.options)
        yield Case(
            name=f"{row.name} forward+backward B=1 T={TIME} H={HEADS} D={SIZE} float32",
            contenders={
                name: bound(jax.jit(weighted_gradient(_form(row, form), len(arrays))), args)
                for name, form in (("toolkit, chunked", "xla"), ("toolkit, token scan", "scan"))
            },
            check=agree(TOLERANCE),
            ours="toolkit, chunked",
            targets={"toolkit, token scan": LEAST_RATIO},
            note=f"modelled forward work: {flops / 1e9:.2f} GFLOP",
        )
