"""Any row of `MIXERS` in a benchmark: its inputs, a cotangent, its forms as functions of arrays."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from toolkit.attention import Mixer, draw_inputs
from toolkit.bench.harness import weighted_gradient


def mixer_inputs(
    row: Mixer, time: int, heads: int, size: int, *,
    batch: int = 1, dtype: jnp.dtype | type = jnp.float32,
) -> list[jax.Array]:  # fmt: skip
    """Heads of one size for keys and values, gates in float32."""
    return draw_inputs(
        row, time, batch=batch, heads=heads, key=size, value=size, dtype=dtype,
        gate_dtype=jnp.float32,
    )  # fmt: skip


def direction(backward: bool) -> str:
    """How names of cases say whether they differentiate."""
    return "forward+backward" if backward else "forward"


def output_weight(row: Mixer, arrays: list[jax.Array]) -> jax.Array:
    """A cotangent of the row's output, every number with a gradient of its own."""
    v = arrays[row.names.index("v")]
    return jax.random.normal(jax.random.key(1), (*v.shape[:3], v.shape[-1]), v.dtype)


def mixer_form(row: Mixer, implementation: str | None, *, backward: bool) -> Callable:
    """One form of the row as a function of arrays alone."""

    def form(*arrays: jax.Array) -> jax.Array:
        return row.function(*arrays, implementation=implementation, **row.options)[0]

    return weighted_gradient(form, len(row.inputs)) if backward else form
