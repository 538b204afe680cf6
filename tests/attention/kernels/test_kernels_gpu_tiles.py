"""The kernels of a prompt that reads some tiles, without a GPU: interpreted and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lowered, relative_error

from toolkit.attention.kernels import dispatch
from toolkit.attention.kernels.gpu.tiles import attend_tiles as kernel
from toolkit.attention.kernels.gpu.tiles import tiles_above
from toolkit.attention.sparse.prefill import Tiles, attend_tiles, sale, sale_tiles, tiles
from toolkit.attention.sparse.prefill.tiles import token_mask

BF16, ROUNDED = jnp.bfloat16, 0.005
TIME, SIZES = 100, {"query_block": 32, "key_block": 16}


def drawn(*shapes, scale=1.0):
    random = np.random.default_rng(0)
    return [jnp.asarray(scale * random.standard_normal(shape), BF16) for shape in shapes]


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_exact_over_the_tiles_that_are_kept(is_causal, monkeypatch, request):
    """Two heads to a key head, a length that ends inside of a tile, rows that keep nothing."""
    monkeypatch.setattr(dispatch, "TILE_KERNELS", {"cpu": lambda: partial(kernel, interpret=True)})
    request.addfinalizer(tiles._attend_by_kernel.clear_cache)
    q, k, v = drawn((2, TIME, 4, 16), (2, TIME, 2, 16), (2, TIME, 2, 16))
    kept = jnp.asarray(np.random.default_rng(1).random((2, 4, 4, 7)) < 0.5).at[0, 0, 1].set(False)
    chosen = Tiles(kept, None, **SIZES)
    out, lse = attend_tiles(q, k, v, chosen, is_causal=is_causal, implementation="pallas")
    mask = np.asarray(token_mask(chosen, TIME, TIME, is_causal=is_causal))
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    x = 0.25 * np.einsum("bthd,bshd->bhts", q, np.repeat(k, 2, 2))
    y = np.where(mask, np.exp(x), 0)
    total = y.sum(axis=-1, keepdims=True)
    p = y / np.where(total == 0, 1, total)
    wanted = np.einsum("bhts,bshd->bthd", p, np.repeat(v, 2, 2))
    assert relative_error(out.astype(float), wanted) < ROUNDED
    with np.errstate(divide="ignore"):
        wanted = np.log(total[..., 0]).swapaxes(1, 2)
    np.testing.assert_allclose(lse, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("sink", "local"), [(16, 32), (0, 0), (40, 100)])
def test_the_tiles_are_those_of_the_form_in_xla(sink, local, monkeypatch, request):
    own = {"cpu": lambda: partial(tiles_above, interpret=True)}
    monkeypatch.setattr(dispatch, "SALE_KERNELS", own)
    request.addfinalizer(sale._kept_by_kernel.clear_cache)
    q, k = drawn((2, TIME, 4, 16), (2, TIME, 2, 16), scale=1.5)
    taus = jnp.array([0.0, 0.2, 1.0, 4.0])
    how = {"threshold": taus, "sink": sink, "local": local, **SIZES}
    found, wanted = (sale_tiles(q, k, implementation=form, **how) for form in ("pallas", "xla"))
    assert found.kept.tolist() == wanted.kept.tolist()
    dropped = ~np.asarray(wanted.kept)[:, :, 3, :].all(axis=(0, 2))
    assert dropped.any() == (local < TIME)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="asks Triton for a device")
def test_a_long_prompt_lowers_for_cuda():
    q, k = shape(1, 65536, 8, 128), shape(1, 65536, 2, 128)
    text = lowered(lambda q, k: sale_tiles(q, k, implementation="pallas").kept, q, k)
    assert text.count("xla.gpu.triton") == 1
    chosen = Tiles(shape(1, 8, 1024, 2048, dtype=bool), None, query_block=64, key_block=32)
    text = lowered(partial(attend_tiles, implementation="pallas"), q, k, k, chosen)
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="asks Triton for a device")
def test_an_odd_number_of_tiles_lowers_for_cuda():
    q = shape(2, 7 * 32, 4, 16)
    text = lowered(lambda q: sale_tiles(q, q, implementation="pallas").kept, q)
    assert text.count("xla.gpu.triton") == 1


def test_what_they_cannot_do_is_refused():
    q = k = v = jnp.zeros((1, 64, 1, 16), BF16)
    kept = jnp.ones((1, 1, 2, 4), bool)
    run = partial(attend_tiles, implementation="pallas")
    with pytest.raises(ValueError, match="wants tiles without columns"):
        run(q, k, v, Tiles(kept, jnp.zeros((1, 1, 2), jnp.int32), **SIZES))
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        run(q, k, v, Tiles(kept, None, **SIZES))
    with pytest.raises(TypeError, match="takes bfloat16; got q float32"):
        run(*(x.astype(jnp.float32) for x in (q, k, v)), Tiles(kept, None, **SIZES))
    with pytest.raises(ValueError, match=r"a key_block of .* got 20"):
        sale_tiles(q, k, query_block=32, key_block=20, implementation="pallas")
    with pytest.raises(ValueError, match="is_rounded"):
        sale_tiles(q, k, **SIZES, is_rounded=False, implementation="pallas")
