"""The identity of a checkpoint: names, shapes and bits of arrays, settings of the run."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves in a flat dict, so that any pytree with these paths can read the file."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def describe(tree: Any) -> dict[str, str]:
    """Type and shape of every array, as in 'float32[16,8]'."""
    return {
        name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for name, leaf in named_leaves(tree).items()
    }


def checksums(state: Any) -> dict[str, int]:
    """One checksum per array, independent of the sharding, because orbax does not detect flipped
    bits.

    They guard against accidents, not against manipulation.
    """
    named = named_leaves(state)
    here = {name: _bit_sum_here(leaf) for name, leaf in named.items() if _is_in_memory(leaf)}
    elsewhere = [name for name in named if name not in here]
    sums = jax.device_get(_bit_sums([named[name] for name in elsewhere])) if elsewhere else []
    found = here | {name: int(total) for name, total in zip(elsewhere, sums, strict=True)}
    return {name: found[name] for name in named}


def _is_in_memory(leaf: Array) -> bool:
    """Whether NumPy can read it in place; it adds integers ten times as fast as XLA:CPU."""
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    return leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())


def _bit_sum_here(leaf: Array) -> int:
    """`_bit_sums` of one array, each part of it once."""
    parts = (shard.data for shard in leaf.addressable_shards if shard.replica_id == 0)
    words = (np.ravel(part).view(_word(leaf.dtype)) for part in parts)
    return sum(int(part.sum(dtype=np.uint32)) for part in words) % 2**32


def _word(dtype: np.dtype) -> type:
    return {1: np.uint8, 2: np.uint16}.get(dtype.itemsize, np.uint32)


@jax.jit
def _bit_sums(leaves: list[Array]) -> Array:
    """Sums of the arrays' bit patterns, modulo 2**32; the order of addition does not matter."""

    def bit_sum(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.uint8)
        bits = jax.lax.bitcast_convert_type(leaf, _word(leaf.dtype))
        return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jnp.stack([bit_sum(leaf) for leaf in leaves])


def state_bytes(state: Any) -> int:
    """Total bytes of all arrays, each counted once."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def as_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata as JSON returns it: tuples are lists, keys are strings."""
    try:
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata must be JSON-able: {error}") from None


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """The differences of two JSON values, as 'name: the checkpoint has x, this run y'."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        lines = []
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            inner = f"{name}.{key}" if name else key
            lines += differences(found.get(key), wanted.get(key), inner)
        return lines
    if found == wanted:
        return []
    return [f"{name}: the checkpoint has {_shown(found)}, this run {_shown(wanted)}"]


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def bound_as(like: Any, array: Any) -> Any:
    """A restored array bound to devices as in the template, so that it can be combined with
    others."""
    is_bound = getattr(like, "committed", True)
    return array if is_bound else jnp.array(jax.device_get(array))
