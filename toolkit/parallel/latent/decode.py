r"""One token of latent attention on many devices, with explicit collectives.

Every device of row i knows slice i of the latents. Of one layer, B tokens and k devices:

    mla, tpla, gla, mlra   all-reduce of y, B width
    norm "exact"           + all-reduce of squares, B
    layout "lean"          + all-gather of queries, reduce-scatter of outputs, along "latent"
    dcp, tpla+dcp          + all-gather of queries, all-reduce of maxima, reduce-scatter of outputs
                             and sums, along "heads"
    softmax "summed"       + all-reduce of scores, B heads tokens: what exactness costs

The compiler alone would turn a cache sharded along latents into the last of these: only
`jax.shard_map` can express a separate softmax per slice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from toolkit._checks import check_shape, checked
from toolkit.attention._caches import check_room, write_token
from toolkit.attention.latent import LatentCache, LatentSlices
from toolkit.attention.latent.cache import check_latent_cache
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.mla import absorbed_queries, head_values
from toolkit.attention.latent.slices import Slice, slice_of, squares
from toolkit.attention.latent.slots import Implementation, attend_slots, attend_visible, first_slots
from toolkit.attention.latent.tpla import Norm, Softmax
from toolkit.attention.latent.weights import Projected, queries, rotated
from toolkit.parallel.axes import sum_of_parts
from toolkit.parallel.latent.schemes import Layout, Scheme, cache_specs, plan_of, weight_specs


@checked
def decode_step(
    x_t: Float[Array, "batch width"], sliced: LatentSlices, cache: LatentCache,
    config: LatentConfig, *,
    mesh: Mesh, scheme: Scheme = "tpla", layout: Layout = "plain", norm: Norm = "exact",
    softmax: Softmax = "sliced",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch width"], LatentCache]:  # fmt: skip
    """Append one token to a sharded cache and attend to all tokens in it.

        y = sum over devices of sum_h O_h V_h,i sum_j softmax_j(s_i,hj) c_ij

    Args:
        x_t: the normalised residual stream of one token per row, replicated.
        sliced: `place_slices` with the same scheme and layout.
        cache: from `hand_over`, or empty with the same sharding.
        config: sizes of the layer.
        mesh: with the axes "latent" and "heads".
        scheme: "mla" (heads cut, cache on every device), "tpla" (latents cut, a softmax per slice:
            an approximation), "gla" and "mlra" (models trained so), "dcp" (tokens cut, exact),
            "tpla+dcp" (both).
        layout: see `place_slices`.
        norm: "exact" sums squares over the slices, B numbers; "sliced" estimates them.
        softmax: "sliced", or "summed" for the exact scores, to compare with.
        implementation: of a device's attention, see `mla_step`.

    Returns:
        The layer's output [batch, width], replicated, and the new cache, sharded like the old one.

    Cost: per device and token the roofline of `planning.decode_cost`; collectives as above.

    Source: Tang et al. (2025), arXiv:2508.15881; Bhatia et al. (2025), arXiv:2507.07120 (tokens
        cut).

    Example:
        >>> from toolkit.attention.latent import *
        >>> c = LatentConfig(width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> sliced = slice_latents(fold(LatentWeights.random(c, jax.random.key(0))), 1)
        >>> mesh, cache = jax.make_mesh((1, 1), ("latent", "heads")), LatentCache.empty(1, 4, 2, 3)
        >>> decode_step(jnp.ones((1, 8)), sliced, cache, c, mesh=mesh)[0].shape
        (1, 8)
    """
    plan = plan_of(mesh, sliced, scheme, layout)
    _check(x_t, sliced, cache, config, plan)
    if softmax == "summed" and implementation == "pallas":
        raise ValueError('softmax must be "sliced" with implementation "pallas"; got "summed".')
    how = {"norm": norm, "softmax": softmax, "implementation": implementation}
    return _step(x_t, sliced, cache, config=config, mesh=mesh, plan=plan, **how)


@partial(jax.jit, static_argnames=("config", "mesh", "plan", "norm", "softmax", "implementation"))
def _step(x_t, sliced, cache, *, config, mesh, plan, norm, softmax, implementation):
    how = {"config": config, "plan": plan, "is_exact": norm == "exact"}
    how["implementation"] = implementation
    specs = cache_specs(plan)
    return jax.shard_map(
        partial(_device_step, **how, is_summed=softmax == "summed"),
        mesh=mesh,
        in_specs=(plan.spec(), weight_specs(plan, sliced), specs),
        out_specs=(plan.spec(), specs),
    )(x_t, sliced, cache)


def _device_step(x_t, sliced, cache, *, config, plan, is_exact, is_summed, implementation):
    """The computation of one device on its slice, heads and tokens."""
    part, rows, columns = sliced.part(0), plan.over("latent"), plan.over("heads")
    total = None
    if is_exact and rows and part.basis is None:
        total = sum_of_parts(squares(x_t, part), rows)
    q, q_r = _queries(x_t, sliced, cache.length, config, plan)
    made = Projected(
        q,
        q_r,
        slice_of(x_t, part, config, total),
        rotated(x_t @ sliced.rope_key, cache.length, config),
    )
    turn, turns = lax.axis_index("heads"), plan.heads
    if not (plan.cuts_tokens and columns):
        turn, turns = 0, 1
    # Token p is the column's p % turns, and in its slot p // turns.
    slot = jnp.where(cache.length % turns == turn, cache.length // turns, cache.capacity)
    cache = write_token(cache, slot, axis=1, latents=made.latents, rope_keys=made.rope_keys)
    filled = jnp.maximum(cache.length - turn + turns - 1, 0) // turns

    stored = cache.latents, cache.rope_keys
    if is_summed:
        # The factor that maps queries to the features of a slice, without multipliers.
        key_up = part.key_up * part.owned.astype(part.key_up.dtype)[:, None, None]
        q = absorbed_queries(made, part._replace(key_up=key_up))
        visible = first_slots(cache.capacity, filled)
        summed = partial(sum_of_parts, axes=rows) if rows else lambda scores: scores
        u, lse = attend_visible(q, made.rope_queries, *stored, visible, config.scale, summed)
    else:
        q = absorbed_queries(made, part.scaled())
        how = {"scale": config.scale, "implementation": implementation}
        u, lse = attend_slots(q, made.rope_queries, *stored, filled, **how)
    if turns == 1:
        out = head_values(u.astype(x_t.dtype), part)
    else:
        out = _merged(u, lse, part, columns).astype(x_t.dtype)
    if plan.is_lean and rows:
        out = lax.psum_scatter(out, "latent", scatter_dimension=1, tiled=True)
    y = jnp.einsum("bhv,hvw->bw", out, sliced.output)
    if rows or columns:
        y = sum_of_parts(y, rows + columns)
    has_room = cache.length <= turns * cache.capacity
    return jnp.where(has_room[:, None], y, jnp.nan), cache


def _queries(x_t, sliced, positions, config, plan):
    """Queries of the heads with which a device attends, gathered where necessary."""
    q, q_r = queries(x_t, sliced, positions, config)
    axes = plan.over(
        *(["latent"] if plan.is_lean else []), *(["heads"] if plan.cuts_tokens else [])
    )
    if not axes:
        return q, q_r
    both = lax.all_gather(jnp.concatenate([q, q_r], axis=2), axes, axis=1, tiled=True)
    return jnp.split(both, [config.key_size], axis=2)


def _merged(u, lse, part: Slice, columns):
    """Softmax over the tokens of all columns, each of which gets some of the heads."""
    weight = jnp.exp(lse - lax.pmax(lse, columns))[..., None]
    out = head_values((u * weight).astype(part.value_up.dtype), part)
    both = jnp.concatenate([out.astype(weight.dtype), weight], axis=2)
    both = lax.psum_scatter(both, "heads", scatter_dimension=1, tiled=True)
    return both[..., :-1] / both[..., -1:]


def _check(x_t, sliced, cache, config, plan):
    latents = sliced.slices * sliced.owned.shape[1]
    check_shape("x_t", x_t, (x_t.shape[0], config.width), "batch width")
    check_latent_cache(cache, x_t, latents, config.rope_size)
    heads = config.heads // plan.slices if plan.is_grouped else config.heads
    wanted = (plan.slices, sliced.owned.shape[1], heads, config.key_size)
    check_shape("sliced.key_up", sliced.key_up, wanted, "slices slice heads key")
    if plan.cuts_tokens and cache.capacity % plan.heads:
        raise ValueError(
            f"cache must have a capacity that {plan.heads} devices along 'heads' divide; "
            f"got {cache.capacity}."
        )
    check_room(cache, 1)
