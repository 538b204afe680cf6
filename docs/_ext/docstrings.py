"""Docstrings as reStructuredText: the template that CONTRIBUTING.md states and a test asserts.

Purpose and equation first, then `Args:`, `Returns:`, `Raises:`, `Cost:`, `Source:`, `Example:`.
Indented text in between is an equation and stays as it is; a public name in backticks is a link.
"""

import inspect
import pkgutil
import re
import textwrap

from sphinx.util import logging

import toolkit

LISTS = {"Args": "Parameters", "Attributes": "Attributes", "Raises": "Raises"}
FIELDS = ("Returns", "Yields", "Cost", "Source")
SECTION = re.compile(rf"^({'|'.join((*LISTS, *FIELDS, 'Example'))}):[ \t]*", re.MULTILINE)
MARKED = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
SPECIAL = re.compile(r"(?<!^)(?<!\n)[*|]|[*|](?! )|\\|_(?!\w)")
SHORTER = (
    (re.compile(r"\b(?:jaxlib\._jax|jax\._src(?:\.\w+)*|jaxtyping|t)\.(?=[A-Z])"), ""),
    (re.compile(r"Array \| ndarray \| bool \| number(?: \| \w+)* \| complex"), "ArrayLike"),
    (re.compile(r"Callable\[\[ArrayLike\], ArrayLike\]"), "Schedule"),
    (re.compile(r"^\(\*args: Any, \*\*kwargs: Any\)$"), ""),  # traitlets' own
)
DOTTED = re.compile(r"toolkit\.(\w+)((?:\.\w+)*)")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


logger = logging.getLogger(__name__)


def public_names():
    """Public name -> the rooms that export it."""
    rooms = {}
    for room in toolkit._ROOMS:
        for name in getattr(toolkit, room).__all__:
            rooms.setdefault(name, []).append(room)
    return rooms


class Writer:
    """Turns docstrings of one object into reStructuredText."""

    names = public_names()

    def __init__(self, full_name):
        self.room = full_name.split(".")[1]

    def rewrite(self, docstring):
        head, *rest = SECTION.split(docstring)
        parts = [self.prose(head)]
        for title, body in zip(rest[::2], rest[1::2], strict=True):
            parts.append(self.section(title, inspect.cleandoc(body)))
        return "\n\n".join(parts)

    def section(self, title, body):
        if title == "Example":
            return f".. rubric:: Example\n\n{body}"
        if title in LISTS:
            # An entry is `name: text`, its further lines indented.
            entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", body.strip())]
            body = "\n".join(
                f"* **{self.inline(name)}** – "
                + textwrap.indent(self.prose(inspect.cleandoc(text)), "  ").strip()
                for name, _, text in entries
            )
            return f":{LISTS[title]}:\n{textwrap.indent(body, '    ')}"
        return f":{title}:\n{textwrap.indent(self.prose(body), '    ')}"

    def prose(self, text):
        """Paragraphs and lists as they are, indented paragraphs as literal blocks."""
        blocks = []
        for block in re.split(r"\n\s*\n", text.strip("\n")):
            if block.startswith("    "):
                blocks.append(f".. code-block:: text\n\n{block}")
            else:
                blocks.append(self.inline(block))
        return "\n\n".join(blocks)

    def inline(self, text):
        pieces = MARKED.split(text)
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                piece = SPECIAL.sub(r"\\\g<0>", piece)
                pieces[index] = ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", piece)
            elif not piece.startswith("``"):
                pieces[index] = self.code(piece.strip("`"))
        return "".join(pieces)

    def code(self, name):
        path = DOTTED.fullmatch(name)
        if path and not exists(name):
            logger.warning("%s is named in toolkit.%s and is not there", name, self.room)
        room, short = (path[1], path[2].lstrip(".")) if path else (self.room, name)
        rooms = self.names.get(short, [])
        if not rooms or (path and room not in rooms):
            return f"``{name}``"
        return f":py:obj:`{name} <toolkit.{room if room in rooms else rooms[0]}.{short}>`"


def exists(name):
    """Whether a dotted name is a module or something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def rewrite(app, what, name, value, options, lines):
    lines[:] = Writer(name).rewrite("\n".join(lines)).splitlines()


def shorten(app, what, name, value, options, signature, returned):
    """Types by the names that one imports them by: `Array`, not `jaxlib._jax.Array`."""
    texts = [signature, returned]
    for pattern, shorter in SHORTER:
        texts = [text and pattern.sub(shorter, text) for text in texts]
    return tuple(texts)


def link_to_room(app, env, node, content):
    """A class is documented in its room, and signatures name the file it is defined in."""
    name = node.get("reftarget", "").rpartition(".")[2]
    rooms = Writer.names.get(name)
    if node.get("refdomain") != "py" or not rooms:
        return content if node.get("reftarget", "").startswith("toolkit.") else None
    here = node.get("py:module", "").rpartition(".")[2]
    node["reftarget"] = f"toolkit.{here if here in rooms else rooms[0]}.{name}"
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, "obj", node["reftarget"], node, content
    )


def setup(app):
    app.connect("autodoc-process-signature", shorten)
    app.connect("missing-reference", link_to_room)
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}
