"""One page a room: what the room's map says, group by group, then every name in the map's order."""

import inspect
import re
from collections import defaultdict

from docstrings import Writer

import toolkit


def room_page(module):
    """The page of a room, as reStructuredText."""
    purpose, *lines = module.__doc__.splitlines()
    groups = defaultdict(list)
    for name in sorted(module.__all__, key=lambda name: place(name, lines, module.__all__)):
        groups[heading_above(place(name, lines, module.__all__)[0], lines)].append(name)
    purpose = Writer(module.__name__).inline(purpose)
    parts = [*heading(module.__name__, "="), purpose, "", f".. py:module:: {module.__name__}", ""]
    for title, names in groups.items():
        parts += heading(title, "-") if title else []
        shown = [name for name in names if not is_data(getattr(module, name))]
        parts += [".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in shown), ""]
        for name in names:
            parts += [*directive(module.__name__, name, getattr(module, name), lines), ""]
    return "\n".join(parts)


def is_data(value):
    return not isinstance(value, type) and not inspect.isfunction(inspect.unwrap(value))


def heading(title, line):
    return [title, line * len(title), ""]


def place(name, lines, names):
    """Where the map has a name: a method's reference and step stand with the method."""
    found = re.fullmatch(r"(\w+?)(_reference|_step)", name)
    method, suffix = found.groups() if found and found[1] in names else (name, "")
    places = [i for i, line in enumerate(lines) if re.search(rf"\b{method}\b", line)]
    # An entry is "* `name`, `other`: text" or "name, other   text"; titles mention names, too.
    entry = re.compile(rf"\* .*`{method}`| *(\w+, )*{method}(,|  )")
    entries = [i for i in places if entry.match(lines[i])]
    return (entries or places)[0], method, ("", "_reference", "_step").index(suffix)


def heading_above(position, lines):
    """The title of a name's group: the nearest line above that is capitalised after a blank one."""
    for line, before in reversed([*zip(lines[1:position], lines[:position], strict=False)]):
        if re.match(r"[A-Z](?!.*\w   ?\w)", line) and not before.strip():
            return re.sub(r"[,;]? *\(.*|,.*|:$", "", line).strip()
    return ""


def home(name, value):
    """The room that documents a name which several rooms export: the one that defines it.

    None for a name that only a room within a room exports.
    """
    rooms = [
        room for room in toolkit._ROOMS if getattr(getattr(toolkit, room), name, None) is value
    ]
    defining = [room for room in rooms if f"toolkit.{room}." in f"{value.__module__}."]
    return f"toolkit.{(defining or rooms)[-1]}" if rooms else None


def directive(room, name, value, lines):
    if not is_data(value) and (other := home(name, value)) not in (room, None):
        kind = "class" if isinstance(value, type) else "function"
        return [f".. py:{kind}:: {name}", "", f"   The same as :py:obj:`{other}.{name}`."]
    if isinstance(value, type):
        return [f".. autoclass:: {name}", "   :members:"]
    if not is_data(value):
        return [f".. autofunction:: {name}"]
    # Data has no docstring: the map says what it is.
    entry = next(line for line in lines if re.search(rf"\b{name}\b", line))
    text = re.sub(r"^[* ]*(`?\w+`?,? ?)+(:|  )\s*", "", entry)
    text = Writer(room).inline(text)
    if inspect.ismodule(value):  # a room within the room has a page of its own
        return [f":py:mod:`{value.__name__}`: {text}"]
    return [f".. py:data:: {name}", "", f"   {text}"]
