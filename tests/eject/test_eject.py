"""An ejected mixer is a file of its own: it needs jax alone, checks itself, and equals ours."""

import ast
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import MIXERS, draw_inputs
from toolkit.eject import _Writer, eject

FLOAT64_TOLERANCE = 1e-9
NAMES = [row.name for row in MIXERS.values() if row.transition]
TIME = 37
# Ends of documents inside a chunk, at its edge, of one token, and a number used twice.
DOCUMENTS = np.stack([np.repeat([4, 1, 4], [10, 22, 5]), np.repeat([0, 1, 2], [32, 1, 4])])


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(name, tmp_path):
    path = tmp_path / f"{name}_alone.py"
    path.write_text(eject(name))
    return imported(path)


def test_constants_come_along_however_they_are_assigned(tmp_path):
    path = tmp_path / "constants.py"
    path.write_text(
        "ONE = TWO = 1\nTHREE, (FOUR, *FIVE) = ONE + 2, (4, 5)\nSIX: int = 6\n"
        "def mix():\n    return TWO, THREE, FOUR, FIVE, SIX\n"
    )
    writer, found = _Writer(imported(path)), {}
    writer.add("mix")
    exec(writer.text(), found)
    assert found["mix"]() == (1, 3, 4, [5], 6)
    assert writer.text().count("FOUR, *FIVE") == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_file_imports_nothing_of_ours(name):
    tree = ast.parse(eject(name))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {"jax", "numpy", "math", "functools", "typing"}
    assert len(ast.unparse(tree).splitlines()) < 400


@pytest.mark.by_family
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_ours_with_documents_and_a_state(name, tmp_path):
    row = MIXERS[name]
    with enable_x64(True):
        theirs = getattr(loaded(name, tmp_path), row.function.__name__)
        inputs = draw_inputs(row, TIME, dtype=jnp.float64)
        if "g" in row.names:  # cleared at a token
            place = row.names.index("g")
            inputs[place] = inputs[place].at[:, 7].set(-jnp.inf)
        state = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 16, 8)))
        how = {"initial_state": state, "segment_ids": jnp.asarray(DOCUMENTS)}
        for form in ("xla", "scan"):
            got = jax.jit(lambda *x, form=form: theirs(*x, implementation=form, **how))(*inputs)
            for a, b in zip(got, row.function(*inputs, **how), strict=True):
                np.testing.assert_allclose(a, b, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn", pytest.param("rwkv7", marks=pytest.mark.nightly)])
def test_it_checks_itself_and_sees_a_fault(name, tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(eject(name))
    how = {"capture_output": True, "text": True, "cwd": tmp_path, "check": False}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-P", str(path)], env=environment, **how)
    assert "value, gradient and steps are the equation's" in run.stdout, run.stderr
    spoilt = path.read_text().replace(
        "out + P(query, write) @ N", "out + 0.99 * P(query, write) @ N"
    )
    assert spoilt != path.read_text()
    path.write_text(spoilt)
    assert subprocess.run([sys.executable, "-P", str(path)], env=environment, **how).returncode == 1


def test_what_has_no_matrix_for_a_state_is_refused():
    for name in ("full", "softmax_attention", "nonsense"):
        with pytest.raises(ValueError, match=rf"name: got '{name}', wanted one of .*gated_delta"):
            eject(name)


@pytest.mark.parametrize("name", NAMES)
def test_its_docstring_lists_every_argument(name):
    """Arguments that the package documents once, for several mixers, are written out."""
    text = eject(name)
    function = MIXERS[name].function.__name__
    node = next(x for x in ast.parse(text).body if getattr(x, "name", None) == function)
    documented = ast.get_docstring(node)
    for argument in (*node.args.args, *node.args.kwonlyargs):
        assert f"\n    {argument.arg}: " in documented, argument.arg
    assert documented.count("Args:") == documented.count("Returns:") == 1
    assert "Arguments" not in documented
