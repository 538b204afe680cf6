"""The base of token-wise layers."""

from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from toolkit.experts import Routing
from toolkit.looped.mixing.layer import ConfiguredLayer


class FeedForwardLayer(ConfiguredLayer):
    """A layer made as Layer(config, down_std=..., rngs=rngs).

    `down_std` is (hidden size, width) -> the standard deviation of the down projections.

    Attributes:
        reads_tokens: whether `routed` takes the `tokens` [...] beside their stream.
    """

    reads_tokens: ClassVar[bool] = False

    def __call__(
        self, x: Float[Array, "... width"], *, tokens: Int[Array, "..."] | None = None
    ) -> Float[Array, "... width"]:
        return self.routed(x, **({"tokens": tokens} if self.reads_tokens else {}))[0]

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, Routing | None]:
        """The output, and a router's decisions if there is one."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        """The number of trained parameters of a layer, and of those that one token uses."""
        raise NotImplementedError
