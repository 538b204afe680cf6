"""Tensors of published files: shapes are checked before anything is read, values when it is
read."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit._files import json_object
from toolkit.looped.config import LoopedConfig
from toolkit.looped.parameters import parameter_count
from toolkit.measure import available_memory

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
TABLE = "tid2eid"
"""Ending of the names of tables of tokens' experts, which are whole numbers."""
INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """A tensor that is read, and checked for finite values, when `read` is called."""

    shape: tuple[int, ...]
    read: Callable[[], Array]

    def times(self, factor: Any) -> "StoredTensor":
        """The same tensor times a number, or times one per row, in float32."""

        def read() -> Array:
            factors = jnp.asarray(factor, jnp.float32)
            return self.read().astype(jnp.float32) * (factors[:, None] if factors.ndim else factors)

        return StoredTensor(self.shape, read)


def given_tensors(tensors: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Tensors by name; each is looked up only when read, since a mapping may make it on demand."""

    def read(name: str) -> Array:
        return _finite("the checkpoint", name, tensors[name])

    return {
        name: StoredTensor(tuple(np.shape(tensors[name])), functools.partial(read, name))
        for name in tensors
    }


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, by name."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="flax")
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or not a safetensors file ({error}).") from error
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            read = functools.partial(_read, file, opened.get_tensor, name, part.get_dtype())
            if name in found:
                raise ValueError(
                    f"{file} has the tensor {name!r}, and so has another file of its folder; "
                    "wanted each once."
                )
            found[name] = StoredTensor(tuple(part.get_shape()), read)
    return found


def files_of(source: Path) -> list[Path]:
    """A file, or those of a folder: what its index names, or all of them."""
    if not source.is_dir():
        return [source] if source.is_file() else []
    index = source / INDEX
    if not index.exists():
        return sorted(source.glob("*.safetensors"))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise ValueError(f"{index}: weight_map must say which file holds each tensor.")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}; it must be a file of the same folder.")
        if not (source / name).is_file():
            raise ValueError(f"{index} names {name!r}, which is not there.")
    return [source / name for name in names]


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        return json_object(file.read_bytes(), "it")
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}.") from error


def check_sizes(config: LoopedConfig, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Refuse a configuration that does not match these tensors or does not fit this machine.

    Only sizes are compared: a hostile configuration would take hours to build.
    """
    layers = len(config.layers) + len(config.prelude_layers) + len(config.coda_layers)
    if layers > len(tensors):
        raise ValueError(f"{where} describes {layers:,} layers and holds {len(tensors)} tensors.")
    described = parameter_count(config)
    stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
    # A later check names the tensor that is missing or too small.
    if described > 2 * stored:
        raise ValueError(
            f"{where} describes {described:,} parameters and holds {stored:,} numbers."
        )
    check_memory(described, where)


def check_memory(parameters: int, where: str) -> None:
    """Refuse more float32 parameters than this machine can hold."""
    if 4 * parameters > available_memory():
        raise ValueError(
            f"{where} describes {parameters:,} parameters, {4 * parameters / 1e9:,.0f} GB; this "
            f"machine has {available_memory() / 1e9:,.0f} GB of memory."
        )


def _read(file: Path, read: Callable[[str], Array], name: str, dtype: str) -> Array:
    known = INTEGERS if _is_whole(name) else FLOATS
    if dtype not in known:
        raise ValueError(
            f"{file}: tensor {name!r} holds {dtype}; it must hold one of {', '.join(known)}."
        )
    return _finite(str(file), name, read(name))


def _is_whole(name: str) -> bool:
    return name.endswith((TABLE, "router.table"))


def _finite(where: str, name: str, tensor: Any) -> Array:
    array = np.asarray(tensor)
    if _is_whole(name) and jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.asarray(array, jnp.int32)
    if not jnp.issubdtype(array.dtype, jnp.floating) or not np.isfinite(array).all():
        raise ValueError(f"{where}: tensor {name!r} must hold finite floating-point numbers.")
    return jnp.asarray(tensor if isinstance(tensor, Array) else array)
