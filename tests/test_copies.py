"""What a public function makes of a model shares no variable with the model it was given."""

import importlib
import inspect
import re
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import toolkit
from toolkit._compat import set_value
from toolkit.conversion import ConversionPlan, convert, student_from, upcycled
from toolkit.conversion.stage import Course, align, distil, extend
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    rotate_latents,
    with_loops,
    with_slices,
    with_windows,
)

ROOMS = ("looped", "conversion", "language", "training", "parallel", "planning", "experiments")
TOKENS = jnp.arange(8).reshape(1, 8)
LATENTS = {"latent_size": 8, "key_size": 4, "rope_size": 4, "value_size": 4}


def build(pattern):
    words = set(pattern.split())
    options = {"mla": LATENTS} if "mla" in words else {}
    config = LoopedConfig.tiny(
        pattern, 2, width=16, heads=2, vocabulary=16, residual_gate=False, options=options
    )
    return LoopedLM(config, rngs=nnx.Rngs(0))


def converted(teacher):
    """By a plan that trains a part, so that what is trained and what is not are both returned."""
    sample = lambda data, step, time: (jnp.ones((1, time), int),) * 2  # noqa: E731
    lengths = {"align_time": 8, "distil_time": 8}
    plan = ConversionPlan(1, distil_steps=1, top_k=4, trained="mixers", **lengths)
    return convert(teacher, None, sample, plan=plan, restored=1, is_progress_shown=False).model


MADE = {
    "conversion.upcycled": ("full full", lambda model: upcycled(model, rngs=nnx.Rngs(1))),
    "looped.rotate_latents": ("mla mla", lambda model: rotate_latents(model, TOKENS)),
    "looped.with_loops": ("full gdn", lambda model: with_loops(model, 3)),
    "looped.with_slices": ("mla mla", lambda model: with_slices(model, 2)),
    "looped.with_windows": ("full gdn", lambda model: with_windows(model, "4")),
    "conversion.convert": ("full full", converted),
    "conversion.student_from": (
        "full full",
        lambda model: student_from(model, "gdn full", rngs=nnx.Rngs(1)),
    ),
}
SLOW = {"conversion.convert"}


def is_model(kind):
    """Whether values of an annotation are models, or hold one as a field does."""
    if isinstance(kind, typing.TypeVar):
        return is_model(kind.__bound__)
    if not inspect.isclass(kind):
        return any(map(is_model, typing.get_args(kind)))
    if issubclass(kind, nnx.Module) or kind.__name__ == "Configured":
        return True
    return any(map(is_model, inspect.get_annotations(kind).values()))


def test_every_function_that_takes_and_returns_a_model_is_tried():
    found = set()
    for room in ROOMS:
        module = importlib.import_module(f"toolkit.{room}")
        for name in module.__all__:
            function = inspect.unwrap(getattr(module, name))
            if not inspect.isfunction(function):
                continue
            kinds = dict(function.__annotations__)
            result = kinds.pop("return", None)
            home = function.__module__.split(".")[1]
            if is_model(result) and any(map(is_model, kinds.values())):
                found.add(f"{home}.{name}")
    assert found == set(MADE)


def values(model):
    return jax.tree.map(lambda x: np.array(x), nnx.to_pure_dict(nnx.state(model)))


def overwrite(model):
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            set_value(node, jnp.full_like(node[...], 7))


def same(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


TRIED = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MADE]


@pytest.mark.parametrize("name", TRIED)
def test_neither_sees_what_is_written_to_the_other(name):
    pattern, function = MADE[name]
    model = build(pattern)
    before = values(model)
    first, second = function(model), function(model)
    made = values(second)
    assert same(values(model), before), "the function itself changed it"
    overwrite(first)
    assert same(values(model), before)
    assert same(values(second), made)
    overwrite(model)
    assert same(values(second), made)
    assert not same(values(model), before)  # of a shared variable these tests would know


def test_a_step_of_the_student_leaves_the_teacher():
    teacher = build("full full")
    before = values(teacher)
    student = student_from(teacher, "gdn full", rngs=nnx.Rngs(1))
    gradients = nnx.grad(lambda model: jnp.mean(model(TOKENS) ** 2))(student)
    nnx.update(student, jax.tree.map(lambda x, g: x - g, nnx.state(student), gradients))
    assert same(values(teacher), before)


def test_no_file_joins_a_model_with_its_own_variables():
    """`nnx.merge` uses the variables that it is given; `nnx.clone` makes new ones."""
    joined = re.compile(r"nnx\.merge\(\s*\*\s*nnx\.split\(")
    files = Path(toolkit.__file__).parent.rglob("*.py")
    assert not [str(path) for path in files if joined.search(path.read_text())]


STAGES = {
    "align": align,
    "distil": distil,
    "extend": lambda course, student: extend(course, student, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_of_a_conversion_returns_shares_nothing_with_its_student(stage, steps):
    """Once what was not trained was shared, and of a stage without steps everything."""
    sample = lambda data, step, time: (jnp.ones((1, time), int),) * 2  # noqa: E731
    times = {"align_time": 8, "distil_time": 8, "extend_times": (8,)}
    counts = {"align_steps": steps, "distil_steps": steps, "extend_steps": steps}
    plan = ConversionPlan(**counts, **times, top_k=4, trained="mixers")
    teacher = build("full full")
    student = student_from(teacher, "gdn full", rngs=nnx.Rngs(1))
    before = values(student)
    course = Course(teacher, None, sample, plan, is_progress_shown=False)
    made = STAGES[stage](course, student).model
    assert same(values(student), before)
    assert same(values(made), before) == (steps == 0)
    overwrite(made)
    assert same(values(student), before)
