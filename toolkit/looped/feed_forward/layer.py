"""The base of token-wise layers."""

from typing import Any

from jaxtyping import Array, Float

from toolkit.experts import Routing
from toolkit.looped.mixing.layer import ConfiguredLayer


class FeedForwardLayer(ConfiguredLayer):
    """A layer made as Layer(config, down_std=..., rngs=rngs).

    `down_std` is (hidden size, width) -> the standard deviation of the down projections.
    """

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.routed(x)[0]

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, Routing | None]:
        """The output, and a router's decisions if there is one."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        """The number of trained parameters of a layer, and of those that one token uses."""
        raise NotImplementedError
