"""No test changes a library in order to pass: what is patched is ours, or the machine's."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIBRARIES = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "scipy", "torch", "transformers"),
    *("safetensors", "matplotlib", "ipywidgets", "anywidget", "grain", "tokenizers", "networkx"),
}
# What a program for a GPU asks of the machine while it is traced, on machines without a GPU.
OF_THE_MACHINE = {
    "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
    "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability",
}


def imported(tree):
    """Local name -> the dotted name that it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.split(".")[0]
                names[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    return names


def dotted(node, names):
    """The full name of an expression such as `jnp.float32`; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def patched(tree):
    """Names that a module replaces: by `setattr`, by an assignment, or by `patch` of a mock."""
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            found = [
                dotted(target, names) for target in targets if isinstance(target, ast.Attribute)
            ]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            call = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if call not in ("setattr", "delattr", "patch", "object") or not node.args:
                continue
            owner, *rest = node.args
            found = [dotted(owner, names)]
            if call != "patch" and rest and isinstance(rest[0], ast.Constant) and found[0]:
                found = [f"{found[0]}.{rest[0].value}"]
        else:
            continue
        yield from (name for name in found if name)


def of_a_library(name):
    """`toolkit.some.module.jax.devices` too: a library by way of a module of ours."""
    return any(part in LIBRARIES | {"jnp", "np", "nnx", "lax"} for part in name.split(".")[:-1])


@pytest.mark.parametrize(
    "source",
    [
        "import jax.numpy as jnp\nmonkeypatch.setattr(jnp, 'float32', jnp.float64)",
        "import jax\njax.devices = lambda: []",
        "from jax import numpy\nsetattr(numpy, 'dot', None)",
        "monkeypatch.setattr('jax.devices', list)",
        "from unittest.mock import patch\npatch('flax.nnx.merge')",
        "from toolkit.lab import tour\nmonkeypatch.setattr(tour.jax, 'devices', list)",
        "def test(patch):\n    import optax as o\n    patch.setattr(o, 'adam', None)",
    ],
)
def test_a_patched_library_is_found(source):
    assert any(map(of_a_library, patched(ast.parse(source))))


def test_no_test_patches_a_library():
    wrong = {}
    for path in TESTS.rglob("*.py"):
        names = patched(ast.parse(path.read_text(encoding="utf-8")))
        if found := {name for name in names if of_a_library(name)} - OF_THE_MACHINE:
            wrong[str(path.relative_to(TESTS))] = found
    assert not wrong
