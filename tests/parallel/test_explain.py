"""Collectives traced to their causes, in programs whose causes are known."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives
from toolkit.parallel import explain, make_mesh

HERE = Path(__file__)
LAYERS = 3
pytestmark = pytest.mark.usefixtures("source_lines")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


def loss(params, x):
    def layer(h, weights):
        return jnp.tanh(h @ weights["up"]) @ weights["down"], None

    h, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(h**2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def lines_starting(text):
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return {
        f"{HERE.name}:{number}"
        for number, line in enumerate(lines, 1)
        if line.strip().startswith(text)
    }


def array(mesh, shape, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@pytest.fixture(scope="module")
def lowered(mesh):
    params = {
        "up": array(mesh, (LAYERS, 32, 64), None, "data", "model"),
        "down": array(mesh, (LAYERS, 64, 32), None, "model", "data"),
    }
    return jax.jit(step).lower(params, array(mesh, (16, 32), "data"))


def test_collectives_of_a_scanned_step_have_their_causes(lowered):
    explanation = explain(lowered)
    found = explanation.collectives
    assert [one.collective for one in found] == collectives(lowered.compile())
    gathers = [one for one in found if one.collective.kind == "all-gather"]
    products = lines_starting("return jnp.tanh(")
    assert {one.axes for one in gathers} == {("data",)}
    if jax.__version_info__ < (0, 11):  # later ones name the scan
        assert {one.source for one in gathers} == products
    assert {one.collective.count for one in gathers} == {LAYERS}
    origins = {one.origin for one in gathers}
    assert origins == {
        "argument params['up'] P(None, 'data', 'model')",
        "argument params['down'] P(None, 'model', 'data')",
    }
    assert all(one.wanted_by.startswith("dot_general") for one in gathers)
    over_model = [one for one in found if one.axes == ("model",)]
    assert [(one.before, one.after) for one in over_model] == [("partial sums", "whole")] * 2
    assert [one.function for one in over_model] == ["loss.<locals>.layer"] * 2
    scalar = next(one for one in found if one.collective.bytes == 4)
    assert {scalar.source} == lines_starting("return jnp.mean(")


def test_memory_is_predicted_from_shapes_and_shardings(lowered):
    rows = {row.category: row for row in explain(lowered.compile()).memory}
    assert rows["argument params"].predicted == 2 * LAYERS * 32 * 64 * 4 // 8
    assert rows["argument x"].predicted == 16 * 32 * 4 // 4
    assert rows["all arguments"].predicted == rows["all arguments"].compiled
    assert rows["temporaries"].compiled


def test_results_and_permutes_are_named(mesh):
    def shift(x):
        return jax.lax.ppermute(x, "model", [(0, 1), (1, 0)])

    moved = jax.shard_map(shift, mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"))
    x = array(mesh, (16, 32), None, "model")
    (one,) = explain(jax.jit(moved).lower(x).compile()).collectives
    assert (one.collective.kind, one.axes) == ("collective-permute", ("model",))
    assert (one.origin, one.wanted_by) == (
        "argument x P(None, 'model')",
        "result of the program P(None, 'model')",
    )


def test_groups_over_several_axes(mesh):
    x = array(mesh, (16, 32), ("data", "model"))
    (one,) = explain(jax.jit(jnp.sum).lower(x).compile()).collectives
    assert one.axes == ("data", "model")


def test_lines_are_those_of_this_source_though_another_compiled_it_first(mesh):
    """Two checkouts share a persistent cache: the same program from other files."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs

    def lowered(file):
        names = {}
        exec(compile("def total(x):\n    return (3.5 * x).sum()", file, "exec"), names)
        return jax.jit(names["total"]).lower(array(mesh, (16, 32), "data"))

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        for file in ("first.py", "second.py"):
            lowered(file).compile()
            (one,) = explain(lowered(file)).collectives
            assert one.source == f"{file}:2"
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_description_and_picture(lowered):
    explanation = explain(lowered)
    text = str(explanation)
    assert text.startswith("mesh: data=4, model=2; a device sends")
    assert re.search(r"2 +all-gather +data +4,096 +3 ", text)
    drawn = explanation.draw()
    titles = [axes.get_title(loc="left") for axes in drawn.axes]
    assert titles == ["Bytes a device sends, compiled", "Bytes a device holds"]


def test_a_program_of_one_device_has_no_collectives():
    x = jnp.ones((8, 8))
    explanation = explain(jax.jit(jnp.dot).lower(x, x).compile())
    assert explanation.collectives == ()
    assert "no collectives" in str(explanation)
    assert explanation.draw().axes
