"""Mixture of block attention as a layer: the query's own block and the best-scoring others."""

import dataclasses
from typing import ClassVar

from flax import nnx

from toolkit.attention import mixture_of_block_attention, mixture_of_block_attention_step
from toolkit.looped.mixing.attention import AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.sparse.native_sparse import BlockLayer


@dataclasses.dataclass(frozen=True)
class MoBAOptions(AttentionOptions):
    """Options of "moba" layers, beside those of attention.

    Attributes:
        block_size: tokens per block.
        selected_blocks: blocks that a query reads, its own included.
    """

    block_size: int = 512
    selected_blocks: int = 3

    @classmethod
    def tiny(cls) -> "MoBAOptions":
        """Fewer tokens than a short text has, so that the selection matters."""
        return cls(block_size=8)


class MoBALayer(BlockLayer):
    """Grouped-query attention with rotary positions to the query's own block and the best others.

    The parameters are those of `AttentionLayer`, so that a model may switch between the two in
    training.

    Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.
    """

    word: ClassVar[str] = "moba"
    Options: ClassVar[type[LayerOptions]] = MoBAOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.options = self.options_of(config)

    @property
    def blocks(self) -> dict[str, int]:
        """The selection, as keyword arguments of the mixer."""
        names = ("block_size", "selected_blocks")
        return {name: getattr(self.options, name) for name in names}

    def _mix(self, x, positions, window, past):
        return mixture_of_block_attention(*self._project(x, positions), **self.blocks, **past)

    def _mix_step(self, x_t, cache, window):
        inputs = self._project(x_t, cache.length)
        return mixture_of_block_attention_step(*inputs, cache, **self.blocks)
