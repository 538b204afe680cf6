"""Native sparse attention as a layer: block means, selected blocks and a window."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention import BlockCache, native_sparse_attention, native_sparse_attention_step
from toolkit.looped.layers import linear
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions


@dataclasses.dataclass(frozen=True)
class NSAOptions(AttentionOptions):
    """Options of "nsa" layers, beside those of attention.

    Attributes:
        block_size: tokens per block.
        selected_blocks: blocks that a query reads whole.
        sliding_window: tokens of the window.
    """

    block_size: int = 64
    selected_blocks: int = 16
    sliding_window: int = 512

    @classmethod
    def tiny(cls) -> "NSAOptions":
        """Fewer tokens than a short text has, so that the selection matters."""
        return cls(block_size=8, selected_blocks=4, sliding_window=16)


class BlockLayer(AttentionLayer):
    """The base of layers that select blocks of keys by their means."""

    can_cut_time: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys and values for `capacity` tokens, and the means of their blocks."""
        _, heads, size = cls.sizes_of(config)
        dtype, block_size = config.compute_dtype, cls.options_of(config).block_size
        return BlockCache.empty(batch, heads, size, size, capacity, dtype, block_size=block_size)


class NSALayer(BlockLayer):
    """Grouped-query attention with rotary positions, to block means, selected blocks and a window.

    Projections as in `AttentionLayer`, shared by the three branches; their weights are
    sigmoid(x W_b), three per head.

    Source: Yuan et al., "Native Sparse Attention", 2025; LT2, section on mixers, for sharing keys
        and values and for pooling by the mean.
    """

    word: ClassVar[str] = "nsa"
    Options: ClassVar[type[LayerOptions]] = NSAOptions
    starts_from_attention: ClassVar[bool] = False  # the selection needs its branch gates

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.width
        self.branch_gate = linear(
            width, 3 * config.heads, config.compute_dtype, rngs, std=width**-0.5
        )
        self.options = self.options_of(config)

    @property
    def branches(self) -> dict[str, int]:
        """The selection, as keyword arguments of the mixer."""
        names = ("block_size", "selected_blocks", "sliding_window")
        return {name: getattr(self.options, name) for name in names}

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        if (blocks := cls.options_of(config).selected_blocks) < 3:
            raise ValueError(
                f"{cls.word}.selected_blocks is {blocks}; it must be at least 3, for the first "
                "block, the previous and the query's own."
            )

    def _mix(self, x, positions, window, past):
        inputs = (*self._project(x, positions), *self._gates(x))
        return native_sparse_attention(*inputs, **self.branches, **past)

    def _mix_step(self, x_t, cache, window):
        inputs = (*self._project(x_t, cache.length), *self._gates(x_t))
        return native_sparse_attention_step(*inputs, cache, **self.branches)

    def _gates(self, x):
        compressed, selected, window = jnp.split(jax.nn.sigmoid(self.branch_gate(x)), 3, axis=-1)
        return compressed, selected, window
