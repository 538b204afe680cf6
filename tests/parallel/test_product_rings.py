"""Products in rings: equal to the whole ones in value and gradient, and hidden on TPUs."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives
from toolkit.parallel import (
    all_gather_matmul,
    column_parallel,
    make_mesh,
    matmul_reduce_scatter,
    row_parallel,
)
from toolkit.planning import cluster, timeline

BATCH, WIDTH, EACH = 2, 6, 3  # three tokens per device: an odd size
TOLERANCE = 1e-12


def pair(x, up, down, *, axis="model", rings=0):
    """act(x W_up) W_down, with tokens cut along the axis outside of it."""
    how = {"axis": axis, "time_axis": x.ndim - 2, "rings": rings}
    return row_parallel(jnp.tanh(column_parallel(x, up, **how)), down, **how)


def over(mesh, function, check_vma=True):
    x, cuts = P(None, "model"), (P(None, "model"), P("model"))
    return jax.shard_map(function, mesh=mesh, in_specs=(x, *cuts), out_specs=x, check_vma=check_vma)


@pytest.mark.parametrize(("devices", "check_vma"), [(1, True), (2, False), (5, True), (8, False)])
@pytest.mark.parametrize("rings", [1, 2])
def test_a_pair_in_rings_is_the_whole_pair(devices, check_vma, rings):
    """Value and gradients in float64, at odd sizes; the bytes of the whole collectives."""
    with enable_x64(True):
        mesh = make_mesh({"model": devices}, devices=jax.devices()[:devices])
        draw = partial(np.random.default_rng(devices).normal, size=None)
        x, weights = (draw(size=(BATCH, devices * EACH, WIDTH)) for _ in range(2))
        up, down = draw(size=(WIDTH, 2 * devices)), draw(size=(2 * devices, WIDTH))

        def graded(function):
            loss = lambda x, up, down: jnp.sum(weights * function(x, up, down))  # noqa: E731
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

        wanted = graded(lambda x, up, down: jnp.tanh(x @ up) @ down)(x, up, down)
        found = graded(over(mesh, partial(pair, rings=rings), check_vma)).lower(x, up, down)
        compiled = found.compile()
        for left, right in zip(
            jax.tree.leaves(compiled(x, up, down)), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)
        if check_vma and devices > 1:
            kinds = Counter(one.kind for one in collectives(compiled))
            assert not {"all-gather", "reduce-scatter"} & kinds.keys()
            forward = jax.jit(over(mesh, partial(pair, rings=rings))).lower(x, up, down).compile()
            whole = jax.jit(over(mesh, pair)).lower(x, up, down).compile()
            sent = [sum(one.bytes_sent for one in collectives(each)) for each in (forward, whole)]
            assert sent[0] == sent[1]
            assert kinds["collective-permute"] == 4 * (devices - 1)


def test_tokens_arrive_in_their_order():
    """Control: a ring that mixes up sources would pass on equal tokens, and fails on these."""
    mesh = make_mesh({"model": 4}, devices=jax.devices()[:4])
    x = jnp.arange(8.0)[:, None]
    for rings in (1, 2):
        gather = partial(all_gather_matmul, axis="model", time_axis=0, rings=rings)
        made = jax.shard_map(gather, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))
        np.testing.assert_array_equal(made(x, jnp.ones((1, 1)))[:8], x)


@pytest.mark.parametrize(
    ("function", "how", "words"),
    [
        (all_gather_matmul, {"rings": 3, "time_axis": 0}, "rings: got 3, wanted 1"),
        (matmul_reduce_scatter, {"rings": 0, "time_axis": 0}, "rings: got 0, wanted 1"),
        (all_gather_matmul, {"time_axis": 1}, "time_axis=1: want one of x's 2 axes but the last"),
        (matmul_reduce_scatter, {"time_axis": 0}, "of size 3, is not divisible .* 4 would be"),
        (row_parallel, {"time_axis": 0, "rings": 2}, "of size 3, is not divisible .* 4 would be"),
        (column_parallel, {"rings": 1}, "rings: got 1 without time_axis"),
    ],
)
def test_what_cannot_be_done_is_refused(function, how, words):
    mesh = make_mesh({"model": 2}, devices=jax.devices()[:2])
    made = partial(function, axis="model", **how)
    made = jax.shard_map(made, mesh=mesh, in_specs=(P(), P()), out_specs=P("model"))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(made, jnp.ones((3, 4)), jnp.ones((4, 4)))


@pytest.mark.nightly
def test_on_tpus_rings_hide_behind_their_products():
    """Compiled ahead of time for four chips: asynchronous pairs, and what lies between them.

    Durations are modelled by `timeline`, and are those of docs/sharding.md: whole collectives hide
    nothing forward, both ways hide all.
    """
    pytest.importorskip("libtpu")
    chips = "v5e:2x2"
    mesh = Mesh(np.array(cluster(chips).devices()).reshape(4), ("model",))
    rows, columns = P("model"), P(None, "model")

    def shape(size, cut):
        sharding = NamedSharding(mesh, cut)
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding)

    arguments = (
        shape((8192, 4096), rows), shape((4096, 16384), columns), shape((16384, 4096), rows),
    )  # fmt: skip
    forward, backward = {}, {}
    for rings in (0, 2):
        made = jax.shard_map(
            partial(pair, rings=rings), mesh=mesh, in_specs=(rows, columns, rows), out_specs=rows
        )
        gradients = lambda dy, *args, made=made: jax.vjp(made, *args)[1](dy)  # noqa: E731
        compiled = jax.jit(made).lower(*arguments).compile()
        forward[rings] = timeline(compiled, chips)
        backward[rings] = timeline(
            jax.jit(gradients).lower(arguments[0], *arguments).compile(), chips
        )
        if rings:
            text = compiled.as_text() or ""
            assert len(re.findall(r"= .* collective-permute-start\(", text)) == 2 * 3
            assert not re.findall(r"= .* (all-gather|reduce-scatter)\(", text)
    whole, hopping = forward[0], forward[2]
    assert whole.hidden < 0.05 * whole.communicating
    assert hopping.hidden > 0.95 * hopping.communicating
    assert backward[0].hidden == pytest.approx(backward[0].communicating / 3, rel=0.05)
    milliseconds = [1e3 * of[rings].step_seconds for of in (forward, backward) for rings in (0, 2)]
    assert milliseconds == pytest.approx([4.08, 3.52, 8.29, 8.92], rel=0.02)
