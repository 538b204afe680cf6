"""Products with all slots of a cache are the plain ones, and on CPUs take about one read of it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import KVCache, softmax_attention_step
from toolkit.attention.softmax.slots import BLOCK, dot_keys, weighted_values

SLOTS = 3 * BLOCK + 1  # some blocks, and a slot that is left


def _drawn(shape, dtype, seed):
    drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(20 * drawn if dtype == "int8" else drawn).astype(dtype)


PRODUCTS = (
    (dot_keys, "bhgk,bhks->bhgs", lambda group, slots: (2, 2, group, 24)),
    (weighted_values, "bhgs,bhvs->bhgv", lambda group, slots: (2, 2, group, slots)),
)


@pytest.mark.parametrize(("function", "equation", "shape"), PRODUCTS, ids=["keys", "values"])
@pytest.mark.parametrize(
    ("dtype", "group"),
    [("float32", 3), ("bfloat16", 1), ("float16", 3), ("int8", 3), ("float8_e4m3fn", 1)],
)
def test_products_with_slots_are_the_plain_ones(function, equation, shape, dtype, group):
    few = "float32" if dtype in ("int8", "float8_e4m3fn") else dtype
    slots, few = _drawn((2, 2, 24, SLOTS), dtype, 0), _drawn(shape(group, SLOTS), few, 1)
    exact = np.einsum(equation, *(np.asarray(x.astype("float32"), "float64") for x in (few, slots)))
    cotangent = _drawn(exact.shape, "float32", 2)
    places = (0, 1) if dtype.startswith(("float32", "float16", "b")) else (0,)

    def plain(few, slots):
        return jnp.einsum(equation, few.astype(jnp.float32), slots.astype(jnp.float32))

    def value_and_gradients(product):
        out, pullback = jax.vjp(
            lambda *own: product(*own, *(few, slots)[len(places) :]), *(few, slots)[: len(places)]
        )
        return out, pullback(cotangent)

    (out, ours), (_, wanted) = (
        jax.jit(value_and_gradients, static_argnums=0)(f) for f in (function, plain)
    )
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
    for own, right in zip(ours, wanted, strict=True):
        assert own.dtype == right.dtype
        tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[own.dtype.name]
        own, right = (np.asarray(x, np.float32) for x in (own, right))
        np.testing.assert_allclose(own, right, rtol=tolerance, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("function", "equation", "shape"), PRODUCTS, ids=["keys", "values"])
def test_narrow_slots_are_never_float32_all_at_once(function, equation, shape, dtype):
    slots = jax.ShapeDtypeStruct((2, 2, 24, 16 * BLOCK), dtype)
    few = jax.ShapeDtypeStruct(shape(1, 16 * BLOCK), jnp.float32)

    def plain(few, slots):  # the control
        return jnp.einsum(equation, few, slots.astype(jnp.float32))

    ours, whole = (
        jax.jit(f).lower(few, slots).compile().memory_analysis().temp_size_in_bytes
        for f in (function, plain)
    )
    assert ours < slots.size < 4 * slots.size <= whole


def test_four_queries_per_key_head_take_little_more_than_one():
    """Least processor time of a step: 1 and 4 query heads per key head read the same bytes."""

    def least(group):
        cache = KVCache.empty(1, 4, 128, 128, 16384)
        q, new = jnp.ones((1, 4 * group, 128)), jnp.ones((1, 4, 128))
        step = jax.jit(
            lambda cache: softmax_attention_step(q, new, new, cache)[1], donate_argnums=0
        )
        seconds = []
        for _ in range(12):
            start = time.process_time()
            cache = jax.block_until_ready(step(cache))
            seconds.append(time.process_time() - start)
        return min(seconds)

    assert least(4) < 4 * least(1)  # 8 times as long with the values as the second operand
