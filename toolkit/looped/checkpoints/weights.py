"""Fill a layer with the weights of a published checkpoint, by the names of its tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from toolkit._checks import check_choice, checked
from toolkit._compat import set_value
from toolkit.looped.checkpoints.names import STYLES
from toolkit.looped.checkpoints.rules import WeightRule
from toolkit.looped.checkpoints.softmax_names import FLEXIBLE
from toolkit.looped.checkpoints.tensors import StoredTensor, files_of, given_tensors, stored_tensors
from toolkit.looped.feed_forward import RouterState


@checked
def load_layer(
    layer: Any, source: str | Path | Mapping[str, Any], *, style: str, prefix: str = ""
) -> Any:
    """Fill a token-mixing layer with the weights of a layer of a published model.

        parameter = rule(tensors)        for every rule of the style, in float32

    Every parameter is filled and every tensor under the prefix is used, or nothing is changed. The
    layer's configuration must provide what a checkpoint lacks: head counts and sizes,
    `norm_epsilon`, `negative_eigenvalues`, `rope_theta`.

    Args:
        layer: a layer of `LAYERS`, or a model's `blocks[i].mixer`; changed in place. It may be
            abstract, made under `nnx.eval_shape`.
        source: a .safetensors file, a folder of them, or tensors by name, of any array type, with
            the shapes of the checkpoint.
        style: a key of `STYLES`: the architecture's name in Hugging Face transformers.
        prefix: prefix of the names of the layer's tensors, such as "model.layers.0.linear_attn.".

    Returns:
        The layer.

    Source: Hugging Face transformers, the modelling file of each architecture.

    Example:
        >>> from flax import nnx
        >>> layer = LAYERS["full"](LoopedConfig(width=8, heads=2), rngs=nnx.Rngs(0))
        >>> tensors = {f"{name}_proj.weight": jnp.eye(8) for name in "qkvo"}
        >>> bool((load_layer(layer, tensors, style="llama").query.kernel[...] == jnp.eye(8)).all())
        True
    """
    tensors, rules = open_tensors(source), _rules(layer, style)
    there = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    wanted = {name for rule in rules for name in rule.theirs}
    check_names(there, wanted, f"the tensors under {prefix!r} are not those of style {style!r}")
    parameters, filled = parameter_paths(layer), {path for rule in rules for path in rule.ours}
    if parameters != filled:
        raise ValueError(
            f"style {style!r} does not fill {listed(parameters - filled)} of this layer; turn "
            "the option that adds it off."
            if parameters > filled
            else f"this layer lacks {listed(filled - parameters)}, which style {style!r} fills."
        )
    arrays = [pair for rule in rules for pair in convert(layer, rule, tensors, prefix)]
    for parameter, array in arrays:
        set_value(parameter, array)
    return layer


def _rules(layer, style):
    check_choice("style", style, STYLES)
    rules = STYLES[style]
    if layer.word not in rules:
        raise ValueError(f"style {style!r} fills layers {listed(rules)}, not {layer.word!r}.")
    return [
        rule
        for rule in rules[layer.word]
        if style not in (*FLEXIBLE, "lfm2", "rwkv7")
        or all(part_of(layer, path) is not None for path in rule.ours)
    ]


def open_tensors(source: str | Path | Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name."""
    if isinstance(source, Mapping):
        return given_tensors(source)
    if not (files := files_of(Path(source))):
        raise FileNotFoundError(f"{source} is not a .safetensors file and contains none.")
    return stored_tensors(files)


def convert(
    layer: Any, rule: WeightRule, tensors: Mapping[str, StoredTensor], prefix: str
) -> list[tuple[nnx.Variable, Array]]:
    """The parameters that a rule fills, and their new values."""
    if rule.is_stacked:
        return [_stacked(layer, rule, tensors, prefix)]
    theirs = {prefix + name: tensors[prefix + name].read() for name in rule.theirs}
    ours = {path: part_of(layer, path) for path in rule.ours}
    try:
        arrays = list(rule.convert(layer, *theirs.values()))
    except (TypeError, ValueError):  # heads that cannot be told apart
        arrays = []
    if [array.shape for array in arrays] != [parameter.shape for parameter in ours.values()]:
        shapes = [
            ", ".join(f"{name} {a.shape}" for name, a in part.items()) for part in (theirs, ours)
        ]
        raise ValueError(
            f"{shapes[0]} cannot make {shapes[1]}; the configuration is not that of the checkpoint."
        )
    return [(p, array.astype(p.dtype)) for p, array in zip(ours.values(), arrays, strict=True)]


def _stacked(layer, rule, tensors, prefix) -> tuple[nnx.Variable, Array]:
    """One tensor after the other, so that beside the parameter one is in memory."""
    parameter = part_of(layer, rule.ours[0])
    whole = np.empty(parameter.shape, parameter.dtype)
    for index, name in enumerate(rule.theirs):
        tensor = tensors[prefix + name].read()
        (part,) = rule.convert(layer, tensor)
        if part.shape != whole.shape[1:]:
            raise ValueError(
                f"{prefix + name} {tensor.shape} cannot make one of {rule.ours[0]} {whole.shape}; "
                "the configuration is not that of the checkpoint."
            )
        whole[index] = part
    return parameter, jnp.asarray(whole)


def check_names(there: Iterable[str], wanted: Iterable[str], problem: str) -> None:
    """Refuse a checkpoint without some of the tensors, or with others."""
    missing, unused = set(wanted) - set(there), set(there) - set(wanted)
    parts = [f"{word} {listed(n)}" for word, n in (("missing", missing), ("unused", unused)) if n]
    if parts:
        raise ValueError(f"{problem}: {' '.join(parts)}")


def listed(names: Iterable[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    names = sorted(names)
    rest = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + rest)


def parameter_paths(module: Any) -> set[str]:
    """The paths of a module's parameters, such as "output.kernel"."""
    state = nnx.to_flat_state(nnx.state(module, (nnx.Param, RouterState)))
    return {".".join(map(str, path)) for path, _ in state}


def part_of(module: Any, path: str) -> Any:
    """The module or parameter at a path such as "blocks.0.mixer"; None beyond an absent one."""
    for name in path.split(".") if path else ():
        if module is None:
            return None
        module = module[int(name)] if name.isdecimal() else getattr(module, name)
    return module
