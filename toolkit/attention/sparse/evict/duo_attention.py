r"""DuoAttention: a few heads retrieve and read everything, the others read sinks and recent tokens.

    gate_h = argmin over a of |(1 - a) (o_h - s_h)|^2 + penalty a = max(0, 1 - penalty / (2 D_h))

with o_h the output of attention to everything, s_h that of sinks and recent tokens, and D_h their
mean squared distance. The published gates are trained through the whole model on synthetic passkeys
with the same loss; this closed form judges every head alone.

A layer's heads then read by `PerHead`, with `SELECTORS["window"]` as their system.

Source: Xiao et al. (2024), arXiv:2410.10819, sections 2.2 and 2.3.
"""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit._annotations import Positive
from toolkit._checks import checked
from toolkit.attention.sparse.budget import PerHead


@checked
def head_gates(
    exact: Float[Array, "queries heads value"],
    streamed: Float[Array, "queries heads value"],
    *,
    penalty: Annotated[float, Positive()] = 0.05,
) -> Float[Array, "heads"]:
    """How much of attention to everything each head needs, from 0 to 1.

    Args:
        exact: outputs of attention to everything [queries, heads, value].
        streamed: those of attention to sinks and recent tokens, of the same shape.
        penalty: of a gate, in the unit of squared outputs.

    Returns:
        The gates [heads].

    Example:
        >>> head_gates(jnp.ones((1, 2, 4)), jnp.stack([jnp.ones((1, 4)), jnp.zeros((1, 4))], 1))
        Array([0.   , 0.975], dtype=float32)
    """
    distance = jnp.square(exact - streamed).mean(axis=(0, 2))
    return jnp.maximum(1 - penalty / jnp.maximum(2 * distance, penalty), 0)


@checked
def split_heads(
    gates: Float[np.ndarray, "layers key_value_heads"], streaming_share: float, *,
    streaming_tokens: int, capacity: int,
) -> list[PerHead]:  # fmt: skip
    """Budgets of all layers: heads with the smallest gates stream, the others read everything.

    Args:
        gates: of every key-value head [layers, key_value_heads].
        streaming_share: share of all heads of the model that stream.
        streaming_tokens: sinks and recent tokens that these read.
        capacity: of the cache, which the others read.

    Returns:
        A budget per layer.

    Example:
        >>> import numpy as np
        >>> split_heads(np.array([[0.1, 0.9]]), 0.5, streaming_tokens=64, capacity=4096)
        [PerHead(tokens=(64, 4096))]
    """
    if not 0 <= streaming_share <= 1:
        raise ValueError(f"streaming_share must be from 0 to 1; got {streaming_share}.")
    gates = np.asarray(gates)
    streams = np.zeros(gates.size, bool)
    streams[np.argsort(gates, axis=None, kind="stable")[: round(gates.size * streaming_share)]] = 1
    tokens = np.where(streams.reshape(gates.shape), streaming_tokens, capacity)
    return [PerHead(tuple(row)) for row in tokens.tolist()]
