"""Softmax attention whose values also hold an embedding of the token itself."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.layers import linear
from toolkit.looped.mixing.attention import AttentionLayer
from toolkit.looped.mixing.attention_options import AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, Separate


@dataclasses.dataclass(frozen=True)
class ValueEmbeddingOptions(AttentionOptions):
    """Options of "value_embedding" layers: `AttentionOptions` and `gate_channels`, the number of
    channels of its input that the gates read; None for 32, or for all of them if there are fewer.
    """

    gate_channels: int | None = None

    def channels_of(self, width: int) -> int:
        """Channels that the gates read."""
        return min(32, width) if self.gate_channels is None else self.gate_channels


class GatedValues(nnx.Module):
    """v = x W_v + 2 sigmoid(x W_s) e, one gate per head; x W_s reads the first channels alone."""

    def __init__(self, width: int, heads: int, size: int, channels: int, dtype: Any, rngs: Any):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.projection = linear(width, heads * size, std=width**-0.5, **how)
        self.gate = linear(channels, heads, std=channels**-0.5, **how)
        self.width, self.channels = width, channels

    def __call__(self, both: Float[Array, "... inputs"]) -> Float[Array, "... values"]:
        """The input [..., width] and the embedding [..., values], side by side."""
        x, embedded = both[..., : self.width], both[..., self.width :]
        gate = 2 * jax.nn.sigmoid(self.gate(x[..., : self.channels]))
        by_head = embedded.reshape(*gate.shape, -1)
        return self.projection(x) + (gate[..., None] * by_head).reshape(embedded.shape)


class ValueEmbeddingLayer(AttentionLayer):
    """`AttentionLayer` with a table of values by token, added through a gate (see `GatedValues`).

    Source: Zhou et al., "Value Residual Learning", 2024, arXiv:2410.17897, for values that do not
        pass all layers; Parcae's published code for the table and its gate.
    """

    word: ClassVar[str] = "value_embedding"
    mixer: ClassVar[str] = "full"
    Options: ClassVar[type[LayerOptions]] = ValueEmbeddingOptions
    starts_from_attention: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = True

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        _, heads, size = self.sizes_of(config)
        dtype, channels = config.compute_dtype, self.options_of(config).channels_of(config.width)
        self.value = GatedValues(config.width, heads, size, channels, dtype, rngs)
        draw = nnx.initializers.normal(config.width**-0.5)
        sizes = config.vocabulary, heads * size
        self.table = nnx.Embed(*sizes, embedding_init=draw, dtype=dtype, rngs=rngs)

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        if (channels := cls.options_of(config).channels_of(config.width)) > config.width:
            raise ValueError(
                f"value_embedding.gate_channels {channels} are more than width {config.width}."
            )
        for name in ("streams", "attention_residual", "recursion"):
            if getattr(config, name, None):
                raise ValueError(f"value_embedding layers have no {name}; turn it off.")
        if cls.options_of(config).projection_biases:
            raise ValueError("value_embedding.projection_biases: these values have none; want off.")

    def __call__(self, x: Any, *, tokens: Any = None, **how: Any) -> tuple[Array, Any]:
        """Mix a sequence with these tokens, after those of a cache if one is given."""
        return super().__call__(self._separate(x, tokens), **how)

    def step(self, x_t: Any, cache: Any, *, tokens: Any = None, **how: Any) -> tuple[Array, Any]:
        """Mix one token and append it to the cache."""
        return super().step(self._separate(x_t, tokens), cache, **how)

    def _separate(self, x, tokens):
        if tokens is None:
            raise ValueError(
                "value_embedding: such a layer was called without tokens; call the model itself."
            )
        return Separate(x, x, jnp.concatenate([x, self.table(tokens).astype(x.dtype)], axis=-1))
