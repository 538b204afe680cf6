"""Log-linear attention as layers: Mamba-2's and Gated DeltaNet's, and a weight per level."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention import MIXERS
from toolkit.attention.costs import LEVELS
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.delta import DeltaOptions, GatedDeltaNetLayer
from toolkit.looped.mixing.linear.mamba2 import Mamba2Layer, Mamba2Options
from toolkit.looped.mixing.linear.recurrent import Projection, RecurrentLayer, split_heads


@dataclasses.dataclass(frozen=True)
class LogLinearMamba2Options(Mamba2Options):
    """Options of "log_mamba2" layers: those of "mamba2", and `levels`, of which the last holds all
    that is older than 2 ** (levels - 2) tokens."""

    levels: int = LEVELS


@dataclasses.dataclass(frozen=True)
class LogLinearDeltaOptions(DeltaOptions):
    """Options of "log_gdn" layers: those of "gdn", and `levels`, of which the last holds all that
    is older than 2 ** (levels - 2) tokens."""

    levels: int = LEVELS


class Levels(nnx.Module):
    """Weights of levels: softplus(L * (x W_l)) per head and level.

    Attributes:
        weigh: projection.
        rate: L, [heads, levels], starts at 1.

    Source: Guo et al., "Log-Linear Attention", 2025, section 3.3; L as in its public code.
    """

    def __init__(self, config: LayerConfig, heads: int, levels: int, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        self.weigh = linear(width, heads * levels, dtype, rngs, std=width**-0.5)
        self.rate = nnx.Param(jnp.ones((heads, levels)))

    def added(self, found: Projection, x: Any) -> Projection:
        """A layer's inputs, with the weights as the last of them."""
        raw = split_heads(self.weigh(x).astype(accumulator(x.dtype)), self.rate.shape[-1])
        weights = jax.nn.softplus(self.rate[...] * raw)
        return found._replace(inputs=(*found.inputs, weights))


class _LevelledLayer(RecurrentLayer):
    """Before another layer: the same with a state once per level, and weights of the levels."""

    can_cut_time: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs, **how: Any):
        super().__init__(config, rngs=rngs, **how)
        count = self.options_of(config).levels
        self.levels = Levels(config, self.sizes.value_heads, count, rngs=rngs)

    @classmethod
    def empty_state(cls, config: LayerConfig, batch: int, capacity: int) -> Any:
        made, levels = MIXERS[cls.word].empty_state, cls.options_of(config).levels
        _, *sizes = cls.sizes_of(config)
        return made(batch, *sizes, capacity, config.compute_dtype, levels=levels)

    def project(self, x, past, segment_ids):
        return self.levels.added(super().project(x, past, segment_ids), x)


class LogLinearMamba2Layer(_LevelledLayer, Mamba2Layer):
    """`Mamba2Layer` with `log_linear_mamba2` in place of its mixer.

    Source: Guo et al., "Log-Linear Attention", 2025, section 3.3.
    """

    word: ClassVar[str] = "log_mamba2"
    Options: ClassVar[type[LayerOptions]] = LogLinearMamba2Options


class LogLinearGatedDeltaLayer(_LevelledLayer, GatedDeltaNetLayer):
    """`GatedDeltaNetLayer` with `log_linear_gated_delta_net` in place of its mixer.

    Source: Guo et al., "Log-Linear Attention", 2025, section 3.3.
    """

    word: ClassVar[str] = "log_gdn"
    Options: ClassVar[type[LayerOptions]] = LogLinearDeltaOptions
    starts_from_attention: ClassVar[bool] = False
