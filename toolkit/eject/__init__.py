"""One method as one readable file without imports of ours, to paste into another code base.

eject       the source of that file

engine.py   what such a file runs on: the chunked engine of linear-time mixers, shortened
"""

import ast
import inspect
import re
from types import ModuleType

from toolkit import __version__
from toolkit._checks import checked
from toolkit.attention import MIXERS
from toolkit.attention.inputs import UNIT, Values
from toolkit.eject import engine

_HEADER = '''"""{title}: {paper}.

Made by `toolkit eject {name}`, version {version} of mlsys-toolkit (Apache-2.0); wants jax alone.

    {function}       a sequence, in chunks
    {step}   one token of decoding
    {reference}   the equation, token by token; run this file to hold the others against it

{engine}"""
'''
_CHECK = '''

def _check():
    """The chunked form and the steps against the equation, in float64, value and gradient."""
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    draw = np.random.default_rng(0)
    inputs = [{draws}]
    inputs = [jnp.asarray(x) for x in inputs]

    def total(function, *inputs):
        out, state = function(*inputs)
        return jnp.sum(jnp.sin(out)) + sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(state))

    places = tuple(range(len(inputs)))
    wanted, gradients = jax.value_and_grad(partial(total, {reference}), places)(*inputs)
    got, found = jax.value_and_grad(partial(total, {function}), places)(*inputs)
    np.testing.assert_allclose(got, wanted, rtol=1e-10)
    for a, b in zip(found, gradients):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    whole, last = {reference}(*inputs)
    state = jax.tree.map(jnp.zeros_like, last)
    for t in range(whole.shape[1]):
        out, state = {step}(*(x[:, t] for x in inputs), state)
        np.testing.assert_allclose(out, whole[:, t], rtol=1e-9, atol=1e-9)
    print("{function}: value, gradient and steps are the equation's")


if __name__ == "__main__":
    _check()
'''


@checked
def eject(name: str) -> str:
    """The source of one linear-time mixer as a file that imports only jax.

    Its equation and the preparation of its inputs are the package's text; the engine is
    `toolkit/eject/engine.py`, which has no kernels and no checks of arguments, and is slower.

    Args:
        name: the function, such as "gated_delta_net", or its name in `MIXERS`, such as "gdn".

    Returns:
        Python source. Run as a program, the file checks itself.

    Example:
        >>> "def gated_delta_net(" in eject("gated_delta_net")
        True
    """
    rows = {row.function.__name__: row for row in MIXERS.values()} | dict(MIXERS)
    known = [row.function.__name__ for row in MIXERS.values() if row.transition]
    if name not in rows or not rows[name].transition:
        raise ValueError(f"name: got {name!r}, wanted one of {', '.join(known)}")
    row = rows[name]
    names = {form: getattr(row, form).__name__ for form in ("function", "step", "reference")}
    module = inspect.getmodule(inspect.unwrap(row.function))
    assert module is not None
    body = _Writer(module)
    for function in names.values():
        body.add(function)
    engine_text = inspect.getsource(engine)
    engine_docs = ast.get_docstring(ast.parse(engine_text)) or ""
    _, _, engine_code = engine_text.partition('\n"""\n')
    header = _HEADER.format(
        title=row.title, paper=row.paper, name=name, version=__version__,
        engine=engine_docs + "\n", **names,
    )  # fmt: skip
    imports = "".join(f"{line}\n" for line in sorted(body.imports))
    draws = ", ".join(_draw(given.axes, given.values) for given in row.inputs)
    code = engine_code.replace("\nimport jax\n", f"\n{imports}import jax\n", 1)
    return header + code + body.text() + _CHECK.format(draws=draws, **names)


_SIZES = {"batch": 2, "time": 37, "heads": 2, "key": 8, "value": 5, "steps": 2}


def _draw(axes: tuple[str, ...], values: Values) -> str:
    """Code that draws one input: gates in their range, q and k of unit length."""
    shape = tuple(_SIZES[axis] for axis in axes)
    normal = f"draw.normal(size={shape})"
    if values is UNIT:
        return f"unit_length(jnp.asarray({normal}))"
    low, high = values.low, values.high
    if high == 0.0:
        return f"-{min(0.5, -low)} * draw.random({shape})"
    if low == 0.0:
        return f"draw.random({shape})"
    return normal


class _Writer:
    """Definitions of a module, each after those it needs, without decorators and annotations."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.imports = module, set()
        self._tree = ast.parse(inspect.getsource(module))
        self._parts: dict[str, str] = {}

    def add(self, name: str) -> None:
        if name in self._parts or name in vars(engine):
            return
        for node in self._tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, name)
            elif name in (defined := _defined(node)):
                for other in defined:  # before its needs: a function may call itself
                    self._parts[other] = ""
                bare = _bare(node)
                for need in sorted({n.id for n in ast.walk(bare) if isinstance(n, ast.Name)}):
                    self.add(need)
                del self._parts[name]
                self._parts[name] = ast.unparse(bare)  # after its needs

    def text(self) -> str:
        return "".join(f"\n\n{part}\n" for part in self._parts.values() if part)

    def _import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        if name not in [alias.asname or alias.name for alias in node.names]:
            return
        source = getattr(node, "module", None) or ""
        if source.startswith("toolkit"):
            raise ValueError(f"{self.module.__name__} needs {source}.{name}, which engine.py lacks")
        if name not in ("jax", "jnp"):
            self.imports.add(ast.unparse(node))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = (name for target in targets for name in ast.walk(target))
    return [name.id for name in names if isinstance(name, ast.Name)]


def _bare(node: ast.stmt) -> ast.stmt:
    """Without decorators, annotations, and the session of the docstring."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            inner.decorator_list, inner.returns = [], None
            arguments = inner.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None
            first = inner.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                text, _, _ = str(first.value.value).partition("\n    Example:\n")
                names = [x.arg for x in (*arguments.args, *arguments.kwonlyargs)]
                first.value.value = _whole(inner.name, text.rstrip() + "\n", names) + "    "
    return node


_AS_ANOTHER = re.compile(r"    Arguments[\w, ]* as `(\w+)`.*\n\n")
_ARGUMENT = re.compile(r"^ {8}(\w+): .*\n(?: {12}.*\n)*", re.MULTILINE)


def _whole(name: str, text: str, parameters: list[str]) -> str:
    """The docstring of a mixer, with the arguments and results that it shares with another's."""
    functions = {row.function.__name__: row.function for row in MIXERS.values()}
    found = _AS_ANOTHER.search(text)
    if name not in functions or found is None:
        return text
    _, theirs = (functions[found[1]].__doc__ or "").split("    Args:\n")
    theirs, returns = theirs.split("    Returns:\n")
    own, rest = "", text[found.end() :]
    if rest.startswith("    Args:\n"):
        own, _, rest = rest.removeprefix("    Args:\n").partition("\n\n")
    entries = {x[1]: x[0] for x in _ARGUMENT.finditer(theirs + own + "\n")}
    arguments = "".join(entries[parameter] for parameter in parameters)
    results, _, _ = returns.partition("\n\n")
    sections = f"    Args:\n{arguments}\n    Returns:\n{results}\n\n"
    return text[: found.start()] + sections + rest


__all__ = ["eject"]
