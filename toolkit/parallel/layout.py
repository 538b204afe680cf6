"""A layout is data: the sharding of each parameter on the mesh, with the reason.

It can be printed, edited (`replace`), checked (`check`) and applied (`apply`, `shardings`).
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from toolkit.measure.tables import text_table
from toolkit.parallel.axes import axes_of
from toolkit.parallel.context.along import Along, attending
from toolkit.parallel.dataflow.holding import holding

STATES = ("weights", "gradient", "optimizer")


@dataclass(frozen=True)
class Placement:
    """One row of a layout.

    Attributes:
        path: path in the parameter tree, such as "layers/0/kernel".
        shape: global shape.
        dtype: element type.
        spec: mesh axis (or None) for each dimension; missing dimensions are not sharded.
        reason: the reason, in words.
        gradient: spec of its summed gradient; None: as the parameter.
        optimizer: spec of its optimiser moments; None: as the parameter.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> row = Placement("layer/kernel", (8, 4), jnp.dtype("float32"), P("data"), "rows")
        >>> row.shape
        (8, 4)
    """

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    spec: PartitionSpec
    reason: str
    gradient: PartitionSpec | None = None
    optimizer: PartitionSpec | None = None

    @property
    def states(self) -> dict[str, PartitionSpec]:
        """The spec of each state of the parameter: weights, gradient, optimizer."""
        gradient = self.spec if self.gradient is None else self.gradient
        optimizer = self.spec if self.optimizer is None else self.optimizer
        return {"weights": self.spec, "gradient": gradient, "optimizer": optimizer}


@dataclass(frozen=True)
class Layout:
    """The shardings of parameters and batches on a mesh.

    It also applies to trees that hold more than parameters, such as a train state. A leaf whose
    path *ends* in a parameter's path and that has its shape follows that parameter. Below an
    attribute, like the moments of optax states (`mu`, `nu`, `trace`), it takes the row's
    `optimizer`; only the attribute `params` holds parameters. Below the attribute `residuals` every
    device has a part of its own (`replica_spec`). Every other leaf is replicated.

    Attributes:
        mesh: the devices.
        placements: one row per parameter, in tree order.
        batch: spec of every array in a batch, leading dimension first.
        attention: "ring", "zigzag" or "ulysses" if time is sharded over the axis "context", for
            softmax layers of `toolkit.looped`. None: sequences are whole.

    Example:
        >>> params = {"kernel": jnp.ones((2048, 8)), "bias": jnp.ones(8)}
        >>> layout = fully_sharded(params, make_mesh({"data": len(jax.devices())}))
        >>> print(layout)  # doctest: +ELLIPSIS
        mesh: data=... devices); batch: P('data')
        path ...
        >>> params = layout.apply(params)
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    batch: PartitionSpec
    attention: str | None = None

    def bind(self, function: Callable) -> Callable:
        """Bind a function (params, ..., batch) of a model, such as its loss, to this layout.

        Parameters are gathered where the program first uses them, and activations are held to the
        devices of their part of the batch; or else tokens attend by `attention`. The train steps
        here do so themselves.
        """
        if self.attention is None:
            rows = axes_of(self.batch)[:1] or [()]
            return holding(function, self.mesh, rows[0], self.specs)
        along = Along(self.mesh, self.attention, self.batch[0])

        def bound(*args: Any, **kwargs: Any) -> Any:
            with attending(along):
                return function(*args, **kwargs)

        return bound

    def replace(self, path: str, spec: PartitionSpec, reason: str) -> "Layout":
        """A new layout with another spec for one parameter, its gradient and its moments; not yet
        checked."""
        paths = [row.path for row in self.placements]
        if path not in paths:
            near = difflib.get_close_matches(path, paths, n=3, cutoff=0.0)
            raise ValueError(f"no parameter {path!r} in this layout; nearest: {', '.join(near)}")
        rows = (
            Placement(path, row.shape, row.dtype, spec, reason) if row.path == path else row
            for row in self.placements
        )
        return dataclasses.replace(self, placements=tuple(rows))

    def check(self) -> None:
        """Raise ValueError with one line per problem: path, dimension, axis and both sizes."""
        problems = [problem for row in self.placements for problem in self._problems_of(row)]
        if problems:
            raise ValueError("the layout does not fit:\n  " + "\n  ".join(problems))

    def specs(self, tree: Any, state: str | None = None) -> Any:
        """The same tree with a PartitionSpec at every leaf; shapes suffice.

        `state` selects the spec of "weights", "gradient" or "optimizer" for all parameters; with
        None every leaf takes its own. ValueError if the layout does not fit its mesh, or a
        parameter has another shape than in the layout.
        """
        if state not in (None, *STATES):
            raise ValueError(f"state={state!r}: want one of {', '.join(STATES)}, or None")
        self.check()
        table = {row.path: row for row in self.placements}
        placed, others = 0, 0

        def spec_of(keys: tuple, leaf: Any) -> PartitionSpec:
            nonlocal placed, others
            names, shape = _names(keys), tuple(jnp.shape(leaf))
            if any(getattr(key, "name", None) == "residuals" for key in keys):
                return self.replica_spec
            whole = table.get("/".join(names))
            if whole is not None and whole.shape != shape:
                raise ValueError(
                    f"{whole.path} has shape {shape}, but the layout was made for {whole.shape}"
                )
            for start in range(len(names) + 1):  # the last is the path of an array by itself
                row = table.get("/".join(names[start:]))
                if row is not None and row.shape == shape:
                    placed += 1
                    is_moment = any(_is_optimizer_state(key) for key in keys[:start])
                    return row.states[state or ("optimizer" if is_moment else "weights")]
            others += len(shape) > 0
            return PartitionSpec()

        specs = jax.tree_util.tree_map_with_path(spec_of, tree)
        if others and not placed:
            raise ValueError(
                f"tree has none of the {len(table)} parameters the layout was made for"
            )
        return specs

    def shardings(self, tree: Any, state: str | None = None) -> Any:
        """`specs` as NamedShardings, for `jax.jit(in_shardings=..., out_shardings=...)`."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self.specs(tree, state),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def apply(self, tree: Any) -> Any:
        """Put a tree of arrays on the devices according to `specs`."""
        return jax.device_put(tree, self.shardings(tree))

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of every array in a batch."""
        return NamedSharding(self.mesh, self.batch)

    def apply_batch(self, batch: Any) -> Any:
        """Put a batch of arrays [batch, ...] on the devices, sharded."""
        for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
            name = "/".join(_names(keys)) or "the array"
            if problems := self._problems(f"batch: {name}", jnp.shape(leaf), self.batch, False):
                raise ValueError("; ".join(problems))
        return jax.device_put(batch, self.batch_sharding)

    @property
    def replica_spec(self) -> PartitionSpec:
        """The spec of arrays [replicas, cuts, ...] of which every device has a part of its own, as
        of what an exchange of gradients remembers: replicated, it would cost N times as much."""
        rows = (axes_of(self.batch)[:1] or [()])[0]
        others = tuple(axis for axis in self.mesh.axis_names if axis not in rows)
        return PartitionSpec(
            *(axes[0] if len(axes) == 1 else axes for axes in (rows, others) if axes)
        )

    @property
    def bytes_per_device(self) -> int:
        """Bytes of parameters that each device holds."""
        return sum(self._bytes(row, row.spec) for row in self.placements)

    def __str__(self) -> str:
        """The layout as a table: mesh, one line per parameter, and bytes per device."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        others = [
            state
            for state in STATES[1:]
            if any(row.states[state] != row.spec for row in self.placements)
        ]
        rows: list[tuple[str, ...]] = [("path", "shape", "spec", *others, "bytes/device", "reason")]
        for row in self.placements:
            shape = "x".join(map(str, row.shape)) or "scalar"
            specs = (_written(row.states[state]) for state in ("weights", *others))
            rows.append((row.path, shape, *specs, f"{self._bytes(row, row.spec):,}", row.reason))
        whole = sum(math.prod(row.shape) * row.dtype.itemsize for row in self.placements)
        totals = [
            sum(self._bytes(row, row.states[state]) for row in self.placements) for state in others
        ]
        share = self.bytes_per_device / whole if whole else 1.0
        shares = f"{share:.1%} of {whole:,}"
        sums = (f"{total:,} bytes" for total in totals)
        rows.append(("total", "", "", *sums, f"{self.bytes_per_device:,}", shares))
        mesh = f"mesh: {axes} ({self.mesh.size} devices); batch: {_written(self.batch)}"
        mesh += f"; attention: {self.attention}" if self.attention else ""
        return f"{mesh}\n{text_table(rows, '<<<' + '<' * len(others) + '><')}"

    def _bytes(self, row: Placement, spec: PartitionSpec) -> int:
        cuts = [self.mesh.shape[axis] for axes in axes_of(spec) for axis in axes]
        return math.prod(row.shape) * row.dtype.itemsize // math.prod(cuts)

    def _problems_of(self, row: Placement) -> list[str]:
        specs = {"": row.spec, ", gradient": row.gradient, ", optimizer": row.optimizer}
        return [
            problem
            for state, spec in specs.items()
            if spec is not None
            for problem in self._problems(row.path + state, row.shape, spec, True)
        ]

    def _problems(
        self, name: str, shape: tuple[int, ...], spec: PartitionSpec, is_parameter: bool
    ) -> list[str]:
        """Problems of a layout, with what would fit."""
        name = f"{name} {shape}"
        dimensions = axes_of(spec)
        used = [axis for axes in dimensions for axis in axes]
        if unknown := [axis for axis in used if axis not in self.mesh.shape]:
            wanted = ", ".join(map(repr, self.mesh.shape))
            return [f"{name}: axis {unknown[0]!r} is not in the mesh (axes {wanted})"]
        if twice := [axis for axis in used if used.count(axis) > 1]:
            free = [repr(axis) for axis in self.mesh.shape if axis not in used]
            return [
                f"{name}: axis {twice[0]!r} is used twice in {_written(spec)}; an axis cuts one "
                f"dimension of an array, and {', '.join(free) or 'no other axis'} is free"
            ]
        if len(dimensions) > len(shape):
            return [
                f"{name}: {_written(spec)} names {len(dimensions)} dimensions, "
                f"the tensor has {len(shape)}"
            ]
        problems = []
        for index, axes in enumerate(dimensions):
            cuts = math.prod(self.mesh.shape[axis] for axis in axes)
            if shape[index] % cuts:
                named = " x ".join(map(repr, axes))
                fits = _what_fits(shape, index, cuts, is_parameter)
                problems.append(
                    f"{name}: dimension {index} of size {shape[index]} is not divisible by "
                    f"axis {named} of size {cuts}; {fits}"
                )
        return problems


def placements_of(params: Any, choose: Any) -> tuple[Placement, ...]:
    """One row for every leaf, its spec and reason from `choose(shape)`."""
    rows = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"params, at {'/'.join(_names(keys))!r}: got {type(leaf).__name__}, want an array"
            )
        spec, reason = choose(tuple(leaf.shape))
        rows.append(Placement("/".join(_names(keys)), tuple(leaf.shape), leaf.dtype, spec, reason))
    return tuple(rows)


def _what_fits(shape: tuple[int, ...], index: int, cuts: int, is_parameter: bool) -> str:
    """An alternative to a cut that does not fit: a size, or for a parameter another cut."""
    size = shape[index]
    if not is_parameter:
        below = size - size % cuts
        return f"{f'{below} or ' if below else ''}{below + cuts} would be"
    others = [
        f"dimension {other} ({length})"
        for other, length in enumerate(shape)
        if other != index and length and length % cuts == 0
    ]
    ways = [f"an axis of {cut}" for cut in range(cuts - 1, 1, -1) if size % cut == 0][:1]
    return f"{' or '.join(others + ways) or 'only leaving it whole'} would fit"


def _is_optimizer_state(key: Any) -> bool:
    """Whether a step of a path enters an optimiser's state, where moments are attributes."""
    return isinstance(key, jax.tree_util.GetAttrKey) and key.name not in ("params", "value")


def _names(keys: tuple) -> list[str]:
    """The words of a path, without the last step into a flax variable (`.value`)."""
    if keys and getattr(keys[-1], "name", None) == "value":
        keys = keys[:-1]
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]


def _written(spec: PartitionSpec) -> str:
    entries = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
        for axes in axes_of(spec)
    ]
    return f"P({', '.join(entries)})"
