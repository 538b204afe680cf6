"""Every public name is documented the same way, and no file grows past what one can read.

A function says its purpose in one line; what it takes, with shapes; and what it returns, unless
that is an object of a class of the package. It describes errors, cost and source where the
signature does not already tell them. A function with the arguments of another refers to it
("Arguments as `gated_delta_net`") and lists only those it adds.
A name that no room exports is plumbing, for which one line does.
"""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import toolkit

PACKAGE = Path(toolkit.__file__).parent
MOST_LINES = 400
# Rooms within rooms have public names of their own: `toolkit.attention.latent.mla`.
ROOMS = [
    "attention.latent",
    "attention.quantised",
    "attention.sparse",
    "language.evaluation",
    "parallel.collectives",
    "parallel.experts",
    "parallel.gradients",
    "parallel.latent",
    "parallel.pipeline",
    "schedules.collectives",
    "schedules.search",
    *toolkit._ROOMS,
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_notebooks" not in path.parts)
# What counts as an array's shape in a docstring: [batch, time], [B, T, H], [], `scalar`.
SHAPE = re.compile(r"\[[^\]\n]*\]|\bscalars?\b")
ARRAY = re.compile(r"\b(?:jax\.)?Array\b|\bjnp\.ndarray\b")
JAXTYPED = re.compile(r"\b(?:Float|Int|UInt|Bool|Num|Inexact|Integer|Shaped|Real|Key)\[")
AS_ANOTHER = re.compile(r"\bArguments(?:(?:, \w+)* and \w+)? as\s+`([\w.]+)`")
TEMPLATE = re.compile(r"^(Args|Returns|Raises|Cost):$", re.MULTILINE)


def exported(room):
    """The literal `__all__` of a room, read without importing it."""
    tree = ast.parse(PACKAGE.joinpath(*room.split("."), "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"toolkit.{room} has no __all__")


PUBLIC = [(room, name) for room in ROOMS for name in exported(room)]


def public(room, name):
    return getattr(importlib.import_module(f"toolkit.{room}"), name)


def is_function(value):
    """A jitted or wrapped function is one too; a colour map, which can be called, is data."""
    return inspect.isfunction(inspect.unwrap(value))


def section(docstring, header):
    """Text under a header of Google style, up to the next one; empty where there is none."""
    found = re.search(
        rf"^{header}:(.*?)(?=^[A-Z]\w+:(?:[ \t]|$)|\Z)", docstring, re.MULTILINE | re.DOTALL
    )
    return textwrap.dedent(found[1].strip("\n")).strip() if found else ""


def entries(arguments):
    """The entries of an Args section: what stands before the first colon -> the whole entry."""
    whole = re.split(r"\n(?=\S)", arguments)
    return {entry.partition(":")[0]: entry for entry in whole}


def faults_of(function):
    docstring = inspect.getdoc(function) or ""
    if not docstring:
        return ["has no docstring"]
    faults = []
    purpose = docstring.splitlines()[0].strip()
    if len(purpose) < 10 or purpose.endswith(":"):
        faults.append(f"opens with {purpose!r}: want its purpose in one line")
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    arguments = entries(section(docstring, "Args"))
    other = documented_by(function, docstring)
    shared = set(inspect.signature(other).parameters) if other else set()
    for parameter in parameters:
        # A step takes one token of each array, and the state where the whole form may begin.
        whole = {"state": "initial_state", "cache": "initial_state"}.get(parameter.name)
        if not {parameter.name, parameter.name.removesuffix("_t"), whole} & shared:
            faults += faults_of_parameter(parameter, arguments)
    if other:
        return faults
    returned = inspect.signature(function).return_annotation
    sections = section(docstring, "Returns") or section(docstring, "Yields")
    if not sections and returned not in (None, "None") and not describes_itself(returned):
        faults.append("has no section Returns:")
    return faults


def describes_itself(returned):
    """Whether a result is of a class of the package, whose docstring says what it holds."""
    return inspect.isclass(returned) and returned.__module__.split(".")[0] == "toolkit"


def documented_by(function, docstring):
    """The function whose arguments, and with them the other sections, this one refers to."""
    found = AS_ANOTHER.search(docstring)
    if not found:
        return None
    name = found[1].rpartition(".")[2]
    others = {name: value for room, name in PUBLIC if is_function(value := public(room, name))}
    assert name in others, f"{function.__name__} takes its arguments as {name}, which no room has"
    return inspect.unwrap(others[name])


def faults_of_parameter(parameter, arguments):
    name = parameter.name
    found = [entry for head, entry in arguments.items() if re.search(rf"\b{name}\b", head)]
    if not found:
        return [f"does not list {name} in Args:"]
    if parameter.annotation is parameter.empty:
        return []
    annotation = inspect.formatannotation(parameter.annotation)
    is_random_key = name.split("_")[-1] == "key" and "random key" in found[0]
    if name == "key" or is_random_key or re.search(r"\b(?:int|float)\b", annotation):
        return []  # a random key has no shape of interest; a number or an array is a scalar
    if ARRAY.search(annotation) and not JAXTYPED.search(annotation) and not SHAPE.search(found[0]):
        return [f"takes an array {name} without a shape in the signature or in Args:"]
    return []


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_names_are_documented(room, name):
    value = public(room, name)
    if inspect.isclass(value):
        # A dataclass without a docstring gets its signature for one; that tells no purpose.
        docstring = value.__doc__ or ""
        assert docstring, f"{name} has no docstring"
        assert not docstring.startswith(f"{name}("), f"{name} has no docstring"
    elif is_function(value):
        faults = faults_of(inspect.unwrap(value))
        assert not faults, f"toolkit.{room}.{name}: " + "; ".join(faults)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_open_with_a_map(room):
    module = importlib.import_module(f"toolkit.{room}")
    assert module.__doc__, f"toolkit.{room} has no docstring"
    names = exported(room)
    absent = [name for name in names if not re.search(rf"\b{name}\b", module.__doc__)]
    assert not absent, f"the map of toolkit.{room} leaves out {', '.join(absent)}"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines <= MOST_LINES, f"{lines} lines: want at most {MOST_LINES}, one idea a file"
    assert text.lstrip().startswith(('"""', 'r"""')), "opens without a docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_plumbing_has_a_line_or_two_of_doc(path):
    public_names = {name for _, name in PUBLIC}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    templates = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name not in public_names
        and path.parent.name != "cli"  # describes arguments to users
        and TEMPLATE.search(ast.get_docstring(node) or "")
    ]
    assert not templates, f"{', '.join(templates)}: exported by no room, so a line of doc will do"


def undocumented(values: "jax.Array", count):
    """Does a thing to values, badly documented.

    Args:
        values: some numbers.
    """


def documented(values: "jax.Array", count):
    """Does a thing to values, well documented.

    Args:
        values: some numbers [batch, time].
        count: how many.

    Returns:
        None.

    Cost:
        Nothing.
    """


def borrowing(q, extra):
    """Does what another does, with something more. Arguments as `softmax_attention`."""


def test_the_check_itself_sees_faults():
    assert faults_of(documented) == []
    assert faults_of(borrowing) == ["does not list extra in Args:"]
    faults = " ".join(faults_of(undocumented))
    for fault in ("array values without", "list count", "Returns:"):
        assert fault in faults
