"""Softmax attention and Mamba-2 side by side in one layer."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.looped.mixing.attention import AttentionLayer, AttentionSizes
from toolkit.looped.mixing.layer import LayerConfig, MixingLayer
from toolkit.looped.mixing.linear.mamba2 import Mamba2Layer
from toolkit.looped.mixing.linear.recurrent import RecurrentCache


class HybridCache(NamedTuple):
    """The caches of both parts of a "hybrid" layer."""

    attention: Any
    mamba: RecurrentCache

    def free(self, rows: Array) -> "HybridCache":
        """Clear some rows for other sequences."""
        return HybridCache(self.attention.free(rows), self.mamba.free(rows))

    def truncate(self, lengths: Int[Array, "batch"]) -> "HybridCache":
        """Refused: a state cannot take tokens back; see `restore`."""
        return HybridCache(self.attention, self.mamba.truncate(lengths))

    def restore(
        self, earlier: Sequence["HybridCache"], which: Int[Array, "batch"]
    ) -> "HybridCache":
        """Go back to an earlier state, row b to that of earlier[which[b]]."""
        attention, mamba = zip(*earlier, strict=True)
        own = self.attention.restore(attention, which), self.mamba.restore(mamba, which)
        return HybridCache(*own)


class HybridLayer(MixingLayer):
    """Attention and Mamba-2 of the same input, added: y = Attention(x) + Mamba2(x).

    Their options are those of "full" and "mamba2" layers.

    Source: TII, "Falcon-H1", 2025, arXiv:2507.22448, section 2.1.
    """

    word: ClassVar[str] = "hybrid"

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        self.attention = AttentionLayer(config, rngs=rngs)
        self.mamba = Mamba2Layer(config, rngs=rngs)

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> AttentionSizes:
        """Those of the attention."""
        return AttentionLayer.sizes_of(config)

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        AttentionLayer.check(config)
        Mamba2Layer.check(config)

    @classmethod
    def empty_cache(cls, config: LayerConfig, batch: int, capacity: int) -> HybridCache:
        """An empty cache of each part."""
        parts = (
            layer.empty_cache(config, batch, capacity) for layer in (AttentionLayer, Mamba2Layer)
        )
        return HybridCache(*parts)

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: HybridCache | None = None,
    ) -> tuple[Float[Array, "batch time width"], HybridCache | None]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given."""
        own = (None, None) if cache is None else cache
        y, attention = self.attention(x, segment_ids=segment_ids, cache=own[0])
        z, mamba = self.mamba(x, segment_ids=segment_ids, cache=own[1])
        return y + z, None if mamba is None else HybridCache(attention, mamba)

    def step(
        self, x_t: Float[Array, "batch width"], cache: HybridCache
    ) -> tuple[Float[Array, "batch width"], HybridCache]:
        """Mix one token and append it to both caches."""
        y_t, attention = self.attention.step(x_t, cache.attention)
        z_t, mamba = self.mamba.step(x_t, cache.mamba)
        return y_t + z_t, HybridCache(attention, mamba)
