"""Equal layers as one `lax.scan`, so that a program does not grow with the depth of its model.

    with scanned_layers():
        loss = ...

The model keeps its tree of parameters, one entry per layer; inside the trace those of layers that
repeat are stacked. A mixed pattern scans its repeating unit: "gdn gdn gdn full" four times is a
scan of four turns over four layers. The three alike are no scan within it: what they save for the
backward pass would be stacked twice, in more kernels, and take longer to compile. What still grows
with depth is the stack of parameters and the slices of their gradients.

MaxText's checkpoints hold the stack; here only the program does. So a scan copies the parameters
once per pass, and its gradient those of all layers: on a two-core CPU a gradient of 12 layers of
width 384 for 512 tokens took 1.3 times the processor time and twice the memory (measured; it
compiled no faster, because XLA for CPUs compiles equal kernels once in any case). On CPUs
training therefore scans nothing unless asked to. A decode step is never scanned: it would copy all
parameters and caches for one token, see `toolkit.looped.decoding.cache`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from toolkit._checks import checked

FEWEST_SAVED = 4  # layers that a scan must leave out of the program, to be worth its stack
_SCANNING: ContextVar[bool] = ContextVar("scanning", default=False)


@contextlib.contextmanager
@checked
def scanned_layers(is_scanned: bool = True) -> Iterator[None]:
    """Make models that are traced in the `with` block scan their repeated layers.

    Layers that differ in anything but the values of their parameters are not repeated: those of
    other windows or other caches are traced on their own. Nor are those that pass more than the
    stream to each other (value residuals, connections, groups), and single tokens that are
    decoded. Shorter repeats than 5 equal layers stay as they are.

    Args:
        is_scanned: False for a block that changes nothing.

    Returns:
        A context manager.

    Source: MaxText's `scan_layers`.

    Cost: Parameters of repeated layers, and caches of those that `prefill` and `extend` read, are
        copied once per pass; results differ by rounding.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny("full " * 6, width=8, heads=1), rngs=nnx.Rngs(0))
        >>> with scanned_layers():
        ...     program = jax.make_jaxpr(lambda model: model(jnp.zeros((1, 4), int)))(model)
    """
    token = _SCANNING.set(is_scanned)
    try:
        yield
    finally:
        _SCANNING.reset(token)


def is_scanning() -> bool:
    """Whether a model that is traced now scans its layers."""
    return _SCANNING.get()


def can_scan(blocks: Sequence[Any]) -> bool:
    """Whether these blocks are to be scanned, as far as they repeat."""
    return _SCANNING.get() and not any(
        block.shares_inputs or block.reads_tokens or block.is_ladder for block in blocks
    )


def repeats(keys: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Parts of a sequence as (start, period, times), so that few entries are left to trace.

    Greedy from the left: the period that leaves out the most.
    """
    found, start = [], 0
    while start < len(keys):
        best = (1, 1)
        for period in range(1, (len(keys) - start) // 2 + 1):
            times = 1
            unit = keys[start : start + period]
            while keys[start + times * period : start + (times + 1) * period] == unit:
                times += 1
            if period * (times - 1) > best[0] * (best[1] - 1):
                best = period, times
        if best[0] * (best[1] - 1) < FEWEST_SAVED:
            best = (1, 1)
        found.append((start, *best))
        start += best[0] * best[1]
    return found


def run_scanned(
    blocks: Sequence[Any], h: jax.Array, windows: Sequence[int | None], caches: Sequence[Any],
    **how: Any,
) -> tuple[jax.Array, list[Any]]:  # fmt: skip
    """The blocks one after the other, as `run_blocks`, with a scan over each part that repeats."""
    layers = list(zip(blocks, caches, strict=True))

    def key(layer: Any, window: int | None) -> Any:
        leaves, structure = jax.tree.flatten(layer)
        return structure, window, [(leaf.shape, leaf.dtype) for leaf in leaves]

    keys, others = [*map(key, layers, windows)], []
    for start, period, times in repeats([keys.index(own) for own in keys]):
        seen = windows[start : start + period]

        def run(h: Any, unit: Any, seen: Any = seen) -> tuple[Any, tuple[Any, ...]]:
            found = []
            for (block, cache), window in zip(unit, seen, strict=True):
                h, other = block(h, cache=cache, window=window, **how)
                found.append(other)
            return h, tuple(found)

        places = range(start, start + period * times, period)
        units = [tuple(layers[place] for place in range(at, at + period)) for at in places]
        if times == 1:
            h, found = run(h, units[0])
            others += found
            continue
        h, found = jax.lax.scan(run, h, jax.tree.map(lambda *x: jnp.stack(x), *units))
        others += [jax.tree.map(lambda x, n=n: x[n], o) for n in range(times) for o in found]
    return h, others
