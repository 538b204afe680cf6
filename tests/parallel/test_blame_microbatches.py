"""Microbatches of a batch that is cut by rows: the reordered reshape moves nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel import blame, make_mesh
from toolkit.parallel.dataflow.flow import RANKING
from toolkit.parallel.faults.microbatches import reordered
from toolkit.parallel.faults.variant import variant_of

MICRO, ROWS = 4, 64
SINGLE = 1e-5


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"d": 2, "m": 4})


def placed(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def arguments(mesh):
    params = {"up": placed(mesh, (32, 64), None, "m"), "down": placed(mesh, (64, 32), "m")}
    batch = {name: placed(mesh, (MICRO * ROWS, 32), "d") for name in "xy"}
    return params, batch


def error(p, rows):
    return jnp.mean((jnp.tanh(rows["x"] @ p["up"]) @ p["down"] - rows["y"]) ** 2)


def split(batch):
    return jax.tree.map(lambda x: x.reshape(MICRO, ROWS, *x.shape[1:]), batch)


def accumulated(p, batch):
    """Losses and gradients of microbatches, one after another."""

    def part(total, rows):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(error)(p, rows)), None

    start = jnp.zeros(()), jax.tree.map(lambda w: jnp.zeros(w.shape), p)
    return jax.lax.scan(part, start, split(batch))[0]


def evaluated(p, batch):
    return jax.lax.scan(lambda total, rows: (total + error(p, rows), None), 0.0, split(batch))[0]


def test_the_reordered_reshape_is_found_and_moves_no_rows(mesh):
    found = blame(evaluated, arguments(mesh), results=NamedSharding(mesh, P()))
    (change, *_) = found.together
    assert "to (64, 4) and swap these two, not to (4, 64): other rows share" in change.change
    one_sum = 2 * 3 / 4 * 4 * ROWS * 32 / 2  # of a microbatch after the pair of products
    assert change.bytes_sent < MICRO * one_sum * 1.01 < found.explanation.bytes_sent * 0.8


def test_all_arrays_of_a_batch_are_reordered_and_the_sum_stays(mesh):
    """In the modelled program nothing moves along "d" but gradients; values are those of before."""
    params, batch = arguments(mesh)
    results = NamedSharding(mesh, P()), jax.tree.map(lambda leaf: leaf.sharding, params)
    variant = variant_of(accumulated, (params, batch), results)
    ((_, changed),) = reordered(variant)
    before, after = variant.flow(RANKING), changed.flow(RANKING)
    assert after.flops == before.flops / 2  # without it every device computes all rows
    rows = MICRO * ROWS * 32 * 4
    assert not [move for move in after.moves if move.axis == "d" and move.kind == "all-gather"]
    assert sum(move.bytes_sent for move in before.moves if move.kind == "all-gather") == rows
    keys = jax.random.split(jax.random.key(0), 4)
    shapes, tree = jax.tree.flatten((params, batch))
    values = [jax.random.normal(key, one.shape) for key, one in zip(keys, shapes, strict=True)]
    values = jax.tree.unflatten(tree, values)
    given = jax.device_put(values, jax.tree.map(lambda leaf: leaf.sharding, (params, batch)))
    wanted = jax.tree.leaves(jax.jit(accumulated)(*values))
    for one, other in zip(changed.compile()(*given), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=SINGLE, atol=SINGLE)


def returns_rows(p, batch):
    def part(total, rows):
        return total, rows["x"] @ p["up"]

    return jax.lax.scan(part, 0.0, split(batch))[1].reshape(MICRO * ROWS, -1)


def splits_one_of_two(p, batch):
    def part(total, rows):
        return total + error(p, {"x": rows[0], "y": rows[1]}), None

    halves = batch["y"][:ROWS] * jnp.ones((MICRO, 1, 1))
    return jax.lax.scan(part, 0.0, (split(batch["x"]), halves))[0]


def reads_rows_itself(p, batch):
    return evaluated(p, batch) + split(batch)["x"][0].sum()


@pytest.mark.parametrize("function", [returns_rows, splits_one_of_two, reads_rows_itself])
def test_no_row_that_something_else_reads_changes_its_place(mesh, function):
    assert not list(reordered(variant_of(function, arguments(mesh), None)))
