"""The decode kernel of latent attention without a GPU: interpreted, lowered and compiled."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import H200, INTERPRETER, assert_no_races, forget_kernels, lowered, relative_error
from jax.experimental.topologies import get_topology_desc
from jax.sharding import NamedSharding, PartitionSpec
from latent_layers import small

from toolkit.attention.kernels import dispatch
from toolkit.attention.kernels.gpu.latent import decode
from toolkit.attention.latent import (
    LatentCache,
    LatentConfig,
    LatentWeights,
    fold,
    mla_step,
    slice_latents,
    tpla_step,
)
from toolkit.parallel import make_mesh
from toolkit.parallel.latent import decode_step, place_slices

BF16, F32 = jnp.bfloat16, jnp.float32
ROUNDED, SCALE = 0.005, 0.2  # of weights to bfloat16, as in the other kernels' tests
CONFIG = LatentConfig(width=32, heads=8, latent_size=128, key_size=16, rope_size=64, value_size=16)


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    forget_kernels()


def drawn(heads, latent, filled, slots):
    """Queries and a cache whose empty slots hold NaN."""
    random = np.random.default_rng(0)
    sizes = ((heads, latent), (heads, 64), (slots, latent), (slots, 64))
    filled = np.array(filled, np.int32)
    arrays = [random.standard_normal((len(filled), *shape)) for shape in sizes]
    for rows in arrays[2:]:
        rows[np.arange(slots)[None] >= filled[:, None]] = np.nan
    return [*(jnp.asarray(x, BF16) for x in arrays), jnp.asarray(filled)]


def equation(q, rope_q, latents, rope_keys, filled):
    """In float64, row by row and token by token; no token: 0 and -inf."""
    outs, sums = [], []
    for row, count in enumerate(np.asarray(filled)):
        c, r = (np.asarray(x[row, :count], np.float64) for x in (latents, rope_keys))
        s = SCALE * (
            np.asarray(q[row], np.float64) @ c.T + np.asarray(rope_q[row], np.float64) @ r.T
        )
        most = s.max(axis=1, keepdims=True) if count else 0
        p = np.exp(s - most)
        total = p.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            sums.append((most + np.log(total))[:, 0])
        outs.append(p @ c / np.where(total == 0, 1, total))
    return np.array(outs), np.array(sums)


# Heads, channels of a latent, filled slots of every row, slots.
CASES = {
    "a shard of four": (5, 128, (150, 64, 0), 150),
    "two warpgroups": (65, 512, (70,), 70),
    "few slots": (1, 64, (3, 1), 9),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_equation(case):
    arrays = drawn(*CASES[case])
    out, lse = decode(*arrays, scale=SCALE, interpret=INTERPRETER)
    assert_no_races()
    wanted, sums = equation(*arrays)
    assert relative_error(out, wanted) < ROUNDED
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_steps_are_those_of_the_xla_form(monkeypatch, request):
    """One split of a long cache, and many of a short one, through `mla_step`."""
    kernel = {"cpu": lambda: partial(decode, interpret=INTERPRETER)}
    monkeypatch.setattr(dispatch, "LATENT_KERNELS", kernel)
    steps = importlib.import_module("toolkit.attention.latent.mla")  # its name is a function's too
    request.addfinalizer(steps._step.clear_cache)  # compiled with what stands in here
    weights = LatentWeights.random(CONFIG, jax.random.key(0), BF16)
    x = jax.random.normal(jax.random.key(1), (2, CONFIG.width), BF16)
    cache = LatentCache.empty(2, CONFIG.latent_size, CONFIG.rope_size, 80, BF16)
    filled = [
        jax.random.normal(jax.random.key(2), a.shape, BF16)
        for a in (cache.latents, cache.rope_keys)
    ]
    cache = LatentCache(*filled, jnp.array([79, 17], jnp.int32))
    found, wanted = (
        mla_step(x, weights, cache, CONFIG, implementation=name)[0] for name in ("pallas", "xla")
    )
    assert relative_error(found.astype(F32), wanted.astype(F32)) < ROUNDED


def abstract(latent, batch=2, heads=16, slots=4096):
    shapes = ((heads, latent), (heads, 64), (slots, latent), (slots, 64))
    arrays = [jax.ShapeDtypeStruct((batch, *shape), BF16) for shape in shapes]
    return [*arrays, jax.ShapeDtypeStruct((batch,), jnp.int32)]


@pytest.mark.slow
def test_a_cache_of_odd_length_lowers_for_cuda():
    """A bulk copy begins where a period of the swizzle does: jax 0.11 refuses another place."""
    text = lowered(partial(decode, scale=SCALE), *abstract(128, slots=150))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize("latent", [64, 192, 256, 512])
def test_published_sizes_lower_for_cuda(latent):
    for batch, heads, slots in ((1, 16, 131072), (64, 128, 1024)):
        text = lowered(partial(decode, scale=SCALE), *abstract(latent, batch, heads, slots))
        assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "rows", "columns"), [("mla", 1, 2), ("tpla", 2, 1), ("dcp", 1, 2)]
)
def test_sharded_steps_lower_for_cuda(scheme, rows, columns):
    mesh = make_mesh({"latent": rows, "heads": columns}, devices=jax.devices()[:2])
    sliced = slice_latents(fold(LatentWeights.random(CONFIG, jax.random.key(0), BF16)), rows)
    sliced = place_slices(sliced, mesh, scheme=scheme)
    cache = LatentCache.empty(2, CONFIG.latent_size, CONFIG.rope_size, 128, BF16)
    step = partial(decode_step, config=CONFIG, mesh=mesh, scheme=scheme, implementation="pallas")
    x = jnp.zeros((2, CONFIG.width), BF16)
    assert lowered(step, x, sliced, cache).count("custom_call @mosaic_gpu") == 1
    with pytest.raises(ValueError, match='softmax must be "sliced"'):
        step(x, sliced, cache, softmax="summed")


def test_what_it_cannot_do_is_refused():
    def step(x, config=CONFIG, dtype=BF16, name="mla"):
        weights = LatentWeights.random(config, jax.random.key(0), dtype)
        cache = LatentCache.empty(1, config.latent_size, config.rope_size, 4, dtype)
        if name == "tpla":
            return tpla_step(x, slice_latents(weights, 1), cache, config, implementation="pallas")
        return mla_step(x, weights, cache, config, implementation="pallas")

    x = jnp.ones((1, CONFIG.width), BF16)
    with pytest.raises(TypeError, match="takes bfloat16; got q float32"):
        step(x.astype(F32), dtype=F32)
    with pytest.raises(ValueError, match=r"latents of 64, 128, .* got 16 with 4"):
        step(jnp.ones((1, 24), BF16), small())
    for name in ("mla", "tpla"):
        with pytest.raises(ValueError, match=r"needs an NVIDIA GPU of the Hopper .* is for cpu"):
            step(x, name=name)
    with pytest.raises(NotImplementedError, match=r"the step .* has no derivative; .*xla"):
        jax.grad(lambda x: step(x)[0].astype(F32).sum())(x)


@pytest.mark.slow
def test_it_compiles_to_machine_code(monkeypatch):
    """For an H200, where jax's CUDA plugin and nvcc are installed; no GPU is needed."""
    nvcc = pytest.importorskip("nvidia.cuda_nvcc", reason="needs nvidia-cuda-nvcc")
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", nvcc.__path__[0])
    try:
        topology = get_topology_desc("1x1x1", "cuda", topology="1x1x1", target_config=H200)
    except NotImplementedError:
        pytest.skip("needs jax's CUDA plugin")
    here = NamedSharding(jax.sharding.Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
    for latent in (64, 512):
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in abstract(latent)]
        run = jax.jit(partial(decode, scale=SCALE), out_shardings=here)
        assert "mosaic_gpu" in run.lower(*arrays).compile().as_text()
