"""Options of training as files, tables and flags: each is a field of a dataclass, described there.

A file is TOML, or Python that defines `options`, a dictionary of the same form:

    steps = 2000
    optimizer = "muon"
    text = ["books/"]

    [looped]                          # fields of `LoopedConfig`
    pattern = "gdn gdn gdn full"
    window.sliding_window = 128       # options of a layer, by its word

The string "None" stands for no value, which TOML cannot write.
"""

import dataclasses
import difflib
import json
import runpy
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from docstring_parser import parse

from toolkit._kinds import alternatives
from toolkit.language.settings import TrainingSettings
from toolkit.looped import PRESETS, LoopedConfig
from toolkit.looped.config import layer_of
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS

MODEL_FLAGS = (
    "pattern",
    "feed_forwards",
    "loops",
    "width",
    "heads",
    "vocabulary",
    "dtype",
    "remat",
)
"""Fields of the model that have a flag of their own; the others are set by --set looped.NAME=..."""


def flags_of(owner: type, names: tuple[str, ...], defaults: Any) -> list[tuple[str, Any, Any]]:
    """Fields for `dataclasses.make_dataclass`: a flag per field of a dataclass, None if not given.

    The help is the field's line in the docstring of the class that declares it.
    """
    lines = {line.arg_name: line.description for kind in owner.__mro__[::-1] if kind.__doc__
             for line in parse(kind.__doc__).params}  # fmt: skip
    hints, fields = typing.get_type_hints(owner), []
    for name in names:
        default = getattr(defaults, name)
        words = " ".join((lines[name] or "").split())
        shown = " ".join(default) if isinstance(default, tuple) else default
        how: dict[str, Any] = {"help": words, "help_behavior_hint": f"(default: {shown})"}
        if hints[name] is bool:
            flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(**how)]
            fields.append((name, flag, False))
        else:
            how["metavar"] = _metavar(hints[name])
            fields.append((name, Annotated[hints[name] | None, tyro.conf.arg(**how)], None))
    return fields


def _metavar(hint: Any) -> str:
    """What stands behind a flag in its help, such as FLOAT|search."""
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    names = [
        "|".join(map(str, typing.get_args(kind)))
        if typing.get_origin(kind) is typing.Literal
        else getattr(typing.get_origin(kind) or kind, "__name__", "value").upper()
        for kind in kinds
    ]
    words = "|".join(names)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            own = typing.get_args(kind)[0].__name__.upper()
            words = words.replace("TUPLE", f"{own} [{own} ...]")
    return words


def read_options(file: Path | None) -> dict[str, Any]:
    """The options of a file; none without one."""
    if file is None:
        return {}
    if file.suffix == ".py":
        found = runpy.run_path(str(file)).get("options")
        if not isinstance(found, dict):
            raise ValueError(f"config: {str(file)!r} defines no dictionary named options")
        return found
    try:
        return tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config: {str(file)!r} is no TOML ({error})") from None


def parsed_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """--set looped.loops=2 as {"looped": {"loops": 2}}; what is no number, list or truth is a
    string."""
    found: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not all(path.split(".")):
            raise ValueError(f"set: got {setting!r}, wanted NAME=VALUE, such as looped.loops=2")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *outer, name = path.split(".")
        table = found
        for word in outer:
            table = table.setdefault(word, {})
        table[name] = value
    return found


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables, the new values over the old ones."""
    result = dict(old)
    for name, value in new.items():
        is_table = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if is_table else value
    return result


def model_of(table: Mapping[str, Any], preset: str | None) -> LoopedConfig:
    """The model of the table `looped`, from a preset or from `LoopedConfig.tiny`."""
    values = _without_none(table)
    options = dict(values.pop("options", {}))
    for word in [word for word in values if word in LAYERS or word in FEED_FORWARDS]:
        options = merged(options, {word: values.pop(word)})
    known = [field.name for field in dataclasses.fields(LoopedConfig)]
    _check_names("looped.", values, [*known, *LAYERS, *FEED_FORWARDS])
    for word, given in options.items():
        if word in LAYERS or word in FEED_FORWARDS:
            names = [field.name for field in dataclasses.fields(layer_of(word).Options)]
            _check_names(f"looped.{word}.", given, names)
    if preset is None:
        return LoopedConfig.tiny(**values, options=options)
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=3, cutoff=0.3)
        raise ValueError(f"preset: got {preset!r}, wanted one such as {', '.join(near)}")
    return dataclasses.replace(PRESETS[preset], **values).with_options(**options)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `TrainingSettings` in the outermost table, without other names."""
    known = [field.name for field in dataclasses.fields(TrainingSettings)]
    _check_names("", values, [*known, "text", "cores", "looped", "preset"])
    return {name: value for name, value in _without_none(values).items() if name in known}


def as_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A nested table as TOML."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"[{name}]"] * bool(name)
    for key, value in table.items():
        if key not in inner:
            lines.append(f"{key} = {json.dumps('None' if value is None else value)}")
    text = "\n".join(lines) + "\n"
    for key, value in inner.items():
        if value:
            text += "\n" + as_toml(value, f"{name}.{key}" if name else key)
    return text


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value)
        if isinstance(value, Mapping)
        else (None if value == "None" else value)
        for name, value in table.items()
    }


def _check_names(prefix: str, given: Mapping[str, Any], known: list[str]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{prefix[:-1]}: got {given!r}, wanted a table of options")
    # A file may have an option of the model at its top, or one of training in the model's table.
    other, table = ("", TrainingSettings) if prefix == "looped." else ("looped.", LoopedConfig)
    elsewhere = [field.name for field in dataclasses.fields(table)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
            near = [other + name] if name in elsewhere else [prefix + word for word in near]
            raise ValueError(
                f"{prefix}{name}: there is no such option; wanted one such as {', '.join(near)}"
            )
