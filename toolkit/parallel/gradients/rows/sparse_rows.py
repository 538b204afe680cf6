"""Sparse rows: the gradient of an embedding goes only where its rows were touched (Zen).

Few rows are touched, replicas overlap partly, and the touched rows crowd the start of a vocabulary
that is sorted by frequency. So every row has an owner by a random permutation that is made once on
the host, which balances as hashing does and has no collisions: replicas push their rows to the
owners, owners add, and everyone pulls the sums, with a bit per row in place of indices.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from toolkit._checks import checked
from toolkit.parallel.axes import devices_along
from toolkit.parallel.gradients.compression.packing import pack, unpack


@dataclass(frozen=True, eq=False)
class RowOwners:
    """Who adds up which row: owner = p(row) // U and slot = p(row) % U for a permutation p.

    Attributes:
        rows: number of rows V of the table.
        devices: number of devices D.
        places: int32 [V], p(row), the same in every process.

    Example:
        >>> owners = RowOwners.drawn(rows=10, devices=4)
        >>> owners.slots, sorted(owners.places.tolist()) == list(range(10))
        (3, True)
    """

    rows: int
    devices: int
    places: np.ndarray

    @classmethod
    def drawn(cls, rows: int, devices: int, seed: int = 0) -> "RowOwners":
        """A permutation from a seed, on the host."""
        if rows < 1 or devices < 1:
            raise ValueError(f"rows, devices: got {rows} and {devices}, wanted at least 1 each")
        places = np.random.default_rng(seed).permutation(rows).astype(np.int32)
        return cls(rows, devices, places)

    @property
    def slots(self) -> int:
        """Rows per owner: U = ceil(V / D)."""
        return -(-self.rows // self.devices)


class RowReport(NamedTuple):
    """What did not fit, summed over devices: the exchange is dense if it is not all zero.

    `push` and `pull` count rows beyond a capacity, `outside` ids that are no row of the table,
    whose values are in no sum.

    Example:
        >>> RowReport(jnp.int32(0), jnp.int32(2), jnp.int32(0)).pull.item()
        2
    """

    push: Int[Array, ""]
    pull: Int[Array, ""]
    outside: Int[Array, ""]


@checked
def row_capacity(touched: int, devices: int) -> int:
    """Rows for one owner among `touched` rows: (1 + 4 sqrt(D / touched)) of the mean.

    A rule for the common case; what does not fit is counted, and never lost.

    Args:
        touched: rows that one device (for a push) or all of them (for a pull) touch.
        devices: number of devices D.

    Returns:
        A number of rows.

    Example:
        >>> row_capacity(230, 8)
        51
    """
    if touched < 1:
        raise ValueError(f"touched: got {touched}, wanted at least 1")
    return math.ceil(touched / devices * (1 + 4 * math.sqrt(devices / touched)))


@checked
def exchange_rows(
    ids: Int[Array, "tokens"], values: Float[Array, "tokens width"], owners: RowOwners, axis: str,
    *,
    push: int, pull: int,
) -> tuple[Float[Array, "rows width"], RowReport]:  # fmt: skip
    """Sum the rows of all replicas along a mesh axis, inside `jax.shard_map`.

        out[v] = sum over devices and tokens t with ids[t] = v of values[t]

    Differentiate with respect to the gathered rows (`x = table[ids]` outside of `grad`) and give
    (ids, dx): the gradient of `table[ids]` itself is dense in jax.

    Args:
        ids: row of each token of this device; one outside of the table counts, and adds nothing.
        values: their gradients.
        owners: for as many devices as the axis has.
        axis: mesh axis of the replicas.
        push: rows that one device may send to one owner.
        pull: rows that one owner may return.

    Returns:
        (sums [rows, width], the same on all replicas; report). Where a capacity is too small the
        sums come from a dense all-reduce, whose branch is in the program.

    Cost: Bytes sent per device: (D - 1) (push (4 W + 4) + pull 4 W + ceil(U / 8)) and a sum of two
        numbers; 2 (D - 1) / D 4 V W more where something does not fit.

    Source: Wang et al., "Zen: near-optimal sparse tensor synchronization", OSDI 2025; a permutation
        replaces its hierarchical hashing.

    Example:
        >>> mesh, owners = jax.make_mesh((1,), ("data",)), RowOwners.drawn(4, 1)
        >>> f = lambda i, x: exchange_rows(i, x, owners, "data", push=2, pull=2)[0]
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        >>> f(jnp.array([3, 3]), jnp.ones((2, 1))).ravel().tolist()
        [0.0, 0.0, 0.0, 2.0]
    """
    for name, size in (("push", push), ("pull", pull)):
        if size < 1:
            raise ValueError(f"{name}: got {size}, wanted a capacity of at least 1")
    if owners.devices != (size := devices_along(axis)):
        raise ValueError(f"owners: got those of {owners.devices} devices, wanted {size}")
    is_row = (ids >= 0) & (ids < owners.rows)
    ids = jnp.where(is_row, ids, owners.rows)
    sent, left = _pushed(ids, values, owners, push)
    slots, rows = (jax.lax.all_to_all(x, axis, 0, 0) for x in sent)
    sums = jnp.zeros((owners.slots + 1, values.shape[1]), values.dtype)
    sums = sums.at[slots.reshape(-1)].add(rows.reshape(-1, values.shape[1]))[:-1]
    has = jnp.zeros(owners.slots + 1, bool).at[slots.reshape(-1)].set(True)[:-1]
    found = jnp.nonzero(has, size=pull, fill_value=owners.slots)[0]
    gathered = sums.at[found].get(mode="fill", fill_value=0)
    over = jnp.maximum(0, jnp.sum(has) - pull)
    missing = jax.lax.psum(jnp.stack([left, over]).astype(jnp.int32), axis)
    outside = jnp.sum(~is_row)

    def sparse() -> Array:
        bits = jax.lax.all_gather(pack(has.astype(jnp.uint8), 1), axis)
        values_of = jax.lax.all_gather(gathered, axis)
        here = unpack(bits, 1, owners.slots) == 1
        # The k-th bit that is set belongs to the k-th value.
        at = jnp.clip(jnp.cumsum(here, axis=1) - 1, 0, pull - 1)
        table = jnp.take_along_axis(values_of, at[..., None], axis=1)
        table = jnp.where(here[..., None], table, 0).reshape(-1, values.shape[1])
        return table[jnp.asarray(owners.places)]

    def dense() -> Array:
        table = jnp.zeros((owners.rows, values.shape[1]), values.dtype)
        return jax.lax.psum(table.at[ids].add(values, mode="drop"), axis)

    total = jax.lax.cond(missing.sum() > 0, dense, sparse)
    return total, RowReport(missing[0], missing[1], outside)


def _pushed(
    ids: Array, values: Array, owners: RowOwners, push: int
) -> tuple[tuple[Array, Array], Array]:
    """Slots [D, push] and sums [D, push, W] by owner, duplicates added, and what is left over."""
    tokens, devices = ids.shape[0], owners.devices
    rows, which = jnp.unique(ids, size=tokens, fill_value=owners.rows, return_inverse=True)
    sums = jnp.zeros_like(values).at[which.reshape(-1)].add(values)
    nobody = devices * owners.slots
    place = jnp.asarray(np.append(owners.places, nobody).astype(np.int32))[rows]
    owner = place // owners.slots
    order = jnp.argsort(owner, stable=True)
    owner, place, sums = owner[order], place[order], sums[order]
    at = jnp.arange(tokens) - jnp.searchsorted(owner, owner)
    slots = jnp.full((devices, push), owners.slots, jnp.int32)
    slots = slots.at[owner, at].set(place % owners.slots, mode="drop")
    sent = jnp.zeros((devices, push, values.shape[1]), values.dtype)
    sent = sent.at[owner, at].set(sums, mode="drop")
    return (slots, sent), jnp.sum((owner < devices) & (at >= push))
