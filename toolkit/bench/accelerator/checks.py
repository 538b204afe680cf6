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

from toolkit.attention import MIXERS, Mixer
from toolkit.attention.latent import LatentCache, LatentConfig, LatentWeights, mla_step
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs, output_weight

BF16, F32 = jnp.bfloat16, jnp.float32
# Of the root mean square: bfloat16 keeps 8 bits, and kernels round what they multiply.
VALUES, GRADIENTS = 0.01, 0.02


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
            if platform == "tpu":
                yield KernelCheck(f"{row.name} step", partial(_step, row, sizes), VALUES)
    if platform == "cuda":
        yield KernelCheck("mla step", partial(_latent, sizes), VALUES)


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
