"""Blame of programs on explicit axes, whose shardings are part of the arrays' types."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from toolkit.parallel import blame, explain, make_mesh
from toolkit.parallel.faults.variant import variant_of

AXES = {"d": 2, "m": 4}
SUM_OF_PAIR = 2 * 3 / 4 * 4 * 32 * 32  # the all-reduce that is due


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(AXES, axis_type="explicit")


def placed(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def arguments(mesh, up=(None, "m")):
    params = {"up": placed(mesh, (32, 64), *up), "down": placed(mesh, (64, 32), "m")}
    return params, placed(mesh, (64, 32), "d")


def pair(p, x):
    inner = jax.nn.gelu(jnp.matmul(x, p["up"], out_sharding=P("d", "m")))
    return jnp.matmul(inner, p["down"], out_sharding=P("d", None))


def turned(p, x):
    return reshard(pair(p, x), P(None, "d"))


def stacked(p, x):
    """Sharded weights of layers, gathered one at a time; inside a loop, with its gradient."""

    def loss(p):
        def layer(x, w):
            return jax.nn.relu(x @ reshard(w, P(None, None))), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    return jax.grad(loss)(p)


def sent(mesh, function, given):
    with jax.set_mesh(mesh):
        return explain(jax.jit(function).lower(*given)).bytes_sent


WITHOUT = pytest.param(contextlib.nullcontext, marks=pytest.mark.slow)


@pytest.mark.parametrize("context", [jax.set_mesh, WITHOUT])
def test_what_a_program_reshards_is_a_constraint_that_can_change(mesh, context):
    """With the mesh set by the caller, and without."""
    given = arguments(mesh)
    with context(mesh):
        found = blame(turned, given)
    assert found.explanation.bytes_sent == sent(mesh, turned, given) == SUM_OF_PAIR + 2048
    assert found.together[-1].bytes_sent == SUM_OF_PAIR == sent(mesh, pair, given)
    assert "result of the program as P('d',)" in found.together[0].change


@pytest.mark.slow
def test_the_mend_of_a_bad_argument_is_that_of_auto_axes(mesh):
    """The control: rows of the first weight instead of its columns send more, on either mesh."""
    bad, auto = arguments(mesh, up=("m",)), make_mesh(AXES)
    found = blame(pair, bad)
    assert found.explanation.bytes_sent > SUM_OF_PAIR == found.together[-1].bytes_sent
    assert "p/up as P(None, 'm')" in str(found)

    def without_types(p, x):
        constrain = jax.lax.with_sharding_constraint
        inner = constrain(jax.nn.gelu(x @ p["up"]), NamedSharding(auto, P("d", "m")))
        return constrain(inner @ p["down"], NamedSharding(auto, P("d", None)))

    results = NamedSharding(auto, P("d"))
    same = blame(without_types, arguments(auto, up=("m",)), results=results)
    assert same.explanation.bytes_sent == found.explanation.bytes_sent


def test_loops_and_gradients_compile_to_the_same_bytes(mesh):
    given = placed(mesh, (3, 32, 32), None, "m"), placed(mesh, (64, 32), "d")
    found = explain(variant_of(stacked, given, None).compile()).bytes_sent
    assert found == sent(mesh, stacked, given) > 0


def test_a_manual_region_over_some_explicit_axes_is_refused(mesh):
    def part(x):
        return jax.shard_map(jnp.tanh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})(x)

    with pytest.raises(ValueError, match=r"leaves the explicit axes m to the compiler"):
        blame(part, (placed(mesh, (64, 32), "d"),))
    whole = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    assert "all-reduce over d" in str(blame(whole, (placed(mesh, (64, 32), "d"),)))
