"""A search on disk: arrays by name, and its constants, in one safetensors file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit._files import json_object, require_seal, sealed, with_blank_seal, write_whole


def write_search(path: str | os.PathLike, progress: Any) -> None:
    """Write a `SearchProgress` atomically."""
    from safetensors.numpy import save

    arrays = {name: _stored(leaf) for name, leaf in _named(progress).items()}
    facts = {"constants": described(progress.searcher)}
    write_whole(path, sealed(save(arrays, with_blank_seal({"search": json.dumps(facts)}))))


def read_search(path: str | os.PathLike, like: Any) -> Any:
    """Read a search into the structure of a new one."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    name, content = Path(path).name, Path(path).read_bytes()
    require_seal(content, f"start: {name!r}")
    try:
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        facts = json_object(json_object(header, "its header")["__metadata__"]["search"], "search")
        begun, arrays = facts["constants"], load(content)
        begun["searcher"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"start: {name!r} holds no search ({error})") from None
    require_same(begun, described(like.searcher))
    wanted = _named(like)
    if missing := sorted(wanted.keys() - arrays.keys()):
        raise ValueError(f"start: {name!r} has no array {missing[0]!r}, which this search wants")
    if foreign := sorted(arrays.keys() - wanted.keys()):
        raise ValueError(f"start: {name!r} has an array {foreign[0]!r}, unknown to this search")
    leaves = [_restored(key, arrays[key], leaf) for key, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def described(searcher: Any) -> dict[str, Any]:
    """The class and constants of a searcher, as JSON returns them."""
    facts = {"searcher": type(searcher).__name__, **dataclasses.asdict(searcher)}
    return json.loads(json.dumps(facts, default=float))  # NumPy's numbers as Python's


def require_same(begun: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to resume with other constants."""
    changed = [key for key in {**begun, **wanted} if begun.get(key) != wanted.get(key)]
    if begun["searcher"] != wanted["searcher"]:
        changed = ["searcher"]
    if changed:
        old, new = ({key: facts.get(key) for key in changed} for facts in (begun, wanted))
        raise ValueError(f"start: the search was begun with {old} and goes on with that, got {new}")


def _named(progress: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(progress)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _stored(leaf: Any) -> np.ndarray:
    # safetensors writes the memory of a slice or a transpose as if its rows were whole.
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf, order="C")
    # NumPy's readers of such files know no bfloat16.
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _restored(name: str, array: np.ndarray, like: Any) -> Any:
    if not isinstance(like, Array):  # of the controller, whose arrays grow
        if isinstance(like, np.ndarray):
            return array
        if array.size != 1:
            raise ValueError(f"start: {name!r} is {array.dtype}{list(array.shape)}, not one number")
        return type(like)(array.item())
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if like.dtype.kind == "V" and array.dtype == f"u{like.dtype.itemsize}":
        array = array.view(like.dtype)
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        came, wanted = (f"{x.dtype}{list(x.shape)}" for x in (array, like))
        raise ValueError(f"start: {name!r} is {came}, and {wanted} is to go on")
    return jax.device_put(array, like.sharding)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
