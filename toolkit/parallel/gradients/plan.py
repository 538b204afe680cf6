"""An exchange on a layout: which tensors travel together, along which axes, in how many bytes.

Tensors that go the same way are one buffer of float32, in the order of the tree. Small ones, and
the last few numbers of a buffer that the replicas do not divide, are summed as they are.
"""

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from toolkit._checks import check_fields
from toolkit._pytrees import register_dataclass
from toolkit.parallel.axes import axes_of, check_auto_axes, only, unshared
from toolkit.parallel.gradients.buffers import Group, Leaf
from toolkit.parallel.gradients.compression.messages import Messages, store
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.peers import Along
from toolkit.parallel.layout import Layout, Placement


@register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """What an exchange remembers between steps.

    Attributes:
        step: int32 scalar, the exchanges so far, which seeds the next one.
        residuals: for every buffer with feedback, and every hop, the arrays of the feedback,
            [replicas, cuts, ...]: each replica has its own.

    Example:
        >>> ExchangeState(jnp.int32(0), ()).residuals
        ()
    """

    step: Int[Array, ""]
    residuals: Any


@dataclass(frozen=True)
class ExchangePlan:
    """An exchange on a layout.

    Attributes:
        exchange: what is done.
        layout: the parameters and their devices.
        is_gathered: whether weights are gathered by the step itself, whose transpose has then
            summed the gradient along the weights' axes.
        program: (params, batch, state) -> (loss, mean gradients, state), of a program that runs
            `mean` by itself; None: replicas' gradients are taken by `jax.vmap`.

    Example:
        >>> from toolkit.parallel import data_parallel, make_mesh
        >>> layout = data_parallel(jnp.ones((256, 256)), make_mesh({"data": len(jax.devices())}))
        >>> plan = ExchangePlan(Exchange("int8"), layout)
        >>> plan.init().residuals
        ()
    """

    exchange: Exchange
    layout: Layout
    is_gathered: bool = False
    program: Callable | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_auto_axes(self.layout.mesh)
        self.layout.check()
        if self.layout.attention is not None:
            raise ValueError(
                f"exchange: got a layout with attention {self.layout.attention!r}, which cuts "
                "time; wanted whole sequences"
            )
        if not self.axes:
            raise ValueError("exchange: got a layout whose batch is not cut; wanted a data axis")
        paths = [row.path for row in self.layout.placements]
        for pattern, _ in self.exchange.exceptions:
            if not fnmatch.filter(paths, pattern):
                raise ValueError(
                    f"exchange: got {pattern!r}, which no tensor matches; wanted a pattern of "
                    f"paths such as {paths[0]!r}"
                )
        for group in self.groups:
            group.compressor.payload_bytes(group.size)  # which refuses too large a rank
            needs_near = group.exchange.pattern in ("two_hop", "far")
            is_level = group.along.near.size == 1 or group.along.far.size == 1
            if needs_near and is_level and len(group.along.peers.axes) == len(self.axes) == 1:
                size = group.along.peers.size
                raise ValueError(
                    f"exchange: got {group.exchange} on {size} devices of one process along one "
                    f"axis; wanted near=, a divisor between 1 and {size}, or a mesh with two data "
                    "axes"
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the batch, outermost first."""
        cuts = axes_of(self.layout.batch)[:1] or [()]
        return tuple(axis for axis in self.layout.mesh.axis_names if axis in cuts[0])

    @property
    def replicas(self) -> int:
        """The number of devices, or groups of them, with a part of the batch each."""
        return self._devices(self.axes)

    @property
    def others(self) -> tuple[str, ...]:
        """The other mesh axes, such as "model"."""
        return tuple(axis for axis in self.layout.mesh.axis_names if axis not in self.axes)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The tensors, in the order of the layout."""
        return tuple(self._leaf(at, row) for at, row in enumerate(self.layout.placements))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The compressed buffers."""
        big = [leaf for leaf in self.leaves if self._is_compressed(leaf)]
        # A matrix by its columns is by itself.
        return self._grouped(
            big,
            lambda leaf: jnp.float32,
            lambda leaf: (leaf.exchange, leaf.exchange.of_gradients.of_columns and leaf.index),
        )

    @property
    def remembering(self) -> tuple[Group, ...]:
        """The compressed buffers with feedback, in the order of the state."""
        return tuple(group for group in self.groups if group.exchange.memory is not None)

    @cached_property
    def dense(self) -> tuple[Group, ...]:
        """The buffers that are summed as they are."""
        small = [leaf for leaf in self.leaves if not self._is_compressed(leaf)]
        return self._grouped(small, lambda leaf: jnp.promote_types(leaf.dtype, jnp.float32))

    def _is_compressed(self, leaf: Leaf) -> bool:
        is_vector = leaf.exchange.of_gradients.of_columns is not None and len(leaf.shape) < 2
        least = max(leaf.exchange.dense_below, self._devices(leaf.axes))
        return leaf.size >= least and not is_vector

    def _grouped(
        self, leaves: Sequence[Leaf], dtype_of: Callable, apart: Callable = lambda leaf: None
    ) -> tuple[Group, ...]:
        found: dict[Any, list[Leaf]] = {}
        for leaf in leaves:
            if self._devices(leaf.axes) > 1:
                # What is whole along another axis is encoded alike along it, and so by itself.
                key = leaf.axes, bool(leaf.cuts), dtype_of(leaf), leaf.others, apart(leaf)
                found.setdefault(key, []).append(leaf)
        return tuple(
            Group(tuple(those), self.along(axes, those[0].exchange), is_cut, dtype)
            for (axes, is_cut, dtype, *_), those in found.items()
        )

    def along(self, axes: tuple[str, ...], exchange: Exchange) -> Along:
        """The devices along some axes, with the two levels of an exchange."""
        # Where weights are cut along near axes, what is left is far.
        near = exchange.near if axes == self.axes or len(axes) > 1 else 1
        return Along.over({axis: self.layout.mesh.shape[axis] for axis in axes}, near)

    def _devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.layout.mesh.shape[axis] for axis in axes)

    def _leaf(self, index: int, row: Placement) -> Leaf:
        if not jnp.issubdtype(row.dtype, jnp.floating):
            raise ValueError(f"{row.path}: got {row.dtype}, wanted a float type to exchange")
        exchange, final = self.exchange.of(row.path), row.states["optimizer"]
        weights, final = (unshared(spec, final, self.axes) for spec in (row.spec, final))
        own = [axis for axes in axes_of(only(weights, self.axes)) for axis in axes]
        summed = own if self.is_gathered else []
        left = tuple(axis for axis in self.axes if axis not in summed)
        cuts = tuple(
            (dimension, tuple(axis for axis in axes if axis in left))
            for dimension, axes in enumerate(axes_of(only(final, self.axes)))
            if {*axes} & {*left}
        )
        if cuts and {axis for _, axes in cuts for axis in axes} != {*left}:
            raise ValueError(
                f"{row.path}: got moments cut along {final}; an exchange wants them cut along all "
                f"of {', '.join(left)}, or none"
            )
        if own and exchange.memory is not None and not (self.is_gathered and left):
            raise ValueError(
                f"feedback: got {exchange.feedback!r}, and {row.path} is cut along "
                f"{', '.join(own)}: a residual would be as large as the whole gradient; wanted "
                "'none'"
            )
        shape = list(row.shape)
        for dimension, axes in enumerate(axes_of(row.spec)):
            shape[dimension] //= self._devices([a for a in axes if a in self.others or a in summed])
        cut = {axis for axes in axes_of(row.spec) for axis in axes}
        others = tuple(axis for axis in self.others if axis in cut)
        return Leaf(index, tuple(shape), row.dtype, left, cuts, others, exchange)

    @property
    def bytes_sent(self) -> float:
        """Bytes that a device sends in `mean`: modelled, and equal to the compiled program's."""
        total = 0.0
        for group in self.groups:
            how = group.exchange.how
            scatters = how.scatter_sends if group.is_cut else None
            sends = scatters or how.sends
            where = group.compressor, group.along, group.length
            total += sum(sent for _, sent in sends(*where))
            if scatters:
                continue
            devices = group.along.peers.size
            total += 8 * (devices - 1) / devices * group.rest
        for group in self.dense:
            devices = group.along.peers.size
            for leaf in group.leaves:
                width = jnp.promote_types(leaf.dtype, jnp.float32).itemsize
                times = 1 if group.is_cut else 2
                total += times * width * (devices - 1) / devices * leaf.size
        return total

    def residual_norm(self, residuals: Any) -> Array | None:
        """The norm of what is not sent yet; None where memories hold something else."""
        memories = [group.exchange.memory for group in self.remembering]
        if not memories or any(m.storage is not None or m.is_difference for m in memories if m):
            return None
        pairs = zip(memories, residuals, strict=True)
        pending = [hop[m.parts - 1] for m, hops in pairs if m for hop in hops]
        return jnp.sqrt(sum(jnp.sum(x**2) for x in pending))

    def init(self) -> ExchangeState:
        """The state before the first step, on its devices."""
        mesh, leading = self.layout.mesh, (self.replicas, self._devices(self.others))
        local = tuple(map(self._memories, self.remembering))
        zeros = jax.tree.map(
            lambda x: jax.jit(
                lambda: jnp.zeros((*leading, *x.shape), x.dtype),
                out_shardings=NamedSharding(mesh, self.layout.replica_spec),
            )(),
            local,
        )
        step = jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec()))
        return ExchangeState(step, zeros)

    def hops(self, group: Group, along: Along | None = None) -> list[tuple[int, int]]:
        """The shapes of what the hops of a buffer encode, also along other devices."""
        along, how = along or group.along, group.exchange.how
        shapes = how.memories(along, group.size // along.peers.size)
        return shapes[:-1] if group.is_cut and how.scatter is not None else shapes

    def _memories(self, group: Group) -> tuple[Any, ...]:
        """The shapes of what a device remembers for a buffer, hop by hop."""
        feedback, row = group.exchange.memory, group.compressor
        assert feedback is not None

        def memory(shape: tuple[int, int]) -> Any:
            rows = jax.ShapeDtypeStruct(shape, jnp.float32)
            own = jax.eval_shape(lambda x: store(feedback, (x,) * feedback.parts), rows)
            if row.start is None:
                return own
            return *own, jax.eval_shape(partial(row.start, shape[1]), jax.random.key(0))

        own = tuple(memory(shape) for shape in self.hops(group))
        mean = jax.ShapeDtypeStruct((group.along.peers.size, group.length), jnp.float32)
        return (*own, (mean,)) if feedback.is_difference else own

    def key(self, step: Int[Array, ""], what: str) -> Array:
        """The random key of a step's gradients, or of its weights."""
        key = jax.random.fold_in(jax.random.key(self.exchange.seed), step)
        return jax.random.fold_in(key, ("gradients", "weights").index(what))

    def is_gather_compressed(self, exchange: Exchange, size: int, axes: tuple[str, ...]) -> bool:
        """Whether a tensor of `size` numbers is gathered along these axes by its exchange."""
        is_near = exchange.pattern in ("far", "dense") and axes != self.axes
        return size >= exchange.dense_below and self._devices(axes) > 1 and not is_near

    def mean(
        self, gradients: Any, residuals: Any, step: Int[Array, ""], is_sum: bool = False
    ) -> tuple[Any, Any]:
        """The mean of the replicas' gradients, inside a `shard_map` over all axes of the mesh.

        Args:
            gradients: the tree of parameters, a replica's own gradients, of which a device has its
                parts along axes that do not cut the batch.
            residuals: those of the state, this device's.
            step: of the state.
            is_sum: whether the loss was divided by the number of replicas, so that the gradient is
                the replicas' sum; residuals are those of the mean all the same.

        Returns:
            (mean gradients, cut as the layout's moments; new residuals).
        """
        values, structure = jax.tree.flatten(gradients)
        if is_sum:
            values = [self._devices(leaf.axes) * values[leaf.index] for leaf in self.leaves]
        key, kept, left = self.key(step, "gradients"), [], list(residuals)
        for at, group in enumerate(self.groups):
            own: tuple = ()
            if (memory := group.exchange.memory) is not None:
                own = jax.tree.map(lambda x: x[0, 0], left.pop(0))
                if memory.forgets_after is not None:
                    is_new = step % memory.forgets_after == 0
                    own = jax.tree.map(lambda x: jnp.where(is_new, jnp.zeros_like(x), x), own)  # noqa: B023
            rows, rest = group.rows(values)
            mean, own = self._exchanged(group, rows, jax.random.fold_in(key, at), own)
            rest = jax.lax.pmean(rest, group.along.peers.axes) if group.rest else rest
            group.put(values, mean, rest)
            if memory is not None:
                kept.append(jax.tree.map(lambda x: x[None, None], own))
        for group in self.dense:
            rows, rest = group.rows(values)
            peers = group.along.peers
            if group.is_cut:
                group.put(values, peers.sum_scatter(rows) / peers.size, rest)
                continue
            whole = jnp.concatenate([rows.reshape(-1), rest])
            group.put(values, jax.lax.pmean(whole, peers.axes), rest[:0])
        return jax.tree.unflatten(structure, values), tuple(kept)

    def _exchanged(
        self, group: Group, rows: Array, key: Array, memories: tuple
    ) -> tuple[Array, tuple]:
        """The mean of a buffer: [parts, length] or this device's row [length], and memories."""
        how, feedback = group.exchange.how, group.exchange.memory
        device = jax.lax.axis_index((*self.axes, *group.leaves[0].others))
        messages = Messages(group.compressor, feedback, key, device, memories)
        if group.is_cut and how.scatter is not None:
            return how.scatter(rows, group.along, messages), tuple(messages.kept)
        mean = how.whole(rows, group.along, messages)
        kept = tuple(messages.kept)
        if feedback is not None and feedback.is_difference:
            mean = mean + memories[-1][0]
            kept = (*kept, (mean,))
        return (mean[group.along.index()] if group.is_cut else mean), kept
