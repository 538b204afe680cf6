"""What slicing a layer costs: sliced softmaxes against the true one on a calibration text."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.slices import LatentSlices, check_slices
from toolkit.attention.latent.tpla import Norm, slice_scores, tpla_reference


class SlicingReport(NamedTuple):
    """How far the slices of a layer are from the layer, on one stream.

    Attributes:
        output_error: relative error of what the layer adds to the stream.
        divergence: KL(true || slice) of the weights on earlier tokens, nats, mean over heads and
            queries [slices].
        score_r2: share of the variance of true scores within a query that a slice's explain, at
            most 1 [slices].
        top_agreement: share of queries whose largest weight is on the same token [slices].

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> report = slicing_report(jnp.ones((1, 3, 8)), slice_latents(weights, 1), config)
        >>> report.output_error < 1e-5
        True
    """

    output_error: float
    divergence: Float[Array, "slices"]
    score_r2: Float[Array, "slices"]
    top_agreement: Float[Array, "slices"]


@checked
def slicing_report(
    x: Float[Array, "batch time width"], sliced: LatentSlices, config: LatentConfig, *,
    norm: Norm = "sliced",
) -> SlicingReport:  # fmt: skip
    """Compare every slice's softmax, and their sum's output, with the layer's.

        KL(p || p_i) = sum_j p_j log(p_j / p_ij)
        R2_i = 1 - sum (s - s_i)^2 / sum s^2, of scores less their mean over a query's keys

    Args:
        x: the residual stream of a text, normalised [batch, time, width].
        sliced: the layer's weights, `slice_latents`.
        config: its sizes.
        norm: as in `tpla_reference`.

    Returns:
        A `SlicingReport`; queries that see one token do not count, except in the output.

    Cost: slices batch heads time^2 numbers of memory.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> slicing_report(jnp.ones((1, 3, 8)), slice_latents(weights, 2), config).score_r2.shape
        (2,)
    """
    _check(x, sliced, config)
    exact = tpla_reference(x, sliced, config, norm="exact", softmax="summed")
    out = tpla_reference(x, sliced, config, norm=norm)
    error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)
    return SlicingReport(float(error), *_compare(x, sliced, config=config, norm=norm))


@partial(jax.jit, static_argnames=("config", "norm"))
def _compare(x, sliced, *, config, norm):
    scores = slice_scores(x, sliced, config, norm=norm)
    visible = _visible(x)
    log_p, log_own = (
        jax.nn.log_softmax(jnp.where(visible, s, -jnp.inf), axis=-1)[..., 1:, :]
        for s in (scores.true, scores.slices)
    )
    p, seen = jnp.exp(log_p), visible[..., 1:, :]
    divergence = jnp.where(seen, p * (log_p - log_own), 0).sum(axis=-1).mean(axis=(1, 2, 3))
    true, own = _centred(scores.true, visible), _centred(scores.slices, visible)
    left = jnp.square(true - own).sum(axis=(1, 2, 3, 4)) / jnp.square(true).sum()
    top = (log_own.argmax(axis=-1) == log_p.argmax(axis=-1)).mean(axis=(1, 2, 3))
    return divergence, 1 - left, top


@checked
def least_squares_multipliers(
    x: Float[Array, "batch time width"], sliced: LatentSlices, config: LatentConfig, *,
    is_per_head: bool = False,
) -> Float[Array, "slices heads"]:  # fmt: skip
    """The multipliers by which each slice's scores come nearest to the true ones.

        m_i = sum(s s_i) / sum(s_i^2)        s, s_i: scores without position, less a query's mean

    Arguments as `slicing_report`, and:

    Args:
        is_per_head: whether every head gets a number of its own; otherwise one serves all heads.

    Returns:
        For `slice_latents` [slices, heads].

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> sliced, x = slice_latents(weights, 2), jax.random.normal(jax.random.key(1), (1, 3, 8))
        >>> least_squares_multipliers(x, sliced, config).shape
        (2, 2)
    """
    _check(x, sliced, config)
    plain = replace(sliced, multipliers=jnp.ones_like(sliced.multipliers))
    scores = slice_scores(x, plain, config, norm="exact")
    visible = _visible(x)
    true = _centred(scores.true - scores.rotary, visible)
    own = _centred(scores.slices - scores.rotary, visible)
    axes = (1, 3, 4) if is_per_head else (1, 2, 3, 4)
    found = (true * own).sum(axis=axes) / jnp.square(own).sum(axis=axes)
    return jnp.broadcast_to(found.reshape(sliced.slices, -1), sliced.multipliers.shape)


def _visible(x):
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return (index[:, None] >= index[None])[None, None, None]


def _centred(scores, visible):
    mean = jnp.where(visible, scores, 0).sum(axis=-1) / visible.sum(axis=-1).astype(scores.dtype)
    return jnp.where(visible, scores - mean[..., None], 0)


def _check(x, sliced, config):
    check_slices(x, sliced, config, "batch time width")
    if x.shape[1] < 2:
        raise ValueError(f"x must hold at least two tokens; got shape {tuple(x.shape)}.")
