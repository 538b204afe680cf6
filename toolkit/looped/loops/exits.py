"""When to stop looping: a learned distribution over loops, its loss, and its use.

The gate of a model with `exit_gate` reads the hidden state after each loop:

    lambda_t = sigmoid(w h^(t) + b),   p_t = lambda_t prod_(j<t) (1 - lambda_j),   p_T = the rest

so p is a distribution over the loops of every position. Training weighs each loop's loss by it and
rewards its entropy, so that it does not collapse onto one loop before the loops have learnt to
differ.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.model import LoopedLM


@checked
def exit_probabilities(
    model: LoopedLM, hidden: Float[Array, "loops batch time width"]
) -> Float[Array, "loops batch time"]:
    """Probability of stopping after each loop, per position.

    Args:
        model: a model with an exit gate.
        hidden: the hidden state after each loop, from `model(tokens, return_loops=True)`.

    Returns:
        float32 probabilities [loops, batch, time] that sum to 1 over the loops.

    Source: Zhu et al., "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(loops=2, width=16, heads=2, exit_gate=True)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> _, hidden = model(jnp.zeros((1, 5), int), return_loops=True)
        >>> exit_probabilities(model, hidden).shape
        (2, 1, 5)
    """
    return jnp.exp(_log_probabilities(model, hidden))


@checked
def exit_loss(
    model: LoopedLM, tokens: Int[Array, "batch time"], targets: Int[Array, "batch time"], *,
    entropy_weight: float, segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, ""]:  # fmt: skip
    """Expected cross-entropy over the loop at which a token stops, minus the entropy of that
    choice.

        mean over positions of   sum_t p_t CE_t  -  entropy_weight * H(p),   H = -sum_t p_t log p_t

    Args:
        model: a model with an exit gate.
        tokens: whole numbers below the vocabulary.
        targets: the token that follows each position.
        entropy_weight: weight of the entropy, per nat; at 0 the gate collapses.
        segment_ids: document of each position of a packed sequence.

    Returns:
        The loss, float32 scalar.

    Cost: a forward pass, with the head once per loop.

    Source: Zhu et al., "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025: the
        entropy-regularised objective, a uniform prior over loops.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(loops=2, width=16, heads=2, exit_gate=True)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.zeros((1, 5), int)
        >>> exit_loss(model, tokens, tokens, entropy_weight=0.1).shape
        ()
    """
    if targets.shape != tokens.shape:
        raise ValueError(f"targets have shape {targets.shape}, tokens {tokens.shape}: unequal.")
    _, hidden = model(tokens, segment_ids=segment_ids, return_loops=True)

    def cross_entropy(h):
        log_likelihood = jax.nn.log_softmax(model.head(h))
        return -jnp.take_along_axis(log_likelihood, targets[..., None], axis=-1)[..., 0]

    log_p = _log_probabilities(model, hidden)
    # One loop's logits at a time: they are the model's largest array.
    losses = jax.lax.map(jax.checkpoint(cross_entropy), hidden)
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (losses + entropy_weight * log_p), axis=0))


@checked
def exit_loop(probabilities: Float[Array, "loops ..."], threshold: float) -> Int[Array, "..."]:
    """The first loop, from 0, after which stopping has become likely enough.

        min { t : p_1 + ... + p_t >= threshold },   the last loop at a threshold of 1

    Args:
        probabilities: [loops, ...] from `exit_probabilities`.
        threshold: in (0, 1]; Ouro's models are released with 1, which runs all loops.

    Returns:
        int32 numbers of loops [...], below the number of loops.

    Source: Zhu et al., "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025.

    Example:
        >>> exit_loop(jnp.array([[0.2, 0.7], [0.5, 0.1], [0.3, 0.2]]), threshold=0.6)
        Array([1, 0], dtype=int32)
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must lie in (0, 1].")
    last = probabilities.shape[0] - 1
    if threshold == 1:
        return jnp.full(probabilities.shape[1:], last, jnp.int32)
    reached = jnp.cumsum(probabilities, axis=0) >= threshold
    # Rounding may leave the sum of all just short of the threshold.
    return jnp.argmax(reached.at[last].set(True), axis=0).astype(jnp.int32)


def _log_probabilities(model, hidden):
    if model.exit_gate is None:
        raise ValueError("the model has no exit gate; configure it with exit_gate=True.")
    scores = model.exit_gate(hidden.astype(accumulator(hidden.dtype)))[..., 0]
    stay = jnp.cumsum(jax.nn.log_sigmoid(-scores[:-1]), axis=0)
    stayed = jnp.concatenate([jnp.zeros_like(scores[:1]), stay])
    return stayed + jnp.concatenate([jax.nn.log_sigmoid(scores[:-1]), jnp.zeros_like(scores[:1])])
