"""What every layer is that treats each token by itself."""

from typing import Any

from jaxtyping import Array, Float

from toolkit.experts import Routing
from toolkit.looped.mixing.layer import ConfiguredLayer


class FeedForwardLayer(ConfiguredLayer):
    """A layer made as Layer(config, down_std=..., rngs=rngs).

    `down_std` is (hidden size, width) -> the deviation of the projections back to the stream.
    """

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.routed(x)[0]

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, Routing | None]:
        """The output, and what a router decided where there is one."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        """Trained parameters of a layer, and those among them that one token passes."""
        raise NotImplementedError
