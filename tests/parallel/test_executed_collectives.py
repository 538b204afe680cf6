"""Collectives along trees equal jax's own, forward and backward, on simulated devices."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from toolkit._compat import varying
from toolkit.measure import collectives as compiled_collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce,
    reduce_scatter,
)
from toolkit.schedules.collectives import (
    forest,
    from_msccl,
    named_topology,
    ring,
    to_msccl,
    to_program,
)

TOLERANCE = 1e-6  # float32, relative; sums in another order
NAMES = ["ring:8", "hypercube:3", "dgx1", "star:8", "leaf-spine:2x4x1", "a100:2x4"]


@functools.cache
def program(name, collective, root=0):
    return to_program(forest(named_topology(name), collective, root))


def on_devices(function, *arrays, devices=8):
    """Run a function of one device's parts; what it returns is joined along the first axis."""
    mesh = make_mesh({"x": devices})
    specs = (P("x"),) * len(arrays)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("x")))(*arrays)


def integers(*shape):
    return jax.random.randint(jax.random.key(0), shape, -1000, 1000)


def assert_same(ours, theirs, *arrays):
    """Of integers, to the bit."""
    np.testing.assert_array_equal(on_devices(ours, *arrays), on_devices(theirs, *arrays))


@pytest.mark.parametrize("name", NAMES)
def test_integers_agree_to_the_bit(name):
    x = integers(8 * 3, 7)  # 21 numbers per device: no multiple of the number of trees
    gather, scatter = program(name, "all-gather"), program(name, "reduce-scatter")
    total = program(name, "all-reduce")
    wide = integers(8 * 16, 3)

    def ours(x, wide):
        return (
            all_gather(x, "x", gather, tiled=True).ravel(),
            reduce_scatter(wide, "x", scatter, tiled=True).ravel(),
            all_reduce(x, "x", total).ravel(),
        )

    def theirs(x, wide):
        return (
            lax.all_gather(x, "x", tiled=True).ravel(),
            lax.psum_scatter(wide, "x", tiled=True).ravel(),
            varying(lax.psum(x, "x"), ("x",)).ravel(),
        )

    for a, b in zip(on_devices(ours, x, wide), on_devices(theirs, x, wide), strict=True):
        np.testing.assert_array_equal(a, b)


def test_axes_as_jax_puts_them():
    gather, scatter = program("ring:8", "all-gather"), program("ring:8", "reduce-scatter")
    x = integers(16, 3, 8)
    for axis in (0, 1, -1):
        for tiled in (False, True):
            how = {"axis": axis, "tiled": tiled}
            assert_same(
                lambda x, how=how: all_gather(x, "x", gather, **how).ravel(),
                lambda x, how=how: lax.all_gather(x, "x", **how).ravel(),
                x,
            )
    for tiled in (False, True):
        how = {"scatter_dimension": 2, "tiled": tiled}
        assert_same(
            lambda x, how=how: reduce_scatter(x, "x", scatter, **how).ravel(),
            lambda x, how=how: lax.psum_scatter(x, "x", **how).ravel(),
            x,
        )


def test_one_root():
    spread, total = program("dgx1", "broadcast", 3), program("dgx1", "reduce", 3)
    x = integers(8, 13)
    found = on_devices(lambda x: broadcast(x, "x", spread), x)
    np.testing.assert_array_equal(found, jnp.broadcast_to(x[3], x.shape))
    found = on_devices(lambda x: reduce(x, "x", total), x)
    np.testing.assert_array_equal(found, jnp.zeros_like(x).at[3].set(x.sum(0)))


def losses(gather, scatter, total):
    """A loss that uses the three collectives, with factors that differ by device."""

    def loss(x, weights):
        part = scatter(gather(jnp.sin(x)) * weights)
        return jnp.sum(jnp.cos(part) * total(x * weights[:3]))[None]

    return loss


def test_floats_and_gradients_agree_to_rounding():
    programs = [program("dgx1", each) for each in ("all-gather", "reduce-scatter", "all-reduce")]
    ours = losses(
        lambda x: all_gather(x, "x", programs[0], tiled=True),
        lambda x: reduce_scatter(x, "x", programs[1], tiled=True),
        lambda x: all_reduce(x, "x", programs[2]),
    )
    theirs = losses(
        lambda x: lax.all_gather(x, "x", tiled=True),
        lambda x: lax.psum_scatter(x, "x", tiled=True),
        lambda x: lax.psum(x, "x"),
    )
    x = jax.random.normal(jax.random.key(1), (8 * 3, 5))
    weights = jax.random.normal(jax.random.key(2), (8 * 24, 5))
    found = []
    for loss in (ours, theirs):
        value = lambda x, weights, loss=loss: on_devices(loss, x, weights).sum()  # noqa: E731
        found.append(jax.value_and_grad(value, (0, 1))(x, weights))
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(abs(b).max()))


def test_what_is_only_copied_keeps_every_bit():
    gather = program("hypercube:3", "all-gather")
    x = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45, 3.0] * 8, jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
        found = on_devices(lambda x: all_gather(x, "x", gather, tiled=True), x.astype(dtype))
        wanted = jnp.tile(x.astype(dtype), 8)
        np.testing.assert_array_equal(
            np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8)
        )


def test_a_round_sends_once_to_every_neighbour():
    gather = program("ring:8", "all-gather")
    mesh = make_mesh({"x": 8})
    function = jax.jit(
        jax.shard_map(
            lambda x: all_gather(x, "x", gather), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
    )
    found = compiled_collectives(function.lower(jnp.zeros((8, 10))).compile())
    assert [each.kind for each in found] == ["collective-permute"] * 2


def test_a_program_runs_after_a_round_trip_through_msccl():
    total = from_msccl(to_msccl(program("star:8", "all-reduce")))
    x = integers(8, 33)
    found = on_devices(lambda x: all_reduce(x, "x", total), x)
    np.testing.assert_array_equal(found, jnp.broadcast_to(x.sum(0), x.shape))


def test_two_axes_of_a_mesh_and_odd_sizes():
    total = to_program(forest(ring(8), "all-reduce"))
    mesh = make_mesh({"a": 2, "b": 4})
    spec = P(("a", "b"))
    for shape in ((8, 1), (8,), (8, 3, 1)):
        x = integers(*shape)
        function = jax.shard_map(
            lambda x: all_reduce(x, ("a", "b"), total), mesh=mesh, in_specs=spec, out_specs=spec
        )
        np.testing.assert_array_equal(jax.jit(function)(x), jnp.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: all_gather(x, "x", program("ring:8", "all-reduce")), "of an 'all-gather'"),
        (lambda x: all_gather(x, "x", program("ring:4", "all-gather")), "8 devices; the program"),
        (lambda x: all_reduce(x > 0, "x", program("ring:8", "all-reduce")), "got bool"),
        (lambda x: reduce_scatter(x, "x", program("ring:8", "reduce-scatter"), tiled=True),
         "a multiple of 8 entries; got 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        on_devices(call, integers(8, 3))


MANY = """
from toolkit.parallel import make_mesh, simulate_devices
simulate_devices(64)
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from toolkit.parallel.collectives import all_reduce
from toolkit.schedules.collectives import forest, named_topology, to_program
for name, trees in (("h100:2x8", None), ("mi250:2x16", 1), ("torus:8x8", None)):
    program = to_program(forest(named_topology(name), "all-reduce", trees_per_root=trees))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: program.ranks]), ("x",))
    x = np.arange(program.ranks * 999, dtype=np.int32).reshape(-1, 999)
    function = jax.shard_map(
        lambda x: all_reduce(x, "x", program), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    assert (np.asarray(jax.jit(function)(x)) == x.sum(0)).all(), name
"""


@pytest.mark.slow
def test_sixteen_to_sixty_four_devices():
    """In a process of its own, whose CPU shows more devices."""
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
