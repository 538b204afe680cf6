"""The losses that train the indexers of DSA layers, from the same forward pass as the logits.

The selection has no gradient, so each indexer has its own loss, with constant inputs. The gradient
of these losses reaches only the indexers, and that of a loss on the logits reaches everything else,
so that both can be added:

    warm-up      the model attends to everything, only the indexers learn (stage "dense")
    afterwards   cross-entropy of the logits + mean of the losses                (stage "sparse")

The indexers of "csa" and "qsa" layers have no loss here. Public codes train DeepSeek-V4's, and
differ in whether the distribution over its entries is taken within the softmax that also has the
window and the sink; none was found for Qwen4's.
"""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import check_choice, checked
from toolkit.looped.mixing.sparse.deepseek_sparse import Stage, recording
from toolkit.looped.model import LoopedLM


class IndexerLosses(NamedTuple):
    """Divergence of every indexer from the attention that it approximates, in nats per token.

    Attributes:
        loops: of the looped DSA layers, in every loop.
        outside: of those in the prelude, then in the coda.

    Example:
        >>> losses = IndexerLosses(jnp.ones((2, 1)), jnp.zeros(1))
        >>> float(losses.mean())  # 2 loops of one layer, and one in the prelude
        0.6666666865348816
    """

    loops: Float[Array, "loops layers"]
    outside: Float[Array, "layers"]

    def mean(self) -> Float[Array, ""]:
        """Mean over all of them."""
        return jnp.concatenate([self.loops.ravel(), self.outside]).mean()


@checked
def indexer_losses(
    model: LoopedLM, tokens: Int[Array, "batch time"], *,
    stage: Stage = "sparse", segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time vocabulary"], IndexerLosses]:  # fmt: skip
    """The logits of a model, and the divergence of each indexer from the attention that it
    approximates.

        loss = mean_t KL( mean over heads of the attention of t || softmax of its index scores )

    Args:
        model: one with "dsa" layers.
        tokens: whole numbers below the vocabulary.
        stage: "dense" lets every DSA layer attend to all earlier tokens, and compares over them;
            "sparse" runs the model as it is, and compares over the selected tokens.
        segment_ids: document number of each position of a packed sequence.

    Returns:
        Logits, as of `model(tokens)` in the sparse stage, and the losses.

    Cost: a forward pass, and another q k^T for every DSA layer.

    Source: DeepSeek-V3.2 technical report (2025), section 2.1 (warm-up and sparse training).

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny("dsa", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> logits, losses = indexer_losses(model, jnp.zeros((1, 40), int))
        >>> losses.loops.shape
        (1, 1)
    """
    config = model.config
    words = (*config.layers, *config.prelude_layers, *config.coda_layers)
    check_choice("stage", stage, ("dense", "sparse"))
    if "dsa" not in words:
        raise ValueError(f'pattern {config.pattern!r} has no "dsa" layer, so no indexer.')
    view = _Recording(model, stage)
    with recording(stage) as outside:
        logits = LoopedLM.__call__(cast(LoopedLM, view), tokens, segment_ids=segment_ids)
    return logits, IndexerLosses(jnp.stack(view.losses), jnp.array(outside, jnp.float32))


class _Recording:
    """A model whose loops also return the losses of their layers."""

    _run = LoopedLM._run  # which then asks this object for its loops

    def __init__(self, model: LoopedLM, stage: Stage):
        self.model = model
        self.stage: Stage = stage
        self.losses: list[Array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def run_loops(self, body, h, **options):
        stage = self.stage

        def recorded(tau, h, row):
            with recording(stage) as losses:
                h, result = body(tau, h, row)
            return h, (result, jnp.array(losses, jnp.float32))

        h, results = self.model.run_loops(recorded, h, **options)
        self.losses.extend(losses for _, losses in results)
        return h, tuple(result for result, _ in results)
