"""Fill a layer with the weights of a published checkpoint, by the names of its tensors."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from toolkit.looped.checkpoint_names import STYLES


def load_layer(
    layer: Any, source: str | Path | Mapping[str, Any], *, style: str, prefix: str = ""
) -> Any:
    """Give a token-mixing layer the weights of a layer of a published model.

        parameter = rule(tensors)        for every rule of the style, in float32

    Every parameter is filled and every tensor under the prefix is used, or nothing is changed.
    What a checkpoint does not carry must be in the layer's configuration: head counts and sizes,
    `norm_epsilon`, `negative_eigenvalues`, `rope_theta`.

    Args:
        layer: a layer of `LAYERS`, or a model's `blocks[i].mixer`; changed in place. One made under
            `nnx.eval_shape`, without arrays, will do.
        source: a .safetensors file, a folder of them, or tensors by name, of any array type, with
            the shapes of the checkpoint.
        style: a key of `STYLES`: the architecture's name in Hugging Face transformers.
        prefix: what the names of the layer's tensors begin with, such as
            "model.layers.0.linear_attn.".

    Returns:
        The layer.

    Raises:
        ValueError: an unknown style or one for another layer, names that are missing or left
            over, or shapes that do not fit.
        FileNotFoundError: the source is a path with no .safetensors file.

    Cost:
        Reads the tensors under the prefix, no others.

    Source: Hugging Face transformers, the modelling file of each architecture.
    """
    tensors = _tensors(source, prefix)
    rules = _rules(layer, style)
    _check_names(tensors, {name for rule in rules for name in rule.theirs}, style, prefix)
    parameters = {".".join(map(str, path)) for path in _paths(layer)}
    filled = {path for rule in rules for path in rule.ours}
    if parameters != filled:
        raise ValueError(
            f"style {style!r} does not fill {_listed(parameters - filled)} of this layer; turn "
            "the option that adds it off."
            if parameters > filled
            else f"this layer lacks {_listed(filled - parameters)}, which style {style!r} fills."
        )
    arrays = {}
    for rule in rules:
        converted = rule.convert(layer, *(tensors[name] for name in rule.theirs))
        for path, array in zip(rule.ours, converted, strict=True):
            arrays[path] = array
            wanted = _parameter(layer, path).shape
            if array.shape != wanted:
                shapes = ", ".join(f"{name} {tensors[name].shape}" for name in rule.theirs)
                raise ValueError(
                    f"{shapes} make {path} of shape {array.shape}, and the layer has {wanted}; "
                    "its configuration is not that of the checkpoint."
                )
    for path, array in arrays.items():
        parameter = _parameter(layer, path)
        parameter.set_value(array.astype(parameter.dtype))
    return layer


def _rules(layer, style):
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(map(repr, STYLES))}; got {style!r}.")
    words, rules = STYLES[style]
    if layer.word not in words:
        raise ValueError(f"style {style!r} fills layers {_listed(words)}, not {layer.word!r}.")
    return rules


def _check_names(tensors, wanted, style, prefix):
    missing, unused = wanted - set(tensors), set(tensors) - wanted
    if not missing and not unused:
        return
    lines = [f"the tensors under {prefix!r} are not those of style {style!r}:"]
    lines += [f"missing {_listed(missing)}"] * bool(missing)
    lines += [f"unused {_listed(unused)}"] * bool(unused)
    raise ValueError(" ".join(lines))


def _listed(names: Iterable[str], most: int = 6) -> str:
    names = sorted(names)
    rest = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + rest)


def _paths(layer):
    return (path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param)))


def _parameter(layer, path: str) -> nnx.Param:
    return functools.reduce(getattr, path.split("."), layer)


def _tensors(source, prefix) -> dict[str, Array]:
    """The tensors under the prefix, which is taken off their names."""
    if isinstance(source, Mapping):
        named = {name: source[name] for name in source if name.startswith(prefix)}
        return {name[len(prefix) :]: jnp.asarray(np.asarray(t)) for name, t in named.items()}
    from safetensors import safe_open

    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{path} is no .safetensors file and holds none.")
    tensors = {}
    for file in files:
        with safe_open(file, framework="flax") as opened:
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors |= {name[len(prefix) :]: opened.get_tensor(name) for name in names}
    return tensors
