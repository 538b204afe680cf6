"""Batches of a search: from arrays, a function of the step, or an iterable.

Candidates must see the same batches as the training after them, so that their losses differ only by
the rate. Arrays and functions return the same batch for the same step; batches of an iterator are
kept until no candidate may need them.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit.lr.running.fingerprints import add_part, digest_of

STEPS_PER_CALL = 256
SHOWN_STEPS = (*range(16), 100, 1000)  # of a function, for the fingerprint
REPLAYED_PER_CALL = 32  # batches on the device at a time


class Batches:
    """Arrays or a function of the step.

    Attributes:
        draw: (data, step) -> batch, traceable; equal ones make the same program.
        steps_per_call: most steps that `data` is good for.
    """

    steps_per_call = STEPS_PER_CALL

    def __init__(self, batches: Any, sample: Callable | None):
        if callable(batches):
            _require_function_of_step(batches)
        elif sample is None:
            _check_rows(batches)
        # Arrays are passed to the programs, not baked into them.
        self._arrays = None if callable(batches) else jax.tree.map(jnp.asarray, batches)
        self.draw = _OfStep(batches) if callable(batches) else sample or _row_of

    def data(self, start: Any, done: int, count: int) -> Any:
        """The data for `draw` in `count` steps, `done` steps after `start`, where the next
        candidate starts too.
        """
        return self._arrays

    def digest(self, step: int, begun: np.ndarray | None = None) -> np.ndarray:
        """For the fingerprint: of the arrays, and of some steps' batches where a function makes
        them."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> np.ndarray:
        draw, steps = jax.jit(self.draw), SHOWN_STEPS if self.draw is not _row_of else ()
        batches = [draw(self._arrays, jnp.int32(step)) for step in steps]
        return digest_of(jax.tree.leaves((self._arrays, batches)))


class ReplayedBatches:
    """Batches of an iterable, kept as long as a candidate may need them."""

    steps_per_call = REPLAYED_PER_CALL

    def __init__(self, batches: Iterable):
        self._batches, self._iterator = batches, iter(batches)
        self._begin, self._kept = 0, []  # the step of the first batch kept
        self._seen = hashlib.sha256()  # of all so far
        self.draw = _replayed

    def data(self, start: Any, done: int, count: int) -> Any:
        """The batches of these steps, stacked; the last is repeated up to `steps_per_call`."""
        start = int(start)
        self._leave(start)
        while len(self._kept) < done + count:
            self._kept.append(self._next())
        rows = self._kept[done : done + count]
        rows += rows[-1:] * (self.steps_per_call - count)
        return jax.tree.map(_stacked, *rows), np.int32(start + done)

    def digest(self, step: int, begun: np.ndarray | None = None) -> np.ndarray:
        """For the fingerprint: of all batches so far and their number, [32 + 8] uint8; as many as
        when `begun` was taken, at this step."""
        self._leave(step)
        is_begun = begun is not None and len(begun) == 40
        wanted = int(np.asarray(begun)[32:].copy().view(np.int64)[0]) if is_begun else 1
        while (count := self._begin + len(self._kept)) < wanted:
            self._kept.append(self._next())
        return np.frombuffer(self._seen.digest() + np.int64(count).tobytes(), np.uint8)

    def _leave(self, step: int) -> None:
        """Leave the batches before this step, which a resumed search has used."""
        while self._begin < step:
            self._kept = self._kept or [self._next()]
            self._kept, self._begin = self._kept[1:], self._begin + 1

    def _next(self) -> Any:
        batch = next(self._iterator, None)
        if batch is None and self._iterator is not self._batches:
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(
                f"batches: the iterator ended after {self._begin + len(self._kept)} batches; give "
                "an infinite one, or something that can be iterated again, such as a data loader"
            )
        batch = jax.tree.map(_copied, batch)
        if self._kept and _shapes(batch) != _shapes(self._kept[0]):
            raise ValueError(
                f"batches: all must have the same shapes, got {_shapes(batch)} after "
                f"{_shapes(self._kept[0])}; drop the last, smaller one of a pass"
            )
        for leaf in jax.tree.leaves(batch):
            add_part(self._seen, leaf)
        return batch


def batch_source(batches: Any, sample: Callable | None = None) -> Batches | ReplayedBatches:
    """The source of what `search` takes as `batches`."""
    is_array = hasattr(batches, "shape") or not jax.tree_util.all_leaves([batches])
    is_iterable = hasattr(batches, "__iter__") and not is_array
    if sample is None and isinstance(batches, list):
        # Of arrays a list is one tree of them; of tuples or dicts, the batches themselves.
        is_iterable |= not jax.tree_util.all_leaves(batches)
    return ReplayedBatches(batches) if is_iterable else Batches(batches, sample)


def _check_rows(batches: Any) -> None:
    shapes = _shapes(batches)
    if not shapes:
        raise ValueError("batches: got an empty tree of arrays")
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            "batches: arrays must share their first size, the number of batches, at least 1; got "
            f"shapes {', '.join(map(str, shapes[:4]))}"
        )


def _require_function_of_step(batches: Callable) -> None:
    """Refuse a function whose batches would not depend on the step in a compiled program."""
    mend = "give the iterator or data loader itself, or arrays [batches, ...]"
    try:
        # Another function each time: a trace of the same one would be remembered.
        first, again = (jax.make_jaxpr(functools.partial(batches))(jnp.int32(0)) for _ in range(2))
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            f"batches: (step) -> batch must be traceable ({type(error).__name__}); {mend}"
        ) from None
    if not used_inputs(first)[0]:
        raise ValueError(
            "batches: the batch does not depend on the step, so that all steps would train on "
            f"one; {mend}"
        )
    pairs = itertools.zip_longest(first.consts, again.consts)
    if not all(a is b or np.array_equal(a, b) for a, b in pairs):
        raise ValueError(
            f"batches: two calls with the same step differ, and only one would be seen; {mend}"
        )


def used_inputs(closed: Any) -> list[bool]:
    """Whether the outputs of a jaxpr depend on each of its inputs, at its top level."""
    jaxpr = closed.jaxpr
    is_variable = lambda atom: not hasattr(atom, "val")  # noqa: E731
    used = set(filter(is_variable, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if not used.isdisjoint(equation.outvars):
            used.update(filter(is_variable, equation.invars))
    return [variable in used for variable in jaxpr.invars]


@dataclass(frozen=True)
class _OfStep:
    batches: Callable

    def __call__(self, data: Any, step: Array) -> Any:
        return self.batches(step)


def _row_of(data: Any, step: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[step % len(leaf)], data)


def _replayed(data: tuple[Any, Array], step: Array) -> Any:
    rows, first = data
    return jax.tree.map(lambda leaf: leaf[step - first], rows)


def _stacked(*leaves: Any) -> Any:
    return jnp.stack(leaves) if _is_jax(leaves[0]) else np.stack(leaves)


def _copied(leaf: Any) -> Any:
    """An array of its own: a loader may fill the same memory again."""
    if _is_jax(leaf):
        return leaf
    try:
        array = np.array(leaf)
        jnp.result_type(array)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, or a text
        raise ValueError(f"batches: {type(leaf).__name__} is no array for jax: {error}") from None
    return array


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]


def _is_jax(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
