"""Random inputs for any row of `MIXERS`: what tests, benchmarks and instruments draw."""

import jax
import jax.numpy as jnp
import numpy as np

from toolkit._checks import checked
from toolkit.attention.inputs import Mixer


@checked
def draw_inputs(
    row: Mixer,
    time: int,
    *,
    batch: int = 2,
    heads: int = 2,
    key: int = 16,
    value: int = 8,
    steps: int = 2,
    dtype: jnp.dtype | type = jnp.float32,
    gate_dtype: jnp.dtype | type | None = None,
    seed: int = 0,
) -> list[jax.Array]:
    """Inputs as a layer would make them: unit keys, mild decays, gates within their ranges.

        x = values.of(standard normal numbers)   for each of `row.inputs`

    Args:
        row: the mixer.
        time: tokens.
        batch: sequences.
        heads: heads of all inputs, and of an indexer.
        key: key size of a head.
        value: value size of a head.
        steps: corrections per token, of the mixers that make several.
        dtype: of the inputs.
        gate_dtype: of the gates, which still hold numbers of `dtype`; None for `dtype`.
        seed: of the draw.

    Returns:
        One array per input of the row, in the order in which its functions take them.

    Cost:
        One draw on the host per number.

    Example:
        >>> from toolkit.attention import draw_inputs, mixer
        >>> q, k, v, g, beta = draw_inputs(mixer("gdn"), 5, batch=1)
        >>> k.shape, beta.shape
        ((1, 5, 2, 16), (1, 5, 2))
    """
    random = np.random.default_rng(seed)
    sizes = {
        "batch": batch, "time": time, "heads": heads, "index_heads": heads, "key": key,
        "value": value, "steps": steps,
    }  # fmt: skip

    def draw(name: str) -> jax.Array:
        given = row.input(name)
        shape = [sizes[axis] for axis in given.axes]
        drawn = jnp.asarray(given.values.of(random.standard_normal(shape)), dtype)
        return drawn.astype(gate_dtype) if given.is_gate and gate_dtype else drawn

    return [draw(name) for name in row.names]
