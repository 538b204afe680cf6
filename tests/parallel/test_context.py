"""Attention over tokens on several devices is softmax attention, and sends what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import PartitionSpec as P

from toolkit.attention import softmax_attention
from toolkit.measure import collectives
from toolkit.parallel import (
    context_attention,
    from_zigzag,
    make_mesh,
    ring_attention,
    to_zigzag,
    ulysses_attention,
    zigzag_order,
)

TOLERANCE = 2e-6  # float32; sums over keys are taken in another order
DOUBLE = 1e-14  # float64; where any part were computed in float32, 1e-7 would be left
DEVICES = 8
METHODS = ("ring", "zigzag", "ulysses")


def inputs(batch=2, time=32, heads=3, key_value_heads=3, key=4, value=5, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(heads, key), (key_value_heads, key), (key_value_heads, value), (heads, value)]
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(k, (batch, time, *shape)).astype(dtype) for k, shape in pairs]


def value_and_gradients(attend, q, k, v, weights):
    def loss(q, k, v):
        out = attend(q, k, v)
        wide = jnp.promote_types(out.dtype, jnp.float32)
        return (out.astype(wide) * weights.astype(wide)).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def documents(time):
    return jnp.asarray([[0] * 5 + [1] * 9 + [0] * (time - 14), [7] * 20 + [2] * (time - 20)])


CASES = {
    "grouped, documents": (
        {"heads": 6, "key_value_heads": 2},
        {"segment_ids": documents(32), "scale": 0.3},
    ),
    "odd heads, window": ({}, {"sliding_window": 7}),
    "not causal": ({"heads": 8, "key_value_heads": 8}, {"is_causal": False}),
    "window both ways": (
        {"heads": 4, "key_value_heads": 4},
        {"is_causal": False, "sliding_window": 5},
    ),
}


SLOW = [pytest.param(case, marks=pytest.mark.nightly) for case in list(CASES)[1:]]


@pytest.mark.parametrize("case", [next(iter(CASES)), *SLOW])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_softmax_attention(method, case):
    sizes, how = CASES[case]
    arrays = inputs(**sizes)
    mesh = make_mesh({"data": 2, "context": 4})
    found = value_and_gradients(
        lambda q, k, v: context_attention(q, k, v, mesh, method, batch_axis="data", **how), *arrays
    )
    wanted = value_and_gradients(lambda q, k, v: softmax_attention(q, k, v, **how)[0], *arrays)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_float64_is_exact_in_value_and_gradient(method):
    with enable_x64(True):
        arrays = inputs(dtype=jnp.float64)
        mesh = make_mesh({"context": 4}, devices=jax.devices()[:4])
        found = value_and_gradients(
            lambda q, k, v: context_attention(q, k, v, mesh, method), *arrays
        )
        wanted = value_and_gradients(lambda q, k, v: softmax_attention(q, k, v)[0], *arrays)
        for left, right in zip(found, wanted, strict=True):
            assert left.dtype == jnp.float64
            np.testing.assert_allclose(left, right, atol=DOUBLE, rtol=DOUBLE)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices", [1, 2])
def test_few_devices_and_half_precision(method, devices):
    mesh = make_mesh({"context": devices}, devices=jax.devices()[:devices])
    half = inputs(dtype=jnp.bfloat16)
    found = value_and_gradients(lambda q, k, v: context_attention(q, k, v, mesh, method), *half)
    ours = value_and_gradients(lambda q, k, v: softmax_attention(q, k, v)[0], *half)
    exact = value_and_gradients(
        lambda q, k, v: softmax_attention(q, k, v)[0], *(x.astype(jnp.float32) for x in half)
    )
    for left, right, truth in zip(found, ours, exact, strict=True):
        assert left.dtype == jnp.bfloat16
        error, own = (jnp.abs(x.astype(jnp.float32) - truth).max() for x in (left, right))
        assert error <= 2 * own + 1e-6  # every part is rounded


@pytest.mark.parametrize(
    "method", ["ulysses", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("ring", "zigzag"))]
)
def test_what_is_not_seen_never_shows(method):
    q, k, v, weights = inputs()
    mesh = make_mesh({"context": DEVICES})
    place = 17
    bad_q, bad_k, bad_v = (x.at[:, place].set(jnp.nan) for x in (q, k, v))
    before = weights.at[:, place:].set(0)
    found = value_and_gradients(
        lambda q, k, v: context_attention(q, k, v, mesh, method), bad_q, bad_k, bad_v, before
    )
    clean = value_and_gradients(
        lambda q, k, v: context_attention(q, k, v, mesh, method), q, k, v, before
    )
    for left, right in zip(found, clean, strict=True):
        np.testing.assert_array_equal(left[:, :place], right[:, :place])


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        # Both passes begin with the same hop of keys and values, which the compiler does once.
        ("ring", {"collective-permute": 2 * 7}, {"collective-permute": (2 + 4) * 7 - 2}),
        ("ulysses", {"all-to-all": 4}, {"all-to-all": 8}),
    ],
)
def test_collectives_are_the_textbook_s(method, forward, backward):
    q, k, v, weights = inputs(heads=8, key_value_heads=8)
    mesh, cut = make_mesh({"context": DEVICES}), P(None, "context")

    def attend(q, k, v):
        if method == "ulysses":
            return ulysses_attention(q, k, v, "context")
        return ring_attention(q, k, v, "context")

    def gradients(q, k, v, weights):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(weights)

    for function, arrays, wanted in (
        (attend, (q, k, v), forward),
        (gradients, (q, k, v, weights), backward),
    ):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        counts = {}
        for item in collectives(jax.jit(sharded).lower(*arrays).compile()):
            assert item.is_count_exact
            counts[item.kind] = counts.get(item.kind, 0) + item.count
        assert counts == wanted


def test_zigzag_is_fair_and_comes_back():
    mesh, cut = make_mesh({"context": DEVICES}), P(None, "context")
    text = jnp.arange(32)[None]

    def over(function):
        return jax.shard_map(
            lambda x: function(x, "context"), mesh=mesh, in_specs=cut, out_specs=cut
        )

    turned = over(to_zigzag)(text)
    np.testing.assert_array_equal(turned[0], zigzag_order(32, DEVICES))
    np.testing.assert_array_equal(over(from_zigzag)(turned), text)
    seen = (turned[0] + 1).reshape(DEVICES, -1).sum(1)
    assert len(set(seen.tolist())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "zigzag", "time": 24}, "time=24 is not divisible by 16 parts.*; 32 would be"),
        ({"method": "ring", "time": 30}, "time=30 is not divisible by 8 parts.*; 32 would be"),
        ({"axis": "model"}, "axis 'model': the mesh has 'context'"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_what_does_not_fit_is_said(arguments, message):
    arguments = dict(arguments)
    q, k, v, _ = inputs(time=arguments.pop("time", 32))
    method = arguments.pop("method", "ring")
    with pytest.raises(ValueError, match=message):
        context_attention(q, k, v, make_mesh({"context": DEVICES}), method, **arguments)


def test_explicit_axes_are_refused():
    q, k, v, _ = inputs()
    mesh = make_mesh({"context": DEVICES}, axis_type="explicit")
    with pytest.raises(ValueError, match=r"mesh has axis types .*: want auto axes"):
        context_attention(q, k, v, mesh, "ring")


@pytest.mark.parametrize("method", ["ring", "zigzag"])
def test_a_ring_refuses_forward_mode_in_one_line(method):
    q, k, v, _ = inputs()
    mesh = make_mesh({"context": DEVICES})
    with pytest.raises(NotImplementedError, match=r"^ring attention has no forward mode; ulysses"):
        jax.jvp(lambda q: context_attention(q, k, v, mesh, method), (q,), (q,))
