"""Bad calls of every public name, made of the good ones in its example.

The example of a docstring runs with the name replaced by a recorder, which draws bad calls from
the good one: one argument replaced by something that its annotation, or common sense, rules out.
"""

import dataclasses
import doctest
import importlib
import inspect
import math
import re
import signal
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import toolkit

MOST_SECONDS = 20
# Refusals of ours name what is wrong in no more lines than this.
MOST_LINES = 2
# Where the example of a class shows another of its calls.
MORE_CALLS = {
    "looped.LoopedConfig": "LoopedConfig(width=16, heads=2)",
    "lr.AutoLRS": "AutoLRS((1e-4, 1.0), 100)",
}
# They obey a number that is merely odd, for minutes.
WORKERS = {"convert", "train_language_model", "search", "search_rate", "run_case", "fit"}


class EnoughError(Exception):
    """The bad calls of a name were drawn; the good one would be tested for the second time."""


class HungError(BaseException):
    """A bad call took longer than any refusal may."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a bad call.

    Attributes:
        call: the name called, the argument replaced and what stood there.
        kind: "named" (a line of ours that names the argument), "unnamed" (a line that does not),
            "foreign" (raised by what we call), "odd" (accepted, of the right type, and everything
            finite), "accepted" (other than that), "memory" (that much is not there) or "hung".
        detail: the message, or what was returned.
    """

    call: str
    kind: str
    detail: str

    def __str__(self):
        return f"{self.kind:<8} {self.call}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Bad:
    """A value that must not be accepted in silence; `is_odd` where its type is right."""

    text: str
    value: Any
    is_odd: bool = False


def kinds_of(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without what is asserted of them beside their type."""
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds_of(annotation.__origin__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in kinds_of(part)]
    return [annotation]


def bad_arrays(array: Any, axes: str) -> Iterator[Bad]:
    yield Bad("a list", [[0.0]])
    if not re.search(r"[.*]", axes):
        yield Bad("one more axis", array[None])
    if array.ndim and not re.search(r"[.*]", axes):
        yield Bad("one axis fewer", array[(0,) * array.ndim] if array.ndim == 1 else array[0])
        yield Bad("nothing in it", array[:0])
    other = jnp.float32 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.int32
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        yield Bad(f"{jnp.dtype(other)}", array.astype(other))
        if array.dtype != bool:
            yield Bad("bool", array.astype(bool))
        yield Bad("complex64", array.astype(jnp.complex64))


def bad_values(annotation: Any, good: Any) -> Iterator[Bad]:
    """What an argument must not be, by its annotation and by the good value."""
    kinds = kinds_of(annotation)
    if Any in kinds or inspect.Parameter.empty in kinds:
        return
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    names = {origin for origin in origins if isinstance(origin, type)}
    if types.NoneType not in names:
        yield Bad("None", None)
    if sum(hasattr(kind, "dim_str") for kind in kinds) == 1 and hasattr(good, "ndim"):
        (axes,) = (kind.dim_str for kind in kinds if hasattr(kind, "dim_str"))
        yield from bad_arrays(good, axes)
    if str not in names and not {Sequence, Iterable} & names and typing.Literal not in origins:
        yield Bad("'no'", "no")
    if bool in names:
        yield Bad("2", 2)
        yield Bad("0.5", 0.5)
    elif names & {int, float} and not any(hasattr(kind, "dim_str") for kind in kinds):
        yield Bad("True", True)
        yield Bad("nan", math.nan)
        yield Bad("1j", 1j)
        yield Bad("inf", math.inf, is_odd=True)
        yield Bad("-1", -1, is_odd=True)
        if float not in names:
            yield Bad("1.5", 1.5)
            yield Bad("0", 0, is_odd=True)
            yield Bad("10**12", 10**12, is_odd=True)
    elif str in names or typing.Literal in origins:
        yield Bad("7", 7)
        yield Bad("b'x'", b"x")
        if isinstance(good, str):
            yield Bad("'no such thing'", "no such thing", is_odd=typing.Literal not in origins)
            yield Bad("''", "", is_odd=True)
    else:
        if not names & {int, float}:
            yield Bad("7", 7)
        yield Bad("an object", object())


def annotations_of(function: Any) -> dict[str, Any]:
    """The annotations of all parameters, those of strings resolved where that is possible."""
    owner = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, SyntaxError):
        return dict(getattr(owner, "__annotations__", {}))


def copied(value: Any) -> Any:
    """The same with arrays of its own, which a call may consume."""
    try:
        return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, value)
    except (TypeError, ValueError):
        return value


def bad_calls(function: Any, args: tuple, kwargs: Mapping) -> Iterator[tuple[str, str, bool, Any]]:
    """All bad calls next to a good one: argument, what stands there, whether it is merely odd."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    annotations = annotations_of(function)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for bad in bad_values(annotations.get(name, Any), bound.arguments[name]):

            def call(name=name, bad=bad):
                changed = inspect.signature(function).bind(*copied(args), **copied(dict(kwargs)))
                changed.arguments[name] = bad.value
                return function(*changed.args, **changed.kwargs)

            yield name, bad.text, bad.is_odd, call


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises once so much of the processor was taken, whatever else runs meanwhile."""

    def ring(number, frame):
        raise HungError

    usual = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, usual)


def is_ours(error: BaseException) -> bool:
    """Whether we raised an error ourselves, rather than something that we called."""
    frames = traceback.extract_tb(error.__traceback__)
    is_here = frames and frames[-1].filename.startswith(toolkit.__path__[0])
    return bool(is_here and (frames[-1].line or "").startswith("raise"))


def is_sound(result: Any) -> bool:
    """Whether what was returned holds finite numbers only."""
    try:
        leaves = jax.tree.leaves(result)
    except (TypeError, ValueError):
        leaves = [result]
    for leaf in leaves:
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return False
        # What a function inside a transformation returns has no numbers yet.
        if isinstance(leaf, Tracer):
            continue
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if is_array and jnp.issubdtype(leaf.dtype, jnp.inexact) and not jnp.isfinite(leaf).all():
            return False
    return True


def outcome_of(label: str, argument: str, is_odd: bool, call: Callable[[], Any]) -> Outcome:
    try:
        with limited(MOST_SECONDS):
            result = call()
            if isinstance(result, types.GeneratorType):
                result = next(result)
            sound = is_sound(result)
    except HungError:
        return Outcome(label, "hung", f"more than {MOST_SECONDS} s")
    except Exception as error:
        text = str(error)
        line = f"{type(error).__name__}: {text}"[:300]
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            return Outcome(label, "memory", line)
        if isinstance(error, OSError) and error.filename is not None:
            return Outcome(label, "named", line)  # the system's line names the path
        if not is_ours(error):
            return Outcome(label, "foreign", line)
        words = set(re.findall(r"\w+", text))
        is_named = argument in words and len(text.splitlines()) <= MOST_LINES
        return Outcome(label, "named" if is_named else "unnamed", line)
    kind = "odd" if is_odd and sound else "accepted"
    return Outcome(label, kind, f"{type(result).__name__}" + ("" if sound else ", not finite"))


def outcomes_of(room: str, name: str, choose: Callable[[str], bool]) -> list[Outcome]:
    """Run the example of a public name; before each call of it, bad ones that are chosen."""
    module = importlib.import_module(f"toolkit.{room}")
    value = getattr(module, name)
    found: list[Outcome] = []
    seen = set()

    def recorder(*args, **kwargs):
        for argument, text, is_odd, call in bad_calls(value, args, kwargs):
            label = f"{room}.{name}({argument}={text})"
            if is_odd and name in WORKERS:
                continue
            if label not in seen and choose(label):
                seen.add(label)
                found.append(outcome_of(label, argument, is_odd, call))
        raise EnoughError

    names = {"jax": jax, "jnp": jnp, **{other: getattr(module, other) for other in module.__all__}}
    names[name] = recorder
    docstring = inspect.getdoc(inspect.unwrap(value)) or ""
    docstring += f"\n\n>>> {MORE_CALLS.get(f'{room}.{name}', '')}\n"
    test = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(test, out=lambda text: None)
    return found
