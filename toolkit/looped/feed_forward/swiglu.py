"""The gated feed-forward layer, the one without a gate, and none."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerOptions

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "half_relu2"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "half_relu2": lambda x: jnp.square(jax.nn.relu(x)) / 2,
}
"""Functions by their word in `SwiGLUOptions`."""


@dataclasses.dataclass(frozen=True)
class SwiGLUOptions(LayerOptions):
    """Options of "swiglu" and "mlp" layers.

    Attributes:
        activation: the function; "gelu_tanh" is GELU in its tanh form, "relu2" relu(x)^2, and
            "half_relu2" half of that, as in Parcae.
        biases: add biases to the projections.
    """

    activation: Activation = "silu"
    biases: bool = False


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: y = W_down( act(W_gate x) * (W_up x) ), act = silu by default.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self, width: int, hidden: int, *,
        down_std: float, dtype: jnp.dtype, rngs: nnx.Rngs, activation: Activation = "silu",
        has_biases: bool = False,
    ):  # fmt: skip
        std = width**-0.5
        self.gate = linear(width, hidden, dtype, rngs, std=std, has_bias=has_biases)
        self.up = linear(width, hidden, dtype, rngs, std=std, has_bias=has_biases)
        self.down = linear(hidden, width, dtype, rngs, std=down_std, has_bias=has_biases)
        self.activation = activation

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class MLP(nnx.Module):
    """Feed-forward layer without a gate: y = W_down act(W_up x), act = relu^2 by default."""

    def __init__(
        self, width: int, hidden: int, *,
        down_std: float, dtype: jnp.dtype, rngs: nnx.Rngs, activation: Activation = "relu2",
        has_biases: bool = False,
    ):  # fmt: skip
        self.up = linear(width, hidden, dtype, rngs, std=width**-0.5, has_bias=has_biases)
        self.down = linear(hidden, width, dtype, rngs, std=down_std, has_bias=has_biases)
        self.activation = activation

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class _DenseLayer(FeedForwardLayer):
    """What `SwiGLU` and `MLP` share as layers of a model; `matrices` counts their products."""

    Options: ClassVar[type[LayerOptions]] = SwiGLUOptions
    can_cut_time: ClassVar[bool] = True
    matrices: ClassVar[int]

    @classmethod
    def sizes_and_options(cls, config: Any) -> dict[str, Any]:
        """The first arguments of `SwiGLU` and `MLP`, by name."""
        sizes = {"width": config.width, "hidden": config.feed_forward_size}
        options = cls.options_of(config)
        own = {"activation": options.activation, "has_biases": options.biases}
        return {**sizes, **own, "dtype": config.compute_dtype}

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, None]:
        return self(x), None

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        width, hidden = config.width, config.feed_forward_size
        biases = ((cls.matrices - 1) * hidden + width) * cls.options_of(config).biases
        count = cls.matrices * width * hidden + biases
        return count, count


class SwiGLULayer(SwiGLU, _DenseLayer):
    """`SwiGLU` of the model's `feed_forward_size`."""

    word: ClassVar[str] = "swiglu"
    matrices: ClassVar[int] = 3

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        std = down_std(config.feed_forward_size, config.width)
        super().__init__(**self.sizes_and_options(config), down_std=std, rngs=rngs)


class MLPLayer(MLP, _DenseLayer):
    """`MLP` of the model's `feed_forward_size`."""

    word: ClassVar[str] = "mlp"
    matrices: ClassVar[int] = 2

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        std = down_std(config.feed_forward_size, config.width)
        super().__init__(**self.sizes_and_options(config), down_std=std, rngs=rngs)


class NoFeedForward(FeedForwardLayer):
    """No layer: a block with it is its mixer alone, and has no norm for a second sub-layer."""

    word: ClassVar[str] = "none"
    can_cut_time: ClassVar[bool] = True

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        pass

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, None]:
        return jnp.zeros_like(x), None

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        return 0, 0
