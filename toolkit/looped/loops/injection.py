"""How every loop reads the prelude's output again, so that its state cannot grow without bound."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.attention.execution.precision import accumulator

START_DECAY = math.sqrt(1 / 5)
"""What stays of a state in the first loop of training."""


class DiagonalInjection(nnx.Module):
    """A linear system over the loops, stable whatever its parameters are.

        h' = exp(-dt exp(a)) h + dt (e B),   dt = softplus(b)

    Every factor of h lies between 0 and 1, whereas a projection of [h, e] may have a large norm.

    Attributes:
        log_rate, step_bias: a and b, per channel.
        kernel: B [width, width]; it starts as the identity.

    Source: Prairie et al., "Parcae: Scaling Laws For Stable Looped Language Models", 2026,
        arXiv:2604.12946.
    """

    def __init__(self, width: int):
        step = -math.log(START_DECAY)
        self.log_rate = nnx.Param(jnp.zeros(width))
        self.step_bias = nnx.Param(jnp.full(width, step + math.log(-math.expm1(-step))))
        self.kernel = nnx.Param(jnp.eye(width))

    def __call__(self, both: Float[Array, "... two_widths"]) -> Float[Array, "... width"]:
        """The state [..., width] and the prelude's output, side by side."""
        wide = accumulator(both.dtype)
        h, injected = jnp.split(both.astype(wide), 2, axis=-1)
        step = jax.nn.softplus(self.step_bias[...].astype(wide))
        decay = jnp.exp(-step * jnp.exp(self.log_rate[...].astype(wide)))
        return (h * decay + step * (injected @ self.kernel[...].astype(wide))).astype(both.dtype)


def injection_parameters(config: Any) -> int:
    """Trained parameters of a configuration's injection."""
    if not config.input_injection:
        return 0
    width = config.width
    return width * (width + 2) if config.injection == "diagonal" else 2 * width * width
