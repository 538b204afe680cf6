"""The mesh axis over which a function inside `jax.shard_map` communicates."""

from jax import lax


def devices_along(axis: str) -> int:
    """Devices of a mesh axis here; ValueError where no `shard_map` has given it."""
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"axis={axis!r}: no such mesh axis here; wanted one of a jax.shard_map around this call"
        ) from None
