"""Redco's layouts: tensor parallelism from the names and shapes of parameters alone.

There are two rules. Fully connected layers are cut by columns and by rows in turn, so that a pair
needs one all-reduce; queries, keys and values are cut on their outputs, the projection after them
on its inputs. Names identify the layers.
"""

from typing import Any, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from toolkit._checks import check_choice, checked
from toolkit.parallel.layout import Layout, Placement, placements_of

_WHOLE = "whole: neither a kernel nor an embedding"


class _Choice(NamedTuple):
    """The dimension a rule cuts, or None, and why."""

    dimension: int | None
    reason: str


@checked
def redco_layout(
    params: Any, mesh: Mesh, *, axis: str = "model", batch_axis: str = "data"
) -> Layout:
    """Shard kernels and embeddings by Redco's two rules, which read only names and shapes.

    In contrast to `auto_layout`, which follows the program, it cuts latent projections like
    queries, may cut through heads, and pairs layers by the order of their names.

    Args:
        params: pytree of arrays or ShapeDtypeStructs, its leaves named as flax.linen names them
            ("kernel", "embedding").
        mesh: the devices.
        axis: the mesh axis that shards the parameters.
        batch_axis: the mesh axis that shards the batch.

    Returns:
        A `Layout` whose reasons name the rule.

    Source: Tan et al., "RedCoast: a lightweight tool to automate distributed training of LLMs on
        any GPU/TPUs", 2024, and its `partition_utils.py`.

    Example:
        >>> mesh = make_mesh({"data": 1, "model": 8})  # eight devices, real or simulated
        >>> params = {"attn": {name: {"kernel": jnp.ones((64, 64))} for name in ("q", "o")}}
        >>> {row.path: tuple(row.spec) for row in redco_layout(params, mesh).placements}
        {'attn/o/kernel': ('model',), 'attn/q/kernel': (None, 'model')}
    """
    for name, given in (("axis", axis), ("batch_axis", batch_axis)):
        check_choice(name, given, mesh.axis_names)
    rows = placements_of(params, lambda shape: (PartitionSpec(), _WHOLE))
    choices = _choices(rows, mesh.shape[axis])
    placed = []
    for row in rows:
        dimension, reason = choices[_key(row)]
        spec = PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, axis)
        placed.append(Placement(row.path, row.shape, row.dtype, spec, reason))
    return Layout(mesh, tuple(placed), PartitionSpec(batch_axis))


def _key(row: Placement) -> tuple[str, ...]:
    """The key of a rule: the module's name and "kernel", or the leaf's name alone."""
    parts = row.path.split("/")
    return tuple(parts[-2:]) if parts[-1] == "kernel" else tuple(parts[-1:])


def _choices(rows: tuple[Placement, ...], pieces: int) -> dict[tuple[str, ...], _Choice]:
    found: dict[tuple[str, ...], _Choice] = {}
    last: int | None = None
    for key in sorted({_key(row) for row in rows}):
        alike = [row for row in rows if _key(row) == key]
        if key[-1] not in ("kernel", "embedding"):
            found[key] = _Choice(None, _WHOLE)
            continue
        ranks = {len(row.shape) for row in alike}
        rank = min(ranks)
        valid = [i for i in range(rank) if all(row.shape[i] % pieces == 0 for row in alike)]
        if len(ranks) > 1 or not valid:
            found[key] = _Choice(None, f"whole: no dimension of all {key[0]!r} fits {pieces}")
            continue
        is_attention = all(
            "attn" in row.path.lower() or "attention" in row.path.lower() for row in alike
        )
        special = _by_name(key, is_attention)
        if special is not None:
            is_first, reason = special
            found[key] = _Choice(valid[0] if is_first else valid[-1], reason)
            continue
        dimension = valid[-1]
        if dimension == last and len(valid) > 1:
            dimension = valid[-2]
        last = dimension
        found[key] = _Choice(dimension, "fully connected layers take turns, by name")
    return found


def _by_name(key: tuple[str, ...], is_attention: bool) -> tuple[bool, str] | None:
    """Whether a name implies the first dimension or the last, and the reason; None for neither."""
    if key[-1] == "embedding":
        return True, "embedding: cut on the vocabulary where it fits"
    name = key[0]
    ends, words = {name[0], name[-1]}, name.split("_")
    if is_attention and ends & {"q", "k", "v"}:
        return False, "queries, keys and values are cut on their outputs"
    if is_attention and "o" in ends:
        return True, "the projection after attention is cut on its inputs"
    if name.startswith(("up", "gate", "wi")) or "in" in words:
        return False, "the first of a pair is cut on its outputs"
    if name.startswith(("down", "wo")) or "out" in words:
        return True, "the second of a pair is cut on its inputs"
    if name.startswith("head") or name.endswith("head"):
        return False, "the head is cut on its outputs"
    return None
