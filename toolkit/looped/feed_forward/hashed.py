"""A mixture of experts in which a table of tokens names the experts."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.experts import Routing, mixture
from toolkit.looped.feed_forward.mixture import MixtureLayer, MixtureOptions, RouterState
from toolkit.looped.mixing.layer import LayerOptions


class ExpertTable(RouterState):
    """The experts of every token [vocabulary, chosen], whole numbers."""


class HashedMixtureLayer(MixtureLayer):
    """A mixture whose experts follow from the token alone; the router only weighs them.

        i = table[token];   w = scale s_i / sum_j s_j,  s the scores of the router

    A token's experts are always the same, so their loads are those of the tokens in the text. The
    table starts as random runs of neighbouring experts. The options are those of "moe" layers.

    Source: Roller et al., "Hash Layers For Large Sparse Models", 2021, arXiv:2106.04426; the first
        layers of DeepSeek-V4, its technical report (2026), section 2.1.
    """

    word: ClassVar[str] = "hash_moe"
    Options: ClassVar[type[LayerOptions]] = LayerOptions
    reads_tokens: ClassVar[bool] = True

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        super().__init__(config, down_std=down_std, rngs=rngs)
        count, chosen = self.options.experts, self.options.chosen
        first = jax.random.randint(rngs.params(), (config.vocabulary, 1), 0, count)
        self.router.table = ExpertTable((first + jnp.arange(chosen)) % count)

    @classmethod
    def options_of(cls, config: Any) -> MixtureOptions:
        """Those of "moe" layers, without the bias of a choice that is not made."""
        return dataclasses.replace(MixtureLayer.options_of(config), choice_bias=False)

    @classmethod
    def check(cls, config: Any) -> None:
        MixtureLayer.check(config)

    def routed(
        self, x: Float[Array, "... width"], *,
        apply: Callable[..., Array] = mixture, tokens: Int[Array, "..."] | None = None,
    ) -> tuple[Array, Routing]:  # fmt: skip
        """The output for these tokens, and the router's decisions."""
        if tokens is None:
            raise ValueError("hash_moe: such a layer was called without tokens; call the model.")
        return super().routed(x, apply=apply, experts=self.router.table[...][tokens])
