"""Every public name shows how it is used: its docstring ends with an example that runs.

An example is two to five lines of a Python session. It finds `jax`, `jnp` and the public names of
its room; anything else it imports. Files that it writes land in a folder of the test's own.
"""

import doctest
import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from test_docs import ROOMS, exported, is_function

from toolkit.attention import MIXERS

MOST_LINES = 5
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def has_example(value):
    """Functions and classes are shown in use; errors are raised by what is, and data is data.

    A mixer's reference is called exactly as the mixer, whose example shows how; the
    contract suite calls it too.
    """
    if inspect.isclass(value):
        return value.__module__.startswith("toolkit") and not issubclass(value, BaseException)
    return is_function(value) and all(value is not row.reference for row in MIXERS.values())


def faults_of(docstring):
    header = re.search(r"^Example:\n", docstring, re.MULTILINE)
    if not header:
        return ["has no section Example:"]
    lines = [line.strip() for line in docstring[header.end() :].splitlines() if line.strip()]
    code = sum(line.startswith(("...", ">>>")) for line in lines)
    faults = []
    if re.search(r"^[A-Z]\w+:(?:[ \t]|$)", docstring[header.end() :], re.MULTILINE):
        faults.append("goes on after Example:, which comes last")
    if not len(lines) >= 2 or not 1 <= code <= MOST_LINES:
        faults.append(f"shows {code} lines of code: want at most {MOST_LINES}, two with the output")
    return faults


def public(room):
    """(its module, [(name, docstring)]) of what is shown in use."""
    module = importlib.import_module(f"toolkit.{room}")
    values = ((name, getattr(module, name)) for name in exported(room))
    shown = [(name, inspect.unwrap(value)) for name, value in values if has_example(value)]
    return module, [(name, inspect.getdoc(value) or "") for name, value in shown]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_example(room):
    faults = {name: found for name, doc in public(room)[1] if (found := faults_of(doc))}
    assert not faults, f"toolkit.{room}: {faults}"


# A panel's tests open it too, and these compile for longer than all others of their rooms.
LONG = {
    "mixture_of_block_attention", "context_attention", "export_language_model", "token_batches",
    "search_rate", "train_language_model", "vocabulary_parallel_loss", "ring_attention",
    "context_mixer", "alignment_losses", "vocabulary_parallel_cross_entropy",
}  # fmt: skip


def waits(name):
    return pytest.mark.nightly if name in LONG or name.endswith("Panel") else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "name"),
    [pytest.param(room, name, marks=waits(name)) for room in ROOMS for name in exported(room)],
)
def test_example_runs(room, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, examples = public(room)
    docstring = dict(examples).get(name)
    if docstring is None:
        return
    names = {"jax": jax, "jnp": jnp, **{other: getattr(module, other) for other in module.__all__}}
    test = doctest.DocTestParser().get_doctest(docstring, names, f"{room}.{name}", None, None)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


def test_the_check_itself_sees_faults():
    good = "Adds.\n\nExample:\n    >>> 1 + 1\n    2\n"
    assert faults_of(good) == []
    assert faults_of("Adds.") == ["has no section Example:"]
    assert "comes last" in " ".join(faults_of(good + "\nCost:\n    None."))
    assert "want at most" in " ".join(faults_of(good + "    >>> 2\n    2\n" * 5))
