"""Measures of the experts' balance, losses for it, and a bias that needs no loss.

All are computed from additive statistics, which may be summed over micro-batches, devices, loops
and layers. The balance loss of a sum of statistics is the loss at that level; over leading axes
that are not summed, losses are averaged (per sequence, say).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from toolkit._checks import check_shape, checked
from toolkit.experts.routing import Routing


class RoutingStatistics(NamedTuple):
    """Sums over tokens of a router's decisions; a pytree, and sums of statistics are statistics
    too.

    Attributes:
        loads: [..., experts], float32: pairs of a token and an expert.
        probabilities: [..., experts], float32: the sum of the tokens' probabilities.
        z: [...], float32: the sum of (log sum exp of the logits)^2.
        tokens: [...], float32: how many tokens.

    Example:
        >>> float(routing_statistics(route(jnp.ones((3, 8)), 2)).tokens)
        3.0
    """

    loads: Float[Array, "*leading experts"]
    probabilities: Float[Array, "*leading experts"]
    z: Float[Array, "*leading"]
    tokens: Float[Array, "*leading"]


@checked
def routing_statistics(
    routing: Routing, *, mask: Bool[Array, "*leading time"] | None = None
) -> RoutingStatistics:
    """Statistics over the last axis of tokens: for tokens [batch, time], per sequence.

    Args:
        routing: of tokens [..., time].
        mask: [..., time], False for padding tokens, which are not counted; None counts all.

    Returns:
        Statistics with the leading axes of the tokens.

    Example:
        >>> routing = route(jnp.array([[3.0, 2.0, 1.0], [3.0, 1.0, 2.0]]), 2)
        >>> routing_statistics(routing).loads.tolist()
        [2.0, 1.0, 1.0]
    """
    shape = routing.log_normaliser.shape
    if not shape:
        raise ValueError("routing must be of tokens [..., time]; got that of a single token")
    if mask is not None:
        check_shape("mask", mask, shape, "*leading time")
    return _statistics(routing, mask)


@jax.jit
def _statistics(routing, mask):
    shape = routing.log_normaliser.shape
    counts = jnp.ones(shape) if mask is None else mask.astype(jnp.float32)
    *leading, _ = shape
    experts = routing.experts.reshape(-1, *routing.experts.shape[-2:])
    rows = jnp.arange(len(experts))[:, None, None]
    loads = jnp.zeros((len(experts), routing.probabilities.shape[-1]))
    loads = loads.at[rows, experts].add(counts.reshape(*experts.shape[:2], 1))
    # A padding token's numbers may be anything, even NaN.
    probabilities = jnp.where(counts[..., None] > 0, routing.probabilities, 0)
    z = jnp.where(counts > 0, routing.log_normaliser, 0)
    return RoutingStatistics(
        loads.reshape(*leading, -1), probabilities.sum(-2), (z**2).sum(-1), counts.sum(-1)
    )


@checked
def pooled_statistics(statistics: RoutingStatistics, axes: int = 1) -> RoutingStatistics:
    """Sum statistics over their first axes.

    Args:
        statistics: with leading axes.
        axes: number of leading axes to sum over.

    Returns:
        The sums.

    Example:
        >>> routing = route(jnp.ones((4, 6, 8)), 2)
        >>> pooled_statistics(routing_statistics(routing)).loads.shape
        (8,)
    """
    if not 0 <= axes <= statistics.tokens.ndim:
        raise ValueError(f"axes must be from 0 to {statistics.tokens.ndim}; got {axes}")
    return jax.tree.map(lambda x: x.sum(tuple(range(axes))), statistics)


@checked
def balance_loss(statistics: RoutingStatistics) -> Float[Array, ""]:
    """The load-balancing loss of the Switch Transformer: 1 when all loads are even.

        loss = E sum_e f_e P_e      f: share of the pairs, P: mean probability; gradient through P

    The mean over leading axes. Of statistics per sequence it is the sequence-wise loss of
    DeepSeek-V3; of sums over layers, times the number of experts per token, it is the loss of
    Hugging Face's modules; of sums over devices and micro-batches, the global-batch loss. GShard's
    and MaxText's differ by factors of E and of the experts per token.

    Args:
        statistics: from `routing_statistics`, summed to the wanted level.

    Returns:
        A float32 scalar.

    Source: Fedus, Zoph, Shazeer, 2021, arXiv:2101.03961, equation 4; DeepSeek-V3, 2024,
        arXiv:2412.19437, equation 17; Qiu et al., 2025, arXiv:2501.11873 (levels).

    Example:
        >>> even = route(jnp.eye(4) * 5, 1, normalise=False)
        >>> round(float(balance_loss(routing_statistics(even))), 4)
        1.0
    """
    loads = jax.lax.stop_gradient(statistics.loads)
    share = loads / jnp.maximum(loads.sum(-1, keepdims=True), 1)
    mean = statistics.probabilities / jnp.maximum(statistics.tokens, 1)[..., None]
    return (loads.shape[-1] * (share * mean).sum(-1)).mean()


@checked
def z_loss(statistics: RoutingStatistics) -> Float[Array, ""]:
    """The router z-loss, which keeps logits small: mean over tokens of (log sum exp z)^2.

    Args:
        statistics: from `routing_statistics`; leading axes are summed.

    Returns:
        A float32 scalar.

    Source: Zoph et al., "ST-MoE", 2022, arXiv:2202.08906, equation 5.

    Example:
        >>> float(z_loss(routing_statistics(route(jnp.zeros((3, 1)), 1, normalise=False))))
        0.0
    """
    return statistics.z.sum() / jnp.maximum(statistics.tokens.sum(), 1)


@checked
def updated_choice_bias(
    bias: Float[Array, "*layers experts"],
    loads: Float[Array, "*layers experts"],
    rate: float = 1e-3,
) -> Float[Array, "*layers experts"]:
    """Update the bias that chooses experts after a training step: balance without a loss.

        b_e <- b_e + rate sign(mean load - load_e)

    Sum loads over all micro-batches and devices first, once per optimiser step, because the sign is
    that of the sum. The bias is not a parameter: it has no gradient and no weight decay.

    Args:
        bias: [..., experts].
        loads: [..., experts], `loads` of the `RoutingStatistics` of the whole step.
        rate: size of the update.

    Returns:
        The new bias, [..., experts].

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
        2024, arXiv:2408.15664, algorithm 1.

    Example:
        >>> moved = updated_choice_bias(jnp.zeros(3), jnp.array([3.0, 1.0, 2.0]), 0.5)
        >>> moved.tolist()
        [-0.5, 0.5, 0.0]
    """
    check_shape("loads", loads, bias.shape, "*layers experts")
    return bias + rate * jnp.sign(loads.mean(-1, keepdims=True) - loads).astype(bias.dtype)


@checked
def max_violation(loads: Float[Array, "*layers experts"]) -> Float[Array, "*layers"]:
    """The excess of the fullest expert over an even load: max / mean - 1, 0 when even.

    Args:
        loads: [..., experts].

    Returns:
        [...].

    Source: Wang et al., 2024, arXiv:2408.15664, equation 4.

    Example:
        >>> max_violation(jnp.array([3.0, 1.0, 2.0])).item()
        0.5
    """
    return loads.max(-1) / jnp.maximum(loads.mean(-1), jnp.finfo(loads.dtype).tiny) - 1


@checked
def load_entropy(loads: Float[Array, "*layers experts"]) -> Float[Array, "*layers"]:
    """The entropy of the experts' shares of pairs over log E, 1 when even.

    Args:
        loads: [..., experts], with at least two experts.

    Returns:
        [...], between 0 and 1.

    Example:
        >>> load_entropy(jnp.array([4.0, 0.0])).item()
        0.0
    """
    share = loads / jnp.maximum(loads.sum(-1, keepdims=True), 1)
    logs = jnp.log(jnp.where(share > 0, share, 1))
    return -(share * logs).sum(-1) / jnp.log(float(loads.shape[-1])) + 0.0
