"""Whether a checkpoint belongs to a run, and which arrays of an exchange may differ."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.training.checkpoints.abandoned_reads import Refused
from toolkit.training.checkpoints.identity import as_json, describe, differences

RESIDUALS = "exchange_state/residuals/"


def other_replicas(saved: dict[str, str], template: Any, is_resized: bool) -> dict[str, Any]:
    """Arrays of an exchange that the template has not, or not so: by name, as they were saved."""
    own = describe(template)
    has_own = any(name.startswith(RESIDUALS.partition("/")[0]) for name in own)
    other = {}
    for name, described in saved.items():
        is_left_out = not has_own and name.startswith("exchange_state/")
        is_other = is_resized and name.startswith(RESIDUALS) and name in own
        if is_left_out or (is_other and own[name] != described):
            dtype, _, shape = described.rstrip("]").partition("[")
            sizes = tuple(int(size) for size in shape.split(",") if size)
            device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            other[name] = jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=device)
    return other


def require_same_run(
    record: dict[str, Any], template: Any, expected: dict[str, Any] | None,
    also: Sequence[dict[str, Any]], other: dict[str, Any],
) -> None:  # fmt: skip
    """Refuse the record of a run whose settings or arrays are not those wanted."""

    def from_wanted(expected: dict[str, Any]) -> list[str]:
        wanted = as_json(expected)
        return differences({key: record["run"].get(key) for key in wanted}, wanted)

    unlike = from_wanted(expected or {})
    if any(not from_wanted(other) for other in also):
        unlike = []
    # Arrays may differ because the run does: report them only if the settings agree.
    saved, own = (
        {name: shape for name, shape in arrays.items() if name not in other}
        for arrays in (record["arrays"], describe(template))
    )
    unlike = unlike or differences(saved, own)
    if unlike:
        more = f"; and {len(unlike) - 3} more" if len(unlike) > 3 else ""
        raise Refused(f"it belongs to another run: {'; '.join(unlike[:3])}{more}")
