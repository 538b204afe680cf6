"""Every kernel of an accelerator against its form in XLA: what is checked before any is timed.

The numbers are drawn in bfloat16, and the reference computes from the same numbers in float32. On a
CPU the kernels run by jax's interpreter, on small shapes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import MIXERS, Mixer, sparse
from toolkit.attention.latent import LatentCache, LatentConfig, LatentWeights, mla_step
from toolkit.attention.sparse.prefill import attend_tiles, sale_tiles
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs, output_weight

BF16, F32 = jnp.bfloat16, jnp.float32
# Of the root mean square: bfloat16 keeps 8 bits, and kernels round what they multiply.
VALUES, GRADIENTS = 0.01, 0.02
SELECTORS: dict[str, dict[str, Any]] = {
    "quest": {"page_size": 64, "sinks": 4, "recent": 16},
    "hata": {},
    "pqcache": {},
    "tactic": {"cluster_size": 32},
}


class KernelCheck(NamedTuple):
    """A kernel against its form in XLA: its relative error, and the largest allowed."""

    name: str
    error: Callable[[], float]
    most: float


class Sizes(NamedTuple):
    """Of the inputs: large enough for a chip, or as small as the interpreter needs them."""

    batch: int
    time: int
    heads: int
    size: int


LARGE, SMALL = Sizes(2, 700, 4, 128), Sizes(1, 70, 1, 64)


def kernel_checks(platform: str, sizes: Sizes = LARGE) -> Iterator[KernelCheck]:
    """The checks of a platform's kernels, "cuda" or "tpu"."""
    for row in MIXERS.values():
        if row.is_recurrent and "pallas" in row.implementations:
            for backward, most in ((False, VALUES), (True, GRADIENTS)):
                name = f"{row.name} {'gradients' if backward else 'values'}"
                yield KernelCheck(name, partial(_sequence, row, sizes, backward), most)
            yield KernelCheck(f"{row.name} step", partial(_step, row, sizes), VALUES)
    if platform != "cuda":
        return
    yield KernelCheck("mla step", partial(_latent, sizes), VALUES)
    for name, settings in SELECTORS.items():
        yield KernelCheck(f"{name} step", partial(_selected, name, settings, sizes), VALUES)
    yield KernelCheck("tiles of a prompt", partial(_tiles, sizes), VALUES)
    yield KernelCheck("sale", partial(_sale, sizes), 0.0)


def relative_error(found: Any, wanted: Any) -> float:
    """Largest over all arrays of the error's root mean square over the reference's."""
    errors = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        errors.append(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
    return float(np.max(errors))  # NaN where one is


def _float32(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(F32), arrays)


def _sequence(row: Mixer, sizes: Sizes, backward: bool) -> float:
    arrays = mixer_inputs(row, sizes.time, sizes.heads, sizes.size, batch=sizes.batch, dtype=BF16)
    args = [output_weight(row, arrays), *arrays] if backward else arrays
    form = partial(mixer_form, row, backward=backward)
    found = jax.jit(form("pallas"))(*args)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(form("scan"))(*_float32(args))
    return relative_error(_float32(found), wanted)


def _step(row: Mixer, sizes: Sizes) -> float:
    arrays = mixer_inputs(row, 2, sizes.heads, sizes.size, batch=sizes.batch, dtype=BF16)
    _, state = row.function(*(x[:, :1] for x in _float32(arrays)), **row.options)
    token = [x[:, 1] for x in arrays]
    found = row.step(*token, state, implementation="pallas", **row.options)
    with jax.default_matmul_precision("highest"):
        wanted = row.step(*_float32(token), state, implementation="xla", **row.options)
    return relative_error(_float32(found), wanted)


def _latent(sizes: Sizes) -> float:
    config = LatentConfig(
        width=64, heads=sizes.heads, latent_size=128, key_size=32, rope_size=64, value_size=32
    )
    weights = LatentWeights.random(config, jax.random.key(0), BF16)
    x = jax.random.normal(jax.random.key(1), (2, config.width), BF16)
    cache = LatentCache.empty(2, config.latent_size, config.rope_size, sizes.time, BF16)
    filled = [
        jax.random.normal(jax.random.key(2), a.shape, BF16)
        for a in (cache.latents, cache.rope_keys)
    ]
    length = jnp.array([sizes.time - 1, 17], jnp.int32)
    cache = LatentCache(filled[0], filled[1], length)
    step = partial(mla_step, x, weights, cache, config)
    return relative_error(*(_float32(step(implementation=name)[0]) for name in ("pallas", "xla")))


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), BF16) for shape in shapes]


def _selected(name: str, settings: dict[str, Any], sizes: Sizes) -> float:
    """Rows of unequal lengths, four heads of queries to a head of keys."""
    of_keys = (2, sizes.heads, 2 * sizes.time, sizes.size)
    keys, values, q = _drawn(of_keys, of_keys, (2, 4 * sizes.heads, sizes.size))
    selector = sparse.SELECTORS[name](**settings)
    cache = sparse.build(selector, keys, values, jnp.array([2 * sizes.time - 3, sizes.time]))
    step = partial(sparse.decode_step, cache, q, selector, sparse.FixedTokens(sizes.time // 2 + 64))
    return relative_error(*(_float32(step(implementation=x).out) for x in ("pallas", "xla")))


def _tiles(sizes: Sizes) -> float:
    shape = (sizes.batch, sizes.time, sizes.heads, sizes.size)
    q, k, v = _drawn((*shape[:2], 2 * sizes.heads, sizes.size), shape, shape)
    tiles = sale_tiles(q, k, threshold=0.2, sink=16, local=32, implementation="xla")
    attend = partial(attend_tiles, q, k, v, tiles)
    return relative_error(*(_float32(attend(implementation=x)[0]) for x in ("pallas", "xla")))


def _sale(sizes: Sizes) -> float:
    """The share of tiles that are kept by one form alone."""
    shape = (sizes.batch, sizes.time, 2 * sizes.heads, sizes.size)
    q, k = (1.5 * x for x in _drawn(shape, (*shape[:2], sizes.heads, sizes.size)))
    found, wanted = (
        sale_tiles(q, k, threshold=0.2, sink=16, local=32, implementation=form).kept
        for form in ("pallas", "xla")
    )
    return float(jnp.mean(found != wanted))
