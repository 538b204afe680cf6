"""The table of token mixers: every variant once, with its functions and what it costs.

The contract suite iterates over `MIXERS`; panels, the tour and benchmarks look rows up in it. All
call every row alike:

    row = mixer("window", sliding_window=128)
    out, state = row.function(*draw_inputs(row, time), **row.options)  # one for each of row.inputs
    state = row.empty_state(batch, heads, key, value, capacity, dtype)
    out_t, state = row.step(*inputs_t, state, **row.options)
    row.forward_flops(batch, time, heads, key, value, **row.options)

The table collects itself: a file in `linear/` or `softmax/`, or in a folder of theirs, that holds a
`ROW` is in it, in the order of papers. A file of another package adds its own with `register`.
"""

import importlib
import pkgutil
import re
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import jax

from toolkit._checks import check_choice, checked
from toolkit._pytrees import check_classes
from toolkit._registry import Registry
from toolkit.attention import linear, softmax
from toolkit.attention.inputs import Mixer
from toolkit.attention.linear import delta
from toolkit.attention.softmax import positions
from toolkit.attention.softmax.softmax_attention import ROWS
from toolkit.attention.sparse.compressed import rows as compressed
from toolkit.attention.sparse.train import mixers as sparse


def _rows() -> list[Mixer]:
    modules = (
        importlib.import_module(f"{folder.__name__}.{found.name}")
        for folder in (linear, delta, softmax, positions)
        for found in pkgutil.iter_modules(folder.__path__)
    )
    rows = [module.ROW for module in modules if hasattr(module, "ROW")]
    return sorted((*ROWS, *rows, *sparse.ROWS, *compressed.ROWS), key=_published)


def _published(row: Mixer) -> tuple[str, str]:
    """The number of a paper on arXiv, which begins with its year and month; then the name."""
    found = re.search(r"arXiv:([\d.]+)", row.paper)
    return found[1] if found else "9999", row.name


MIXERS: Registry[Mixer] = Registry((row.name, row) for row in _rows())
"""Every token mixer by name: softmax attention, the recurrent ones, attention to a selection."""


@checked
def register(row: Mixer) -> Mixer:
    """Add a mixer of your own to the table, so that every room knows it by its name.

    Patterns of looped models take it as a word once its layer is registered too
    (`toolkit.looped.register_layer`); `toolkit.testing.check_mixer` runs the contract on it. A
    package that is installed registers by an entry point of the group "toolkit.mixers", whose value
    is the module that calls this.

    Args:
        row: functions, inputs and costs; `toolkit.attention.recurrent` fills in what rows with a
            matrix for a state have in common.

    Returns:
        The row.

    Raises:
        ValueError: the name is one of the package's own mixers, or is not one word.
        TypeError: a class of its state is registered by `jax.tree_util.register_dataclass`, whose
            programs jaxlib 0.10 to 0.12 mistakes for each other; see `register_dataclass`.

    Example:
        >>> import dataclasses
        >>> mine = dataclasses.replace(MIXERS["gla"], name="mine", title="Mine")
        >>> register(mine).name in MIXERS
        True
        >>> del MIXERS["mine"]
    """
    check_state(row)
    MIXERS.register(row.name, row)
    return row


def check_state(row: Mixer) -> None:
    """Refuse a row in whose state is a class that jaxlib may take for another one."""
    empty = partial(row.empty_state, 1, 2, 128, 128, 256, "float32", **row.options)
    check_classes(f"state of {row.name!r}", jax.eval_shape(empty))


@checked
def mixer(name: str, **options: int) -> Mixer:
    """Look a token mixer up, optionally with other values of its options.

    Args:
        name: a key of `MIXERS`.
        **options: replaces values of the row's `options`, such as `sliding_window=128`.

    Returns:
        The row of `MIXERS`, with those options.

    Example:
        >>> mixer("window", sliding_window=128).options["sliding_window"]
        128
    """
    check_choice("mixer", name, MIXERS)
    row = MIXERS[name]
    unknown = sorted(set(options) - set(row.options))
    if unknown:
        known = ", ".join(row.options) or "none"
        raise ValueError(f"mixer {name!r} has the options: {known}; got {', '.join(unknown)}.")
    return replace(row, options=MappingProxyType({**row.options, **options}))
