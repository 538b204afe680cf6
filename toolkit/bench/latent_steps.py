"""One decoded token of latent attention, absorbed, against reading weights and cache once.

The sizes are DeepSeek-V2-Lite's, one sequence. With 16 heads a step makes 15 operations per byte of
its cache in float32: after long contexts it is the products that a core's time goes to, not memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from toolkit.attention.latent import (
    PRESETS,
    LatentCache,
    LatentConfig,
    LatentWeights,
    mla,
    mla_step,
)
from toolkit.bench.agreement import agree, finite
from toolkit.bench.harness import Case, PlannedCase, Yardstick

PRESET = "deepseek_v2_lite"
CONTEXTS = (4096, 32768)
EXPANDED = 4096  # longest context whose keys and values are made anew
SLOWEST = 1.5  # most wanted of the step's time over one read of weights and cache
TOLERANCE = 1e-4
OURS = "toolkit, absorbed"


def cases(cores: int) -> Iterator[PlannedCase]:
    """A step after each context."""
    for context in CONTEXTS:
        name = f"mla_step, {PRESET}, B=1, context={context} float32"
        yield PlannedCase(name, partial(step_case, PRESETS[PRESET], context))


def step_case(config: LatentConfig, context: int, name: str) -> Case:
    """A step that writes its token into the last slot, again and again."""
    weights = LatentWeights.random(config, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    empty = LatentCache.empty(1, config.latent_size, config.rope_size, context)
    held = replace(
        empty,
        latents=jax.random.normal(keys[0], empty.latents.shape),
        rope_keys=jax.random.normal(keys[1], empty.rope_keys.shape),
        length=jnp.full(1, context - 1, jnp.int32),
    )
    x = jax.random.normal(keys[2], (1, config.width))

    def absorbed(cache, x, weights):
        return mla_step(x, weights, cache, config)

    def expanded(cache, x, weights):
        y, cache = mla(x[:, None], weights, config, initial_state=cache)
        assert cache is not None
        return y[:, 0], cache

    contenders = {OURS: _repeated(absorbed, held, x, weights)}
    if context <= EXPANDED:
        contenders["keys and values made anew"] = _repeated(expanded, held, x, weights)
    read = sum(array.nbytes for array in jax.tree.leaves(weights)) + held.nbytes
    products = 2 * config.heads * (2 * config.latent_size + config.rope_size) * context
    total = products + 2 * sum(array.size for array in jax.tree.leaves(weights))
    numbers = jax.random.normal(jax.random.key(2), (read // 4,))
    add = jax.jit(jnp.sum)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(TOLERANCE) if len(contenders) > 1 else finite,
        ours=OURS,
        yardstick=Yardstick(
            "weights and cache read once",
            lambda: jax.block_until_ready(add(numbers)),
            work=read,
            ours=read,
            unit="byte",
            least=1 / SLOWEST,
        ),
        note=f"{read / 1e6:.0f} MB, {total / 1e6:,.0f} MFLOP of which {products / 1e6:,.0f} with "
        "the cache",
    )


def _repeated(
    step: Callable, cache: LatentCache, x: jax.Array, weights: LatentWeights
) -> Callable[[], jax.Array]:
    """The step as a contender, its cache updated in place and as long before as after."""

    def same_length(held: LatentCache, x: jax.Array, weights: LatentWeights):
        y, new = step(held, x, weights)
        return y, replace(new, length=held.length)

    jitted, held = jax.jit(same_length, donate_argnums=0), [jax.tree.map(jnp.copy, cache)]

    def call() -> jax.Array:
        y, held[0] = jitted(held[0], x, weights)
        return jax.block_until_ready((y, held[0]))[0]

    return call
