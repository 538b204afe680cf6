"""The compiled steps that the panels show, stored: compiling and blaming them takes a minute.

`python -m toolkit.lab.sharding.stored_steps` writes them anew.
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

import jax
from tqdm import tqdm

from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.sharding.mlp_step import (
    DEVICES,
    MESHES,
    SCHEMES,
    axes_of_mesh,
    blame_step,
    block_layout,
)
from toolkit.parallel import Finding, Layout, simulate_devices
from toolkit.parallel.axes import axes_of

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


def arrays_of(found: Layout) -> list[Any]:
    """A layout as it is stored."""
    return [
        [row.path, list(row.shape), {name: axes_of(spec) for name, spec in row.states.items()}]
        for row in found.placements
    ]


def collectives_of(found: Layout) -> list[dict[str, Any]]:
    """The collectives of the step under a layout as they are stored, in program order."""
    blamed = blame_step(found)
    place = {id(item): at for at, item in enumerate(blamed.explanation.collectives)}
    in_order = sorted(blamed.findings, key=lambda finding: place[id(finding.item)])
    return [_collective(finding) for finding in in_order]


def _collective(finding: Finding) -> dict[str, Any]:
    item = finding.item
    row = {
        "kind": item.collective.kind,
        "axes": list(item.axes),
        "count": item.collective.count,
        "bytes_sent": item.collective.total_bytes_sent,
        "source": item.source,
        "cause": f"{item.before} -> {item.after}; from {item.origin}, for {item.wanted_by}",
    }
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


def main() -> None:
    """Writes the file anew, in about a minute."""
    simulate_devices(DEVICES)
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
