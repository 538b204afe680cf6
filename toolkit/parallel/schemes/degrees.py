"""ZeRO: weights, gradients and moments, each sharded with its own degree.

The degrees (d_w, d_g, d_o) do not decrease: weights are gathered often, over few near devices;
moments are used once per step and may be sharded over all. Plain ZeRO uses only degrees 1 and N.
"""

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from toolkit.parallel.layout import STATES

PLAIN = {
    "data": 0,
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
}  # number of sharded states, counted from the last


def axes_of_states(
    scheme: str, degrees: Mapping[str, int] | None, mesh: Mesh, axes: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that shard each state; `axes` are those of ZeRO, innermost (nearest) first."""
    if scheme in PLAIN:
        if degrees is not None:
            raise ValueError(f"degrees belong to scheme 'hierarchical'; {scheme!r} has its own")
        cut = STATES[len(STATES) - PLAIN[scheme] :]
        return {state: axes if state in cut else () for state in STATES}
    possible = [math.prod(mesh.shape[axis] for axis in axes[:n]) for n in range(len(axes) + 1)]
    if degrees is None or set(degrees) != set(STATES):
        raise ValueError(
            f"degrees must give {', '.join(STATES)} for scheme 'hierarchical'; got "
            f"{None if degrees is None else ', '.join(map(str, degrees)) or 'none'}"
        )
    for state in STATES:
        if degrees[state] not in possible:
            raise ValueError(
                f"degrees[{state!r}]={degrees[state]!r}: want a product of the mesh's innermost "
                f"axes, one of {', '.join(map(str, possible))}"
            )
    if not degrees["weights"] <= degrees["gradient"] <= degrees["optimizer"]:
        raise ValueError(
            "degrees must rise from weights over gradient to optimizer; got "
            + ", ".join(str(degrees[state]) for state in STATES)
        )
    return {state: axes[: possible.index(degrees[state])] for state in STATES}
