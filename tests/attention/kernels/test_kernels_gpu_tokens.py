"""The decode kernel for listed tokens without a GPU: interpreted and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lowered, relative_error
from tiers import by_night

from toolkit.attention import sparse
from toolkit.attention.kernels import dispatch
from toolkit.attention.kernels.gpu.tokens import attend_tokens
from toolkit.attention.sparse import protocol

BF16, ROUNDED = jnp.bfloat16, 0.005
BUDGET = sparse.FixedTokens(160)
SYSTEMS = {
    "tactic": {"refresh_every": 16, "segment": 64, "iterations": 2},
    "hata": {"bits": 32},
    "pqcache": {"sinks": 4, "bits": 2, "iterations": 1},
    "quest": {"page_size": 16},
}


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), BF16) for shape in shapes]


def test_it_is_attention_to_the_tokens_asked_for():
    """In any order, with gaps, none at all; NaN in a token that is listed and not asked for."""
    q, keys, values = drawn((2, 3, 64), (300, 64), (300, 64))
    random = np.random.default_rng(1)
    tokens = np.stack([random.permutation(np.arange(2, 300))[:270] for _ in range(2)])
    is_asked = random.random((2, 270)) < 0.4
    is_asked[1] = False
    asked = tokens[0][is_asked[0]]
    tokens = np.where(is_asked, tokens, 1)
    keys, values = keys.at[:2].set(jnp.nan), values.at[:2].set(jnp.nan)
    arrays = q, keys, values, jnp.asarray(tokens, jnp.int32), jnp.asarray(is_asked)
    out, lse = attend_tokens(*arrays, interpret=True)
    q, keys, values = (np.asarray(x, np.float64) for x in (q[0], keys, values))
    p = np.exp(q @ keys[asked].T)
    total = p.sum(axis=1, keepdims=True)
    assert relative_error(out[0], p / total @ values[asked]) < ROUNDED
    np.testing.assert_allclose(lse[0], np.log(total)[:, 0], rtol=1e-5, atol=1e-5)
    assert not out[1].any()
    assert bool(jnp.all(lse[1] == -jnp.inf))


@pytest.mark.slow
@pytest.mark.parametrize("name", by_night({"quest"}, SYSTEMS))
def test_a_step_is_that_of_the_gathered_rows(name, monkeypatch, request):
    """Rows of unequal lengths, by every system that ranks tokens, and by small pages."""
    kernel = {"cpu": lambda: partial(attend_tokens, interpret=True)}
    monkeypatch.setattr(dispatch, "TOKEN_KERNELS", kernel)
    request.addfinalizer(protocol._decode.clear_cache)  # compiled with what stands in here
    keys, values, q = drawn((2, 2, 320, 64), (2, 2, 320, 64), (2, 4, 64))
    selector = sparse.SELECTORS[name](**SYSTEMS[name])
    cache = sparse.build(selector, keys, values, jnp.array([310, 100]))
    found, wanted = (
        sparse.decode_step(cache, q, selector, BUDGET, implementation=form)
        for form in ("pallas", "xla")
    )
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.bytes_read.tolist() == wanted.bytes_read.tolist()
    assert relative_error(found.out.astype(float), wanted.out.astype(float)) < ROUNDED
    np.testing.assert_allclose(found.lse, wanted.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="asks Triton for a device")
def test_a_long_cache_lowers_for_cuda():
    shape = jax.ShapeDtypeStruct((1, 8, 32768, 128), BF16)
    selector = sparse.SELECTORS["hata"]()
    step = partial(sparse.decode_step, selector=selector, budget=sparse.FixedTokens(2048))
    cache = jax.eval_shape(
        partial(sparse.build, selector), shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    q = jax.ShapeDtypeStruct((1, 32, 128), BF16)
    assert lowered(partial(step, implementation="pallas"), cache, q).count("xla.gpu.triton") == 1


def test_what_it_cannot_do_is_refused():
    arrays = [jnp.zeros(shape, BF16) for shape in ((1, 1, 48), (64, 48), (64, 48))]
    tokens, is_asked = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
    with pytest.raises(ValueError, match=r"takes 16, 32, .* got q with 48"):
        attend_tokens(*arrays, tokens, is_asked)
    arrays = [x.astype(jnp.float32) for x in arrays]
    with pytest.raises(TypeError, match="takes bfloat16; got q float32"):
        attend_tokens(*arrays, tokens, is_asked)
