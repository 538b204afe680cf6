"""A model as one file: parameters as safetensors, the configuration as JSON in its header.

The file holds no optimiser state and no code. Tensors are named by the paths of the parameters,
such as "blocks.0.mixer.query.kernel".
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from toolkit._checks import check_choice, checked
from toolkit._compat import set_value
from toolkit._files import json_object, unfinished_beside
from toolkit.looped.checkpoints.tensors import StoredTensor, check_sizes, stored_tensors
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import RouterState
from toolkit.looped.model import LoopedLM

FORMAT = "toolkit looped model"
VERSION = "2"
STORAGE_DTYPES = ("float32", "float16", "bfloat16")


@checked
def save_model(model: LoopedLM, path: str | Path, *, dtype: str = "float32") -> None:
    """Write a model to one safetensors file.

    Args:
        model: any looped language model.
        path: the file; an older one is replaced atomically.
        dtype: how numbers are stored: "float32" keeps every bit, "float16" (11 bits of precision)
            and "bfloat16" (8 bits) take half the room.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> save_model(model, "small.safetensors", dtype="float16")
        >>> load_model("small.safetensors").config.width
        16
    """
    from safetensors.flax import save

    check_choice("dtype", dtype, STORAGE_DTYPES)
    arrays = {}
    for name, parameter in _parameters(model).items():
        is_whole = jnp.issubdtype(parameter.dtype, jnp.integer)  # a table's entries stay exact
        arrays[name] = parameter[...] if is_whole else parameter[...].astype(dtype)
        check_finite(name, arrays[name], dtype)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(dataclasses.asdict(model.config)),
    }
    unfinished = unfinished_beside(path)
    try:
        with unfinished.open("wb") as file:
            file.writelines(_in_order(save(arrays, metadata=header)))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@checked
def load_model(path: str | Path) -> LoopedLM:
    """Read a model written by `save_model`.

    Args:
        path: the file.

    Returns:
        The model, with float32 parameters.

    Raises:
        ValueError: when the file is damaged, is of another format or version, holds numbers that
            are not finite, or would not fit into this machine's memory.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> save_model(model, "small.safetensors")
        >>> load_model("small.safetensors").config == model.config
        True
    """
    header, tensors = _read(Path(path))
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a looped model: its header does not name format {FORMAT!r}."
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {header.get('version')}; this toolkit reads {VERSION}."
        )
    config = _config(path, header)
    check_sizes(config, tensors, str(path))
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    parameters = _parameters(model)
    if set(tensors) != set(parameters):
        odd = sorted(set(tensors) ^ set(parameters))[0]
        which = "lacks" if odd in parameters else "has the unknown"
        raise ValueError(f"{path} {which} tensor {odd!r}; it does not fit its configuration.")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{path} has {name} of shape {tensors[name].shape}; its configuration makes it "
                f"{parameter.shape}."
            )
        set_value(parameter, tensors[name].read().astype(parameter.dtype))
    return model


def check_finite(name: str, array: Array, dtype: str) -> None:
    """Refuse numbers that a dtype cannot hold."""
    if not bool(jnp.isfinite(array).all()):
        raise ValueError(f"dtype {dtype} cannot hold {name}: it has numbers out of range.")


def _read(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    from safetensors import safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; wanted one written by save_model.")
    tensors = stored_tensors([path])
    with safe_open(path, framework="flax") as opened:
        return opened.metadata() or {}, tensors


def _in_order(saved: bytes) -> Iterator[bytes | memoryview]:
    """The same file with a sorted header; safetensors leaves it in the order of a hash."""
    end = 8 + int.from_bytes(saved[:8], "little")
    header = json.dumps(json.loads(saved[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    yield memoryview(saved)[end:]


def _config(path: str | Path, header: Mapping[str, str]) -> LoopedConfig:
    try:
        fields = json_object(header.get("config", "null"), "it")
        known = {field.name for field in dataclasses.fields(LoopedConfig)}
        if unknown := sorted(set(fields) - known):
            listed = ", ".join(map(repr, unknown))
            raise ValueError(f"{listed}, which this version of the toolkit does not know")
        return LoopedConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{path} has a header whose config is wrong: {error}") from error


def _parameters(model: LoopedLM) -> dict[str, nnx.Variable]:
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, RouterState)))
    return {".".join(map(str, path)): parameter for path, parameter in flat}
