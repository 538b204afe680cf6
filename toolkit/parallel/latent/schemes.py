"""Sharding schemes for decoding with latent attention on a (latent, heads) mesh.

Axis "latent" shards the features of every latent, axis "heads" shards heads, or tokens under DCP.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from toolkit._checks import checked
from toolkit.attention.latent import LatentCache, LatentSlices

Scheme = Literal["mla", "tpla", "gla", "mlra", "dcp", "tpla+dcp"]
Layout = Literal["plain", "lean"]
AXES = ("latent", "heads")


class Plan(NamedTuple):
    """A scheme on a mesh; hashable, so that programs are compiled once for each.

    Attributes:
        slices: devices along "latent".
        heads: devices along "heads".
        is_lean: queries and output are sharded over both axes, at the cost of two more collectives.
        is_grouped: every slice serves separate heads (GLA).
        cuts_tokens: axis "heads" shards the tokens of the cache (DCP).
    """

    slices: int
    heads: int
    is_lean: bool
    is_grouped: bool
    cuts_tokens: bool

    def spec(self, *axes: Any) -> PartitionSpec:
        """A PartitionSpec without axes of size one, over which no sum is needed."""
        sizes = dict(zip(AXES, (self.slices, self.heads), strict=True))

        def kept(axis):
            if isinstance(axis, tuple):
                return tuple(name for name in axis if sizes[name] > 1) or None
            return axis if axis is not None and sizes[axis] > 1 else None

        return PartitionSpec(*map(kept, axes))

    def over(self, *axes: str) -> tuple[str, ...]:
        """The axes with more than one device."""
        return tuple(
            axis for axis in axes if {"latent": self.slices, "heads": self.heads}[axis] > 1
        )


@checked
def place_slices(
    sliced: LatentSlices, mesh: Mesh, *, scheme: Scheme = "tpla", layout: Layout = "plain"
) -> LatentSlices:
    """Place the weights of a layer for a scheme.

        mla, tpla, mlra   slice i on row i of the mesh, heads block j on column j
        gla               block i of the heads with slice i alone, cut over the columns
        dcp, tpla+dcp     slice i on row i, whole: columns have tokens of their own

    Args:
        sliced: cut into as many slices as the mesh has devices along "latent". For "gla" keys and
            values of a slice are 0 for the heads of others; for "mlra" they get the factors of its
            graph, latents times sqrt(width / slice) and outputs over sqrt(slices).
        mesh: with the axes "latent" and "heads".
        scheme: see `decode_step`.
        layout: "plain", or "lean" for tpla: no query or output projection is held twice.

    Returns:
        The weights, placed, as `decode_step` takes them with the same scheme and layout.

    Source: Tang et al. (2025), arXiv:2508.15881; Zadouri et al. (2025), arXiv:2505.21487 (GLA).

    Example:
        >>> from toolkit.attention.latent import *
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> sliced = slice_latents(fold(LatentWeights.random(config, jax.random.key(0))), 1)
        >>> place_slices(sliced, jax.make_mesh((1, 1), ("latent", "heads"))).slices
        1
    """
    plan = plan_of(mesh, sliced, scheme, layout)
    if plan.is_grouped:
        sliced = _own_heads(sliced, plan.slices)
    if scheme == "mlra":
        growth = (sliced.output.shape[2] / sliced.owned.shape[1]) ** 0.5
        factors = {"key_up": growth, "value_up": growth / plan.slices**0.5}
        grown = {name: getattr(sliced, name) * factor for name, factor in factors.items()}
        sliced = replace(sliced, **grown)
    specs = weight_specs(plan, sliced)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), sliced, specs)


def plan_of(mesh: Mesh, sliced: LatentSlices, scheme: str, layout: str) -> Plan:
    """The plan of a scheme, if mesh and weights fit it."""
    if set(mesh.shape) != set(AXES):
        raise ValueError(f"mesh must have the axes {' and '.join(AXES)}; got {dict(mesh.shape)}.")
    rows, columns = (mesh.shape[axis] for axis in AXES)
    if scheme in ("mla", "dcp") and rows > 1:
        raise ValueError(f"scheme {scheme!r} wants one device along 'latent'; got {rows}.")
    if sliced.slices != rows:
        raise ValueError(
            f"sliced must have {rows} slices, one per row of the mesh; got {sliced.slices}."
        )
    if layout == "lean" and scheme not in ("tpla", "mlra"):
        raise ValueError(f"layout 'lean' is for scheme 'tpla' or 'mlra'; got {scheme!r}.")
    plan = Plan(rows, columns, layout == "lean", scheme == "gla", scheme.endswith("dcp"))
    heads, wanted = (
        sliced.output.shape[0],
        columns * (rows if plan.is_lean or plan.is_grouped else 1),
    )
    if heads % wanted:
        raise ValueError(f"mesh must divide the {heads} heads into {wanted} parts; it does not.")
    return plan


def weight_specs(plan: Plan, sliced: LatentSlices) -> LatentSlices:
    """How every weight is cut."""
    spec = plan.spec
    of_queries: Any = "heads"
    if plan.is_lean:
        of_queries = ("heads", "latent")  # gathered over rows, a column's heads are consecutive
    elif plan.is_grouped:
        of_queries = ("latent", "heads")
    core = None if plan.cuts_tokens else "heads"
    specs: dict[str, Any] = {
        "query_up": spec(None, of_queries),
        "latent_down": spec("latent") if sliced.basis is None else spec(),
        "key_up": spec("latent", None, core),
        "value_up": spec("latent", None, core),
        "output": spec(of_queries),
        "multipliers": spec("latent", core),
        "features": spec("latent"),
        "owned": spec("latent"),
        "shares": spec("latent"),
        "basis": spec("latent"),
    }
    fields: dict[str, Any] = {
        name: None if array is None else specs.get(name, spec())
        for name, array in vars(sliced).items()
    }
    return LatentSlices(**fields)


def cache_specs(plan: Plan) -> LatentCache:
    """How the cache is cut."""
    tokens = "heads" if plan.cuts_tokens else None
    return cache_cut(plan.spec(None, tokens, "latent"), plan.spec(None, tokens))


def cache_cut(latents: Any, rope_keys: Any) -> LatentCache:
    """A cache of specs instead of arrays; lengths are replicated."""
    length: Any = PartitionSpec()
    return LatentCache(latents, rope_keys, length)


def _own_heads(sliced: LatentSlices, slices: int) -> LatentSlices:
    """The heads that each slice serves, without the others, which are 0."""
    heads = sliced.output.shape[0] // slices
    number = jnp.arange(slices)

    def own(array, axis):
        array = jnp.moveaxis(array, axis, 1)
        array = array.reshape(slices, slices, heads, *array.shape[2:])[number, number]
        return jnp.moveaxis(array, 1, axis)

    return replace(
        sliced,
        key_up=own(sliced.key_up, 2),
        value_up=own(sliced.value_up, 2),
        multipliers=own(sliced.multipliers, 1),
    )
