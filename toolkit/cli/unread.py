"""Options that a command would not read in the way it was called are refused, not ignored."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def refuse_unread(
    command: Callable[..., Any], given: Mapping[str, Any], mode: str, read: Collection[str]
) -> None:
    """Refuse options beside `mode` that are not their defaults and that it does not read."""
    unread = {name: value for name, value in given.items() if name not in {mode, *read}}
    refuse_changed(command, unread, f"with {_flag(mode)}, which does not read it")


def refuse_changed(command: Callable[..., Any], given: Mapping[str, Any], why: str) -> None:
    """Refuse options that are not their defaults."""
    for name, parameter in inspect.signature(command).parameters.items():
        if name in given and given[name] != parameter.default:
            raise ValueError(f"{name}: got {_flag(name)} {given[name]} {why}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
