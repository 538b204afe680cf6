"""Options of layers whose heads share one key that is also the value (DeepSeek-V4)."""

import dataclasses
from typing import Any

from toolkit.attention.latent import Yarn
from toolkit.looped.mixing.layer import LayerOptions
from toolkit.looped.mixing.rotary import YarnScaling


@dataclasses.dataclass(frozen=True)
class SharedKeyOptions(LayerOptions):
    """Options of "shared_window" layers, and of "hca" and "csa" beside their own.

    Attributes:
        head_size: size of a head, and of the one key that is also the value of all heads.
        rope_size: how many of its channels turn, the last ones, in pairs of neighbours.
        query_latent_size: size of the latent that makes the queries.
        output_groups: groups of heads whose outputs are projected apart, 8 in DeepSeek-V4-Flash;
            they divide the heads.
        output_latent_size: size of each group's projection.
        sliding_window: tokens that a query sees as themselves, its own included.
        rope_theta: base of the rotary wavelengths of these layers (None: the model's).
        yarn_factor: factor by which YaRN extended the context, or None; this and the following are
            fields of `toolkit.attention.latent.Yarn`. Queries and keys are not sharpened.
        yarn_original_length, yarn_beta_fast, yarn_beta_slow, yarn_truncate: see `yarn_factor`.
    """

    head_size: int = 512
    rope_size: int = 64
    query_latent_size: int = 1024
    output_groups: int = 1
    output_latent_size: int = 1024
    sliding_window: int = 128
    rope_theta: float | None = None
    yarn_factor: float | None = None
    yarn_original_length: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True

    @classmethod
    def tiny(cls, **own: Any) -> Any:
        """Less than a short text has, so that the selection matters."""
        sizes = {"head_size": 32, "rope_size": 16, "query_latent_size": 32}
        return cls(**sizes, output_latent_size=32, sliding_window=16, **own)

    def scaling(self, theta: float) -> YarnScaling | None:
        """The stretch of rotary wavelengths of base `theta`, or None."""
        if self.yarn_factor is None:
            return None
        yarn = Yarn(
            factor=self.yarn_factor,
            original_length=self.yarn_original_length,
            beta_fast=self.yarn_beta_fast,
            beta_slow=self.yarn_beta_slow,
            truncate=self.yarn_truncate,
        )
        return YarnScaling(yarn, theta, 1.0)


@dataclasses.dataclass(frozen=True)
class HCAOptions(SharedKeyOptions):
    """Options of "hca" layers: `SharedKeyOptions` and `block_size`, the tokens of an entry."""

    block_size: int = 128

    @classmethod
    def tiny(cls) -> "HCAOptions":
        """Less than a short text has, so that the selection matters."""
        return super().tiny(block_size=8)


@dataclasses.dataclass(frozen=True)
class CSAOptions(SharedKeyOptions):
    """Options of "csa" layers, beside `SharedKeyOptions`.

    Attributes:
        block_size: tokens by which an entry is later than the one before; it is made of twice as
            many.
        selected_entries: entries that a query attends to.
        index_heads: heads of the indexer (None: the model's `heads`).
        index_size: size of each.
    """

    block_size: int = 4
    selected_entries: int = 512
    index_heads: int | None = None
    index_size: int = 128

    @classmethod
    def tiny(cls) -> "CSAOptions":
        """Less than a short text has, so that the selection matters."""
        return super().tiny(selected_entries=8, index_size=16)
