r"""Tensor-parallel latent attention (TPLA): every slice of the latents with a softmax of its own.

Slice i knows the features c_i of every latent, all of r, and the rows of K_h, V_h for c_i:

    s_i,hj = scale (m_i q_h . K_h,i c_ij + p_h . r_j)
    y      = sum_i sum_h O_h V_h,i sum_j softmax_j(s_i,hj) c_ij

The true scores are the sum of the slices', and their softmax is not any slice's: that is the
approximation. Everything else is exact, given exact norms. "summed" computes the true softmax.

A prompt that was read exactly (`prompt` tokens) leaves exact latents. Tokens decoded after it use
the slices' softmaxes and leave latents with the slices' norms, as if on separate prefill and decode
servers.

Source: Tang et al. (2025), arXiv:2508.15881, equations 6, 7 and 22.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention._caches import check_room, show_overflow, write_token
from toolkit.attention._checks import check_count
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.latent.cache import LatentCache, check_latent_cache
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.mla import (
    Form,
    appended,
    attend_latents,
    attend_latents_step,
    kept,
    token_positions,
)
from toolkit.attention.latent.slices import LatentSlices, Norm, check_slices, project_slices
from toolkit.attention.latent.slots import Implementation
from toolkit.attention.latent.weights import Projected

Softmax = Literal["sliced", "summed"]


class SliceScores(NamedTuple):
    """Scores of a sequence, scaled, before the mask."""

    # of every slice, its multiplier and the rotary part in it [slices, batch, heads, queries, keys]
    slices: Float[Array, "slices batch heads queries keys"]
    # of the whole latent [1, batch, heads, queries, keys]
    true: Float[Array, "1 batch heads queries keys"]
    # the part of both that depends on positions [1, batch, heads, queries, keys]
    rotary: Float[Array, "1 batch heads queries keys"]
    latents: Float[Array, "slices batch keys slice"]  # of every slice [slices, batch, keys, slice]


@checked
def tpla_reference(
    x: Float[Array, "batch time width"], sliced: LatentSlices, config: LatentConfig, *,
    norm: Norm = "sliced", softmax: Softmax = "sliced", prompt: int = 0,
) -> Float[Array, "batch time width"]:  # fmt: skip
    """The equation of TPLA: the oracle of `tpla` and of the sharded program.

        y = sum_i sum_h O_h V_h,i sum_j softmax_j(scale (m_i q_h . K_h,i c_ij + p_h . r_j)) c_ij

    Args:
        x: the residual stream, normalised.
        sliced: the layer's weights, `slice_latents`.
        config: its sizes.
        norm: "sliced", each slice by the energy of its own features, or "exact".
        softmax: "sliced", one for every slice, or "summed", the softmax of their sum: MLA.
        prompt: number of first tokens that are read exactly, in norm and in softmax.

    Returns:
        What attention adds to the stream [batch, time, width].

    Cost: slices batch heads time^2 numbers of memory.

    Source: Tang et al. (2025), arXiv:2508.15881, equations 6, 7 and 22.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> tpla_reference(jnp.ones((1, 3, 8)), slice_latents(weights, 2), config).shape
        (1, 3, 8)
    """
    check_slices(x, sliced, config, "batch time width")
    check_count("prompt", prompt, 0)
    if prompt > x.shape[1]:
        raise ValueError(f"prompt must be at most the {x.shape[1]} tokens of x; got {prompt}.")
    return _reference(x, sliced, prompt, softmax == "summed", config=config, norm=norm)


# The prompt and the softmax are traced, so that neither compiles anew.
@partial(jax.jit, static_argnames=("config", "norm"))
def _reference(x, sliced, prompt, is_summed, *, config, norm):
    scores = slice_scores(x, sliced, config, norm=norm, prompt=prompt)
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    visible = (index[:, None] >= index[None])[None, None]
    is_exact = (index < prompt)[None, None, :, None] | is_summed
    y = jnp.zeros_like(x)
    for number, (own, latents) in enumerate(zip(scores.slices, scores.latents, strict=True)):
        own = jnp.where(is_exact, scores.true[0], own)
        p = jax.nn.softmax(jnp.where(visible, own, -jnp.inf), axis=-1).astype(x.dtype)
        u = jnp.einsum("bhij,bjr->bihr", p, latents)
        out = jnp.einsum("bihr,rhv->bihv", u, sliced.value_up[number])
        y += jnp.einsum("bihv,hvw->biw", out, sliced.output)
    return y


def slice_scores(
    x: Array, sliced: LatentSlices, config: LatentConfig, *, norm: Norm, prompt: int | Array = 0
) -> SliceScores:
    """The scores of every slice and of all together."""
    positions = token_positions(x, None, None)
    made, exact = (
        project_slices(x, sliced, positions, config, norm=own) for own in (norm, "exact")
    )
    is_prompt = (jnp.arange(x.shape[1], dtype=jnp.int32) < prompt)[None, :, None]
    latents = jnp.where(is_prompt, exact.latents, made.latents)
    latents = jnp.stack(jnp.split(latents, sliced.slices, axis=-1))
    precise = accumulator(x.dtype)
    rotary = jnp.einsum(
        "bihr,bjr->bhij", made.rope_queries, made.rope_keys, preferred_element_type=precise
    )[None]
    q = jnp.einsum("bihk,grhk->gbihr", made.queries, sliced.key_up)
    content = jnp.einsum("gbihr,gbjr->gbhij", q, latents, preferred_element_type=precise)
    owned = latents * sliced.owned.astype(x.dtype)[:, None, None]
    true = jnp.einsum("gbihr,gbjr->bhij", q, owned, preferred_element_type=precise)[None]
    own = sliced.multipliers[:, None, :, None, None] * content + rotary
    own, true, rotary = (config.scale * s for s in (own, true + rotary, rotary))
    return SliceScores(own, true, rotary, latents)


@checked
def tpla(
    x: Float[Array, "batch time width"], sliced: LatentSlices, config: LatentConfig, *,
    norm: Norm = "sliced",
    form: Form = "absorbed", segment_ids: SegmentIds | None = None,
    initial_state: LatentCache | None = None,
) -> tuple[Float[Array, "batch time width"], LatentCache | None]:  # fmt: skip
    """TPLA over a sequence on one device: every query attends with every slice's softmax.

        y = sum_i sum_h O_h V_h,i sum_j softmax_j(scale (m_i q_h . K_h,i c_ij + p_h . r_j)) c_ij

    Arguments as `mla`, and:

    Args:
        sliced: the layer's weights, `slice_latents`; or those of grouped latent attention, where
            every slice has a group of the heads to itself and nothing is approximated.
        norm: as in `tpla_reference`; "none" leaves latents as they are.
        initial_state: latents of all slices side by side [batch, capacity, slices * slice], which
            without shared features are those of the folded layer.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> tpla(jnp.ones((1, 3, 8)), slice_latents(weights, 2), config)[0].shape
        (1, 3, 8)
    """
    check_slices(x, sliced, config, "batch time width")
    if initial_state is not None:
        _check_cache(initial_state, x, sliced, config)
        check_room(initial_state, x.shape[1], segment_ids)
    return _tpla(x, sliced, segment_ids, initial_state, config=config, norm=norm, form=form)


@partial(jax.jit, static_argnames=("config", "norm", "form"))
def _tpla(x, sliced, segment_ids, initial_state, *, config, norm, form):
    positions = token_positions(x, segment_ids, initial_state)
    made = project_slices(x, sliced, positions, config, norm=norm)
    latents, rope_keys, mask, cache = appended(made, segment_ids, initial_state)
    outs = []
    for number, own in enumerate(jnp.split(latents, sliced.slices, axis=-1)):
        part = sliced.part(number).scaled()
        of_slice = _of_own_heads(made, sliced, number)
        of_slice = of_slice._replace(latents=own, rope_keys=rope_keys)
        outs.append(attend_latents(of_slice, part, mask, scale=config.scale, form=form))
    out = _together(outs, sliced, config.heads)
    y = jnp.einsum("bthv,hvw->btw", out, sliced.output)
    return (y if cache is None else show_overflow(y, cache)), cache


@checked
def tpla_step(
    x_t: Float[Array, "batch width"], sliced: LatentSlices, cache: LatentCache,
    config: LatentConfig, *,
    norm: Norm = "sliced",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch width"], LatentCache]:  # fmt: skip
    """One token of `tpla`: append it to the cache and attend with every slice's softmax.

    Arguments as `tpla`, without the time axis; `cache` holds the tokens before this one, and:

    Args:
        implementation: of every slice's attention, see `mla_step`.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> sliced, cache = slice_latents(weights, 2), LatentCache.empty(1, 4, 2, capacity=3)
        >>> tpla_step(jnp.ones((1, 8)), sliced, cache, config)[0].shape
        (1, 8)
    """
    check_slices(x_t, sliced, config, "batch width")
    _check_cache(cache, x_t, sliced, config)
    check_room(cache, 1)
    return _step(x_t, sliced, cache, config=config, norm=norm, implementation=implementation)


@partial(jax.jit, static_argnames=("config", "norm", "implementation"))
def _step(x_t, sliced, cache, *, config, norm, implementation):
    made = project_slices(x_t, sliced, cache.length, config, norm=norm)
    cache = write_token(cache, cache.length, axis=1, **kept(made))
    size = sliced.owned.shape[1]

    def of_slice(number):
        own = lax.slice_in_dim(cache.latents, number * size, (number + 1) * size, axis=2)
        part = sliced.part(number).scaled()
        shard = LatentCache(own, cache.rope_keys, cache.length)
        queries = _of_own_heads(made, sliced, number)
        return attend_latents_step(queries, part, shard, config.scale, implementation)

    out = _together(list(map(of_slice, range(sliced.slices))), sliced, config.heads)
    return show_overflow(jnp.einsum("bhv,hvw->bw", out, sliced.output), cache), cache


def _of_own_heads(made: Projected, sliced: LatentSlices, number: int) -> Projected:
    """With the queries of the heads of a slice: all of them, or its group."""
    if not sliced.is_grouped(made.queries.shape[-2]):
        return made
    cut = [jnp.split(x, sliced.slices, axis=-2)[number] for x in (made.queries, made.rope_queries)]
    return made._replace(queries=cut[0], rope_queries=cut[1])


def _together(outs: list[Array], sliced: LatentSlices, heads: int) -> Array:
    """All heads' values: sums over the slices, or those of every slice's own heads."""
    return jnp.concatenate(outs, axis=-2) if sliced.is_grouped(heads) else sum(outs[1:], outs[0])


def _check_cache(cache, x, sliced, config):
    check_latent_cache(cache, x, sliced.owned.size, config.rope_size)
