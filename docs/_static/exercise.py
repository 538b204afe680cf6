"""Runs in the browser, under Pyodide: the judges of lessons, for exercises in plain Python.

A judge is imported from the package as it is. What the package imports beside it and Python's own
library (jax, numpy, matplotlib) is not there; a stand-in takes its place while modules are loaded,
and refuses to be used afterwards, so that no check passes for want of a library.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

PRESENT = {*sys.stdlib_module_names, "toolkit"}


class Absent(RuntimeError):
    """A library is asked for something that only Python with that library can do."""


class StandIn(types.ModuleType):
    """Anything of a library that is absent; it can be named and decorated with, no more."""

    is_loading = True

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version_info__":
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        if not StandIn.is_loading:
            raise Absent(f"{self.__name__} is not in the browser; use plain Python")
        is_class = len(args) == 1 and isinstance(args[0], type)
        return args[0] if is_class else StandIn(self.__name__)

    def __mro_entries__(self, bases):
        return ()

    def __iter__(self):
        return iter(())


def _other(self, other):  # a union of types without the absent one
    return other


def _as_call(self, *args):
    return self()


for _name in (
    "getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow",
    "neg", "lt", "gt", "le", "ge", "enter", "exit", "bool", "float", "len",
):  # fmt: skip
    setattr(StandIn, f"__{_name}__", _as_call)
StandIn.__setitem__ = lambda self, key, value: None
StandIn.__or__ = StandIn.__ror__ = _other
StandIn.__instancecheck__ = lambda self, value: False
StandIn.__bool__ = lambda self: StandIn.is_loading or bool(self())
StandIn.__float__ = StandIn.__index__ = StandIn.__len__ = lambda self: StandIn.is_loading or self()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every library that is absent."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in PRESENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def load(lesson):
    """The outline of a lesson, with stand-ins for what is absent."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    StandIn.is_loading = True
    try:
        catalogue = importlib.import_module("toolkit.lab.lessons.catalogue")
        return catalogue.load_outline(lesson)
    finally:
        StandIn.is_loading = False


def check(lesson, exercise, source):
    """(whether it is right, the words) for a learner's source, as `Lesson.check` has them."""
    judged = load(lesson).exercise(exercise)
    from toolkit.lab.lessons.outline import WrongAnswer

    namespace = {}
    try:
        names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        exec(compile(source, "your code", "exec"), namespace)
    except Exception as error:
        return False, f"Your code raised {type(error).__name__}: {error}"
    if exercise not in names:
        return False, f"Define a function named {exercise}."
    try:
        return True, judged.judge(namespace[exercise], lambda drawing: None)
    except WrongAnswer as wrong:
        return False, str(wrong)
