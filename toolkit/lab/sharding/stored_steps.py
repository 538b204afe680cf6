"""A train step so small that each of its arrays can be drawn, as compiled for eight devices.

    h = x + gelu(norm(x) up) down,   loss = mean (h - y)^2,   and Adam

It is made from shapes alone, and stored: compiling and blaming it takes a minute.
`python -m toolkit.lab.sharding.stored_steps` writes it anew.
"""

import functools
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from toolkit import parallel
from toolkit.measure.stored import stored_folder
from toolkit.parallel.axes import axes_of

FLOAT32 = 4
COPIES = {"weights": 1, "gradient": 1, "optimizer": 2}  # Adam keeps two moments per weight
DEVICES = 8
BATCH, WIDTH, HIDDEN = 1024, 64, 256
MESHES = ("1x8", "2x4", "4x2", "8x1")
SCHEMES = ("data", "zero1", "zero2", "zero3", "tensor", "zero3+tensor")
BLOCK: Any = {
    "norm": {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)},
    "feed_forward": {
        "up": {"kernel": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32)},
        "down": {"kernel": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32)},
    },
}


def axes_of_mesh(mesh: str, scheme: str) -> dict[str, int]:
    """Axes of "2x4": rows are data parallel; columns too, unless the scheme has tensor."""
    rows, columns = map(int, mesh.split("x"))
    names = ("data", "model") if "tensor" in scheme else ("node", "data")
    return dict(zip(names, (rows, columns), strict=True))


def block_layout(mesh: str, scheme: str) -> parallel.Layout:
    """The layout of the block on the first eight devices."""
    axes = axes_of_mesh(mesh, scheme)
    return parallel.layout(BLOCK, parallel.make_mesh(axes, devices=jax.devices()[:DEVICES]), scheme)


def block_loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean squared distance of the block's output from the target; both [batch, width]."""
    x, target = batch
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(variance + 1e-6) * params["norm"]["scale"][None]
    feed_forward = params["feed_forward"]
    hidden = jax.nn.gelu(normed @ feed_forward["up"]["kernel"])
    output = x + hidden @ feed_forward["down"]["kernel"]
    return jnp.mean(jnp.square(output - target))


def step_arguments(
    found: parallel.Layout, optimizer: optax.GradientTransformation
) -> tuple[Any, ...]:
    """Shapes of parameters, optimiser's state and batch, placed as a layout says."""
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=found.batch_sharding)
    return *placed(found, BLOCK, jax.eval_shape(optimizer.init, BLOCK)), (x, x)


def placed(found: parallel.Layout, *trees: Any) -> tuple[Any, ...]:
    """The shapes of trees, placed as a layout says."""

    def shape(leaf: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return tuple(jax.tree.map(shape, tree, found.shardings(tree)) for tree in trees)


def blame_step(found: parallel.Layout) -> parallel.Blame:
    """The compiled step under a layout: each collective, its cause, and what would remove it."""
    optimizer = optax.adam(1e-3)
    step = parallel.partitioned_train_step(block_loss, optimizer, found)
    arguments = step_arguments(found, optimizer)
    return parallel.blame(step.__wrapped__, arguments, results=results_of(found, arguments))


def results_of(found: parallel.Layout, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shardings of a step's results: parameters and optimiser state as before, and the loss."""
    state = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    return *state, jax.NamedSharding(found.mesh, jax.P())


FILE = "steps.json"
Cuts = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of an array, outermost first."""


@dataclass(frozen=True)
class StoredArray:
    """A parameter, with its sharding in each state."""

    path: str
    shape: tuple[int, ...]
    states: dict[str, Cuts]


@dataclass(frozen=True)
class StoredCollective:
    """A collective as the compiler made it, its cause, and a change that was tried."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes_sent: float  # by one device, in all runs of a step
    source: str
    cause: str
    change: str = ""  # none: a textbook layout has it too
    is_removed: bool = False
    bytes_sent_then: float = 0.0


@dataclass(frozen=True)
class StoredStep:
    """One entry of the menu: a mesh and a scheme."""

    axes: dict[str, int]
    batch: Cuts
    arrays: tuple[StoredArray, ...]
    collectives: tuple[StoredCollective, ...]  # in program order


class Part(NamedTuple):
    """A piece of an array, and the devices that hold it."""

    start: tuple[int, ...]  # counted in pieces, per dimension
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """An array in one state, cut into parts."""

    name: str
    state: str
    shape: tuple[int, ...]
    cuts: Cuts
    pieces: tuple[int, ...]  # per dimension
    parts: tuple[Part, ...]

    @property
    def copies(self) -> int:
        """The number of copies of the whole array over all devices."""
        return len(self.parts[0].holders)

    @property
    def bytes_per_device(self) -> int:
        """Of all that the state keeps."""
        kept = COPIES.get(self.state, 1) * FLOAT32
        return math.prod(self.shape) // len(self.parts) * kept

    @property
    def spec(self) -> str:
        """As jax writes it."""
        entries = (
            "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
            for axes in self.cuts
        )
        return f"P({', '.join(entries)})"


def place(
    name: str, state: str, shape: tuple[int, ...], cuts: Cuts, axes: dict[str, int]
) -> Placed:
    """Which devices hold which part: devices count through the mesh, its last axis fastest."""
    cuts = cuts + ((),) * (len(shape) - len(cuts))
    pieces = tuple(math.prod(axes[axis] for axis in along) for along in cuts)
    holders: dict[tuple[int, ...], list[int]] = {
        start: [] for start in itertools.product(*map(range, pieces))
    }
    for device, at in enumerate(itertools.product(*map(range, axes.values()))):
        coordinate = dict(zip(axes, at, strict=True))
        start = []
        for along in cuts:
            index = 0
            for axis in along:
                index = index * axes[axis] + coordinate[axis]
            start.append(index)
        holders[tuple(start)].append(device)
    parts = tuple(Part(start, tuple(devices)) for start, devices in holders.items())
    return Placed(name, state, shape, cuts[: _last(cuts)], pieces, parts)


def _last(cuts: Cuts) -> int:
    """Trailing dimensions that are whole are not written."""
    return max((at + 1 for at, along in enumerate(cuts) if along), default=0)


@functools.cache
def stored_step(mesh: str, scheme: str) -> StoredStep:
    """The step on a mesh, such as "2x4", under a scheme of `parallel.layout`."""
    found = _stored()["steps"][f"{mesh} {scheme}"]
    arrays = (
        StoredArray(path, tuple(shape), {name: _cuts(cuts) for name, cuts in states.items()})
        for path, shape, states in found["arrays"]
    )
    made = (
        StoredCollective(**facts | {"axes": tuple(facts["axes"])}) for facts in found["collectives"]
    )
    axes = axes_of_mesh(mesh, scheme)
    return StoredStep(axes, _cuts(found["batch"]), tuple(arrays), tuple(made))


def compiled_with() -> str:
    """What compiled them."""
    return _stored()["compiled_with"]


def arrays_of(found: parallel.Layout) -> list[Any]:
    """A layout as it is stored."""
    return [
        [row.path, list(row.shape), {name: axes_of(spec) for name, spec in row.states.items()}]
        for row in found.placements
    ]


def collectives_of(found: parallel.Layout) -> list[dict[str, Any]]:
    """The collectives of the step under a layout as they are stored, in program order."""
    blamed = blame_step(found)
    place = {id(item): at for at, item in enumerate(blamed.explanation.collectives)}
    in_order = sorted(blamed.findings, key=lambda finding: place[id(finding.item)])
    return [_collective(finding) for finding in in_order]


def _collective(finding: parallel.Finding) -> dict[str, Any]:
    item = finding.item
    row = {
        "kind": item.collective.kind, "axes": list(item.axes), "count": item.collective.count,
        "bytes_sent": item.collective.total_bytes_sent, "source": item.source,
        "cause": f"{item.before} -> {item.after}; from {item.origin}, for {item.wanted_by}",
    }  # fmt: skip
    for trial in finding.trials[-1:]:
        row |= {
            "change": trial.change,
            "is_removed": trial.removes,
            "bytes_sent_then": trial.bytes_sent,
        }
    return row


def _cuts(cuts: Any) -> Cuts:
    return tuple(map(tuple, cuts))


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads((stored_folder("sharding") / FILE).read_text())


def explain_step(
    config: Any, mesh_axes: str, scheme: str, *, batch: int = 16,
    sequence_length: int = 64, is_blamed: bool = False,
) -> parallel.Explanation | parallel.Blame:  # fmt: skip
    """Compiles a step (Adam) under the layout of a scheme, from shapes alone, and explains it.

    `mesh_axes` is such as "data=4,model=2"; on a CPU the devices are simulated. `is_blamed` adds
    the blame, which compiles once more for each change tried.
    """
    from flax import nnx

    from toolkit.language import next_byte_loss
    from toolkit.looped import LoopedLM

    pairs = [part.partition("=") for part in mesh_axes.split(",")]
    if any(not name or not size.isdecimal() for name, _, size in pairs):
        raise ValueError(f"mesh={mesh_axes!r}: want axes and sizes, such as data=4,model=2")
    axes = {name: int(size) for name, _, size in pairs}
    parallel.simulate_devices(math.prod(axes.values()))
    mesh = parallel.make_mesh(axes)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    found = parallel.layout(model, mesh, scheme)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    size = batch, sequence_length
    text = jax.ShapeDtypeStruct(size, jnp.int32, sharding=found.batch_sharding)
    step = parallel.partitioned_train_step(
        functools.partial(next_byte_loss, graph), optimizer, found
    )
    arguments = *placed(found, params, state), (text, text)
    if is_blamed:
        return parallel.blame(step.__wrapped__, arguments, results=results_of(found, arguments))
    return parallel.explain(step.lower(*arguments))


def main() -> None:
    """Writes the file anew, in about a minute."""
    parallel.simulate_devices(DEVICES)
    steps = {}
    for mesh, scheme in tqdm([(mesh, scheme) for mesh in MESHES for scheme in SCHEMES]):
        found = block_layout(mesh, scheme)
        steps[f"{mesh} {scheme}"] = {
            "batch": axes_of(found.batch),
            "arrays": arrays_of(found),
            "collectives": collectives_of(found),
        }
    made_by = f"jax {jax.__version__}, {DEVICES} simulated CPU devices"
    text = json.dumps({"compiled_with": made_by, "steps": steps}, indent=1)
    (stored_folder("sharding") / FILE).write_text(text + "\n")


if __name__ == "__main__":
    main()
