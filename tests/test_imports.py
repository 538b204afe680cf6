"""Imports go down only, in no circle, and `import toolkit` costs `import jax` and nothing else."""

import ast
import functools
import itertools
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from floors import FLOORS

import toolkit

PACKAGE = Path(toolkit.__file__).parent
MOST_LINES = 350  # of one file
MOST_MODULES = 15  # in one folder, its map (`__init__.py`) aside
NOT_AT_IMPORT = ("matplotlib", "ipywidgets", "orbax", "scipy", "flax", "optax", "torch")
# `import toolkit` may take this much of the time of `import jax`.
IMPORT_TIME_RATIO = 1.1
ROUNDS = 3


def files():
    return sorted(path for path in PACKAGE.rglob("*.py") if "_notebooks" not in path.parts)


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_modules(path):
    """Names of toolkit's modules that a file imports anywhere: in functions, for types, by name.

    A string that names one, such as the argument of `import_module`, counts as an import. One that
    follows "-m" in a list is a command, which another process runs as a user would.
    """
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    return set(imported_by(ast.parse(path.read_text(encoding="utf-8")), package))


def imported_by(tree, package):
    nodes = list(ast.walk(tree))
    commands = {
        id(after)
        for node in nodes
        if isinstance(node, ast.List | ast.Tuple)
        for before, after in itertools.pairwise(node.elts)
        if isinstance(before, ast.Constant) and before.value == "-m"
    }
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from toolkit import measure` imports a room, `from toolkit.measure import x` a name.
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.JoinedStr):  # f"toolkit.attention.{name}": any module in it
            start = node.values[0]
            folder = start.value if isinstance(start, ast.Constant) else ""
            if folder.endswith("."):
                names = [name for name in MODULES if name.rpartition(".")[0] == folder[:-1]]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # "module:function" for `pkgutil.resolve_name`
            names = [name] if name in MODULES and id(node) not in commands else []
        yield from (name for name in names if name.split(".")[0] == "toolkit")


MODULES = {module_name(path) for path in files()}


def room_of(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def test_every_room_has_its_floor():
    here = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert here <= set(FLOORS)
    assert set(toolkit._ROOMS) <= set(FLOORS)


def test_imports_go_down_only():
    wrong = [
        f"{path.relative_to(PACKAGE.parent)} imports {name}"
        for path in files()
        for name in imported_modules(path)
        if (room := room_of(module_name(path))) is not None
        and (other := room_of(name)) is not None
        and other != room
        and other not in FLOORS[room]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import toolkit.lab.sliders",
        "def f():\n    from toolkit.lab import sliders",
        "from ..lab import sliders",
        "import_module('toolkit.lab.sliders')",
        "__import__('toolkit.lab.sliders')",
        "resolve_name('toolkit.lab.sliders:cases')",
        "HOMES = {'panel': 'toolkit.lab.sliders'}",
        "import_module(f'toolkit.lab.{name}')",
    ],
)
def test_an_import_is_seen_however_it_is_written(source):
    assert "toolkit.lab.sliders" in set(imported_by(ast.parse(source), ["toolkit", "bench"]))


def test_commands_and_sentences_are_no_imports():
    source = "run(['python', '-m', 'toolkit.lab.sliders'])\n'toolkit.lab.sliders draws'"
    assert not set(imported_by(ast.parse(source), ["toolkit", "bench"]))


def test_floors_are_in_no_circle():
    placed = set()
    while len(placed) < len(FLOORS):
        next_up = {room for room, below in FLOORS.items() if room not in placed and below <= placed}
        assert next_up, f"a circle among {set(FLOORS) - placed}"
        placed |= next_up


def test_no_folder_is_a_drawer():
    folders = Counter(path.parent for path in files() if path.name != "__init__.py")
    full = {str(folder): count for folder, count in folders.items() if count > MOST_MODULES}
    assert not full, full


def test_tests_lie_as_the_rooms_lie():
    tests = Path(__file__).parent
    elsewhere = {"support", "notebooks", "browser", "fuzz", "docs"}
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.parent.relative_to(tests)
        if folder.parts and folder.parts[0] not in elsewhere:
            assert (PACKAGE / folder).is_dir(), f"{path.relative_to(tests)} lies in no room"


def test_panels_need_no_widget_library():
    """What a panel computes and draws needs none; only showing it on a page does."""
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    panels = [
        module_name(path)
        for path, text in texts.items()
        if "(Panel):" in text and "kit.curve_control" not in text and path.parent.name != "kit"
    ]
    assert len(panels) >= 20
    blocked = "import sys\nsys.modules.update(ipywidgets=None, anywidget=None)\n"
    made = "\nfrom toolkit.lab import BalancePanel\nassert BalancePanel(step=9).png"
    run_python(blocked + "\n".join(f"import {name}" for name in panels) + made)


def test_no_file_is_too_long():
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in files()}
    long = {str(path.relative_to(PACKAGE)): n for path, n in lengths.items() if n > MOST_LINES}
    assert not long


def test_files_import_each_other_in_no_circle():
    graph = {
        module_name(path): {
            name for name in imported_modules(path) if name in MODULES and name != "toolkit"
        }
        - {module_name(path), module_name(path).rpartition(".")[0]}
        for path in files()
    }
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def roots_loaded_by(module):
    listing = f"import sys, {module}\nprint(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    return set(run_python(listing).split())


def test_import_loads_jax_and_nothing_else():
    extra = roots_loaded_by("toolkit") - roots_loaded_by("jax")
    assert not extra & set(NOT_AT_IMPORT)
    assert extra == {"toolkit"}


def processor_seconds_of_children():
    """Unlike the clock on the wall, not stretched by whatever else runs on the machine."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.slow
def test_import_takes_as_long_as_jax():
    seconds = {"jax": [], "toolkit": []}
    for module in seconds:
        run_python(f"import {module}")  # warms the file cache
    for _ in range(ROUNDS):
        for module, samples in seconds.items():
            start = processor_seconds_of_children()
            run_python(f"import {module}")
            samples.append(processor_seconds_of_children() - start)
    ratio = statistics.median(seconds["toolkit"]) / statistics.median(seconds["jax"])
    assert ratio <= IMPORT_TIME_RATIO, f"import toolkit takes {ratio:.2f} times import jax"
