"""Read a whole published model: its configuration and every weight."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from toolkit._checks import checked
from toolkit._compat import set_value
from toolkit._kinds import shown
from toolkit.looped.checkpoints.families import FAMILIES, NOT_READ
from toolkit.looped.checkpoints.hub import checkpoint_folder
from toolkit.looped.checkpoints.mixtures import check_format
from toolkit.looped.checkpoints.models import Part, parts
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.tensors import check_sizes, read_json
from toolkit.looped.checkpoints.weights import (
    check_names,
    convert,
    listed,
    open_tensors,
    parameter_paths,
    part_of,
)
from toolkit.looped.config import LoopedConfig
from toolkit.looped.model import LoopedLM

UNREAD = re.compile(
    r"rotary_emb\.inv_freq$|^freqs_cis$|^mtp\.|^(model\.)?(visual|vision_tower)\.|\.slope_rate$"
    r"|\.(query|key|diagonal)_decay$"
)
"""Tensors that are skipped: tables that the model computes, heads for multi-token prediction, and
the vision tower of a multimodal model."""


@checked
def load_checkpoint(
    source: str | Path | Mapping[str, Any], *, style: str | None = None, **fields: Any
) -> LoopedLM:
    """Build a language model from a published checkpoint.

        config = LoopedConfig(config.json, then `fields`);   parameters = rules(tensors), in float32

    Every parameter is filled and every tensor is used. A model that is not looped runs once; a
    looped one runs as often as in training, or `loops` times.

    Args:
        source: a folder of .safetensors files with a config.json, or one such file beside its
            config.json, or "owner/name" on the Hugging Face Hub (see `checkpoint_folder`), or
            tensors by name.
        style: the `model_type` of the checkpoint, a key of `FAMILIES`; None takes it from
            config.json.
        **fields: fields of `LoopedConfig` that override config.json, e.g. dtype="bfloat16" or
            loops=8. Without a config.json they must include all sizes.

    Returns:
        The model, with the configuration that was found as its `config`.

    Raises:
        ValueError: for a setting that `LoopedConfig` has no field for, and for tensors that are
            missing, left over or of another shape.

    Cost: one read of every tensor; 4 bytes of memory per parameter and the tensors of one rule.

    Source: Hugging Face transformers, the modelling file of each architecture; for "ouro" the
        modelling file that is published with ByteDance's Ouro checkpoints, for "huginn_raven" the
        one that its authors publish.

    Example:
        >>> model = load_checkpoint("Qwen3-0.6B", dtype="bfloat16")  # doctest: +SKIP
        >>> from toolkit.looped.checkpoints.families import FAMILIES
        >>> "qwen3" in FAMILIES
        True
    """
    if not isinstance(source, Mapping):
        source = checkpoint_folder(source)
    tensors = {name: t for name, t in open_tensors(source).items() if not UNREAD.search(name)}
    settings = _settings(source)
    style = style or settings.get("model_type")
    if style is None and settings.get("_class_name") == "ParcaeConfig":
        style = "parcae"
    family = _family(style)
    check_format(tensors, settings)
    experts = [name for name in tensors if ".experts." in name or name.endswith(".mlp.gate.weight")]
    if experts and family.router is None:
        with_experts = [name for name, other in FAMILIES.items() if other.router is not None]
        raise ValueError(
            f"the checkpoint is a mixture of experts ({listed(experts, 2)}), and models of style "
            f"{style!r} are not; those of {', '.join(with_experts)} are."
        )
    values = fields_of(family, settings, len(tensors))
    tensors = family.opened(settings, _without_guesses(tensors, settings))
    for pattern, factor in ({} if family.factors is None else family.factors(settings)).items():
        for name in [name for name in tensors if re.search(pattern, name)]:
            tensors[name] = tensors[name].times(factor)
    heads = ("lm_head.weight", "embed_out.weight", "head.weight")
    values: dict[str, Any] = {"tied_embedding": tensors.keys().isdisjoint(heads), **values}
    options = fields.pop("options", {})
    try:
        config = LoopedConfig(**(values | fields)).with_options(**options)
    except ValueError as error:
        raise ValueError(f"{_named(source)}: {error}") from error
    check_sizes(config, tensors, _named(source))
    endings = ("embed_tokens.weight", "embed_in.weight")
    found = [(name, name.removesuffix(e)) for e in endings for name in tensors if name.endswith(e)]
    prefix = found[0][1] if found else family.prefix
    if config.tied_embedding:
        for name in heads:
            head = tensors.pop(name, None)  # a second copy of the embedding
            if head is not None and found and "tied_embedding" not in fields:
                _check_copy(name, head, found[0][0], tensors[found[0][0]])
    return _filled(config, parts(family, config, prefix, tensors), tensors, style)


def configuration_of(source: str | Path | Mapping[str, Any]) -> LoopedConfig:
    """The configuration that a config.json describes, given as a file, its folder or its settings;
    no weights are read."""
    given = _of_language(dict(source), "settings") if isinstance(source, Mapping) else None
    settings = _settings(source) if given is None else given
    if not settings:
        raise ValueError(f"{source}: there is no config.json")
    values = fields_of(_family(settings.get("model_type")), settings)
    try:
        return LoopedConfig(**values)
    except ValueError as error:
        name = "settings" if given is not None else source
        raise ValueError(f"{name}: {error}") from error


def _family(style: Any) -> Any:
    if (why := NOT_READ.get(str(style))) is not None:
        raise ValueError(f"models of style {style!r} are not read: {why}.")
    if style not in list(FAMILIES):
        raise ValueError(f"style must be one of {', '.join(map(repr, FAMILIES))}; got {style!r}.")
    return FAMILIES[style]


def _filled(config: LoopedConfig, places: list[Part], tensors, style) -> LoopedLM:
    names = [place.prefix + name for place in places for r in place.rules for name in r.theirs]
    check_names(tensors, names, f"the checkpoint is not of style {style!r} with these sizes")
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    filled = {
        f"{place.module}.{path}".removeprefix(".")
        for place in places
        for rule in place.rules
        for path in rule.ours
    }
    if filled != parameter_paths(model):
        raise ValueError(
            f"style {style!r} does not fill {listed(parameter_paths(model) ^ filled)}; turn the "
            "options that add them off."
        )
    for place in places:
        module = part_of(model, place.module)
        for rule in place.rules:
            for parameter, array in convert(module, rule, tensors, place.prefix):
                # Blocks, because the tensors of many rules would otherwise pile up in memory.
                set_value(parameter, jax.block_until_ready(array))
    return model


def _check_copy(name: str, head: Any, embedding: str, table: Any) -> None:
    """Refuse a tied head whose tensor is another than the embedding's."""
    if head.shape != table.shape or not (np.asarray(head.read()) == np.asarray(table.read())).all():
        raise ValueError(
            f"config.json ties the head to {embedding}, and {name} has other numbers; choose by "
            "tied_embedding=True (the embedding) or False (a head of its own)."
        )


def _without_guesses(tensors, settings):
    """Without the layers past the last, which guess further tokens."""
    last = settings.get("num_hidden_layers", 0)
    guessing = range(last, last + (settings.get("num_nextn_predict_layers") or 0))
    layer = re.compile(r"(?:^|\.)layers\.(\d+)\.")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (found := layer.search(name)) or int(found[1]) not in guessing
    }


def _settings(source) -> dict[str, Any]:
    """The language model's settings in config.json; empty without such a file."""
    if isinstance(source, Mapping):
        return {}
    path = Path(source)
    file = (path if path.is_dir() else path.parent) / "config.json"
    return _of_language(read_json(file) if file.exists() else {}, str(file))


def _of_language(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of the part that models language."""
    inner = settings.get("text_config", {})
    if not isinstance(inner, dict):
        raise ValueError(f"{name}: text_config must be an object; got {shown(inner)}.")
    if not inner:
        return settings
    shared = ("model_type", "tie_word_embeddings", "quantization_config")
    return {name: settings[name] for name in shared if name in settings} | inner


def _named(source) -> str:
    return "the checkpoint" if isinstance(source, Mapping) else str(source)
