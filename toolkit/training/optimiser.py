"""AdamW with the usual settings for language models."""

from typing import Any

import jax
import optax

from toolkit._checks import checked


@checked
def adamw(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm and no weight decay on vectors.

        g <- g * min(1, clip_norm / |g|);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        w <- w - rate * (m_hat / (sqrt(v_hat) + eps) + weight_decay * w)     (w decays if a matrix)

    Norm scales, biases and per-head constants such as `A_log` or `dt_bias` are vectors; decay would
    change the model. The learning rate is in the state, where the train step reads it for the
    metrics.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled decay, scaled by the learning rate.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        clip_norm: largest global gradient norm; None for no clipping.

    Returns:
        An optax gradient transformation.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (arXiv:1711.05101).

    Example:
        >>> import optax
        >>> optimizer = adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 1000))
        >>> state = TrainState.create({"w": jnp.ones((4, 4))}, optimizer)
    """
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive or None, got {clip_norm}")
    for name, memory in (("b1", b1), ("b2", b2)):
        if not 0 <= memory < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {memory}")
    if eps <= 0:
        raise ValueError(f"eps must be positive, got {eps}")
    if weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    scale = optax.inject_hyperparams(optax.scale_by_learning_rate)
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=_is_matrix),
        scale(learning_rate=learning_rate),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
