"""The decode kernel for pages of a cache without a GPU: interpreted and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import INTERPRETER, assert_no_races, forget_kernels, lowered, relative_error

from toolkit.attention import sparse
from toolkit.attention.kernels import dispatch
from toolkit.attention.kernels.gpu.pages import attend_pages
from toolkit.attention.sparse import protocol

BF16, ROUNDED = jnp.bfloat16, 0.005
Quest = sparse.SELECTORS["quest"]
QUEST, BUDGET = Quest(page_size=64, sinks=4, recent=16), sparse.FixedTokens(160)


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    forget_kernels()


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), BF16) for shape in shapes]


@pytest.mark.slow
def test_it_is_attention_to_the_slots_asked_for():
    """Pages in any order, in part, not at all; a last page that overlaps; NaN beside."""
    q, keys, values = drawn((2, 3, 64), (2, 300, 64), (2, 300, 64))
    pages = jnp.array([[4, 2, 0, 1], [3, 0, 1, 2]], jnp.int32)
    low = jnp.array([[256, 128, 4, 64], [0, 0, 0, 0]], jnp.int32)
    high = jnp.array([[300, 192, 4, 70], [0, 0, 0, 0]], jnp.int32)
    values = values.at[0, 70:128].set(jnp.nan)
    arrays = q, keys, values, pages, low, high
    out, lse = attend_pages(*arrays, page_size=64, interpret=INTERPRETER)
    assert_no_races()
    asked = np.concatenate([np.arange(*pair) for pair in zip(low[0], high[0], strict=True)])
    q, keys, values = (np.asarray(x[0], np.float64) for x in (q, keys, values))
    p = np.exp(q @ keys[asked].T)
    total = p.sum(axis=1, keepdims=True)
    assert relative_error(out[0], p / total @ values[asked]) < ROUNDED
    np.testing.assert_allclose(lse[0], np.log(total)[:, 0], rtol=1e-5, atol=1e-5)
    assert not out[1].any()
    assert bool(jnp.all(lse[1] == -jnp.inf))


def cache_and_query(capacity=320, length=(310, 100)):
    keys, values, q = drawn((2, 1, capacity, 64), (2, 1, capacity, 64), (2, 4, 64))
    return sparse.build(QUEST, keys, values, jnp.array(length)), q


@pytest.mark.slow
def test_a_step_is_that_of_the_gathered_rows(monkeypatch, request):
    """Rows of unequal lengths; a budget that ends inside of a page."""
    kernel = {"cpu": lambda: partial(attend_pages, interpret=INTERPRETER)}
    monkeypatch.setattr(dispatch, "PAGE_KERNELS", kernel)
    request.addfinalizer(protocol._decode.clear_cache)  # compiled with what stands in here
    cache, q = cache_and_query()
    found, wanted = (
        sparse.decode_step(cache, q, QUEST, BUDGET, implementation=name)
        for name in ("pallas", "xla")
    )
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.bytes_read.tolist() == wanted.bytes_read.tolist()
    assert relative_error(found.out.astype(float), wanted.out.astype(float)) < ROUNDED
    np.testing.assert_allclose(found.lse, wanted.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_cache_of_odd_length_lowers_for_cuda():
    q, keys = (jax.ShapeDtypeStruct(x, BF16) for x in ((2, 3, 64), (2, 300, 64)))
    table = [jax.ShapeDtypeStruct((2, 4), jnp.int32)] * 3
    text = lowered(partial(attend_pages, page_size=64), q, keys, keys, *table)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
def test_a_long_cache_lowers_for_cuda():
    shape = jax.ShapeDtypeStruct((1, 8, 32768, 128), BF16)
    step = partial(sparse.decode_step, selector=QUEST, budget=sparse.FixedTokens(2048))
    cache = jax.eval_shape(
        partial(sparse.build, QUEST), shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    text = lowered(
        partial(step, implementation="pallas"), cache, jax.ShapeDtypeStruct((1, 32, 128), BF16)
    )
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_it_cannot_do_is_refused():
    cache, q = cache_and_query()
    step = partial(sparse.decode_step, cache, q, QUEST, BUDGET, implementation="pallas")
    for how, message in (
        ({"corrects_tail": True}, "no correction of the tail"),
        ({}, "needs an NVIDIA GPU of the Hopper"),
    ):
        with pytest.raises(ValueError, match=message):
            step(**how)
    arrays = [jnp.zeros(shape, BF16) for shape in ((1, 1, 64), (1, 64, 64), (1, 64, 64))]
    pages = [jnp.zeros((1, 1), jnp.int32)] * 3
    with pytest.raises(ValueError, match=r"pages of 64 slots.* got pages of 16"):
        attend_pages(*arrays, *pages, page_size=16)
