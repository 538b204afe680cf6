"""One decoded token: a recurrent mixer's, against reading and writing its state once; softmax's.

`cases` is a part of suite `mixers`; `decode_cases` is suite `decode`: a state costs the same after
any context, a cache is read at the speed of memory. `latent_cases` is suite `latent`: absorbed
latent attention at DeepSeek-V2-Lite's sizes, against reading weights and cache once. With 16 heads
it makes 15 operations per byte of a float32 cache: after long contexts products take the time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import KVCache, Mixer, mixer
from toolkit.attention.latent import (
    PRESETS,
    LatentCache,
    LatentConfig,
    LatentWeights,
    mla,
    mla_step,
)
from toolkit.bench import latent_shards
from toolkit.bench.agreement import agree, finite
from toolkit.bench.harness import Case, PlannedCase, Yardstick
from toolkit.bench.mixer_inputs import mixer_inputs
from toolkit.bench.peers import torch_sdpa

HEADS, SIZE = 16, 128
# One sequence, 1 MiB of state; and 64 MiB, which the caches of a core do not hold.
BATCHES = (1, 64)
TOLERANCE = 1e-4
SLOWEST = 1.3  # most wanted of the step's time over one read and one write of the state
OURS, PASS = "toolkit, step", "state read and written once"
DECODE_HEADS, DECODE_SIZE = 8, 64
CONTEXTS = (1024, 8192, 131072)
LATENT, LATENT_CONTEXTS, ABSORBED = "deepseek_v2_lite", (4096, 32768), "toolkit, absorbed"
EXPANDED = 4096  # longest context whose keys and values are made anew
SLOWEST_LATENT = 1.5  # most wanted of a step's time over one read of weights and cache
PREFILLED = 1024  # tokens read at once: a state goes on from there to any longer context


def cases(rows: Sequence[Mixer]) -> Iterator[PlannedCase]:
    """Every row's step, for one sequence and for many."""
    for row in rows:
        for batch in BATCHES:
            yield PlannedCase(
                f"{row.name} step B={batch} H={HEADS} D={SIZE} float32",
                partial(step_case, row, batch),
            )


def step_case(row: Mixer, batch: int, name: str) -> Case:
    """One mixer's step, its state updated in place, beside x <- c x over as many bytes."""
    token = [x[:, 0] for x in mixer_inputs(row, 1, HEADS, SIZE, batch=batch)]
    start = jax.random.normal(jax.random.key(2), (batch, HEADS, SIZE, SIZE)) / SIZE**0.5
    step = jax.jit(
        lambda state, *token: row.step(*token, state, **row.options),
        donate_argnums=0,
    )
    # c = -1: with any other the numbers would run out of range, and a processor slows on those.
    scale = jax.jit(lambda x: (None, -x), donate_argnums=0)
    state = row.state_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options)
    return Case(
        name=name,
        contenders={OURS: _in_place(step, start, token)},
        check=_check(row, token, start),
        ours=OURS,
        yardstick=Yardstick(
            PASS, _in_place(scale, start, ()), work=2 * state, ours=2 * state, unit="byte",
            least=1 / SLOWEST,
        ),
        note=f"state {state / 2**20:.0f} MiB, modelled traffic of a step "
        f"{row.step_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options) / 2**20:.0f} MiB",
    )  # fmt: skip


def _in_place(
    function: Callable[..., Any], state: jax.Array, token: list[jax.Array] | tuple[()]
) -> Callable[[], Any]:
    """The function as a contender that feeds its state back, and returns the rest."""
    held = [jnp.copy(state)]

    def call() -> jax.Array:
        out, held[0] = function(held[0], *token)
        return jax.block_until_ready((out, held[0]))[0]

    return call


def _check(
    row: Mixer, token: list[jax.Array], state: jax.Array
) -> Callable[[Mapping[str, Any]], None]:
    """The first step gives what the reference gives for a sequence of one token."""

    def check(results: Mapping[str, Any]) -> None:
        sequence = [x[:, None] for x in token]
        out, _ = row.reference(*sequence, initial_state=state, **row.options)
        agree(TOLERANCE)({"reference": out[:, 0], OURS: np.asarray(results[OURS])})

    return check


def decode_cases(cores: int) -> Iterator[Case]:
    """Gated DeltaNet's step after contexts of growing length; softmax's at the longest of them."""
    heads, size = DECODE_HEADS, DECODE_SIZE
    yield Case(
        name=f"gated_delta_net_step B=1 H={heads} D={size} float32",
        contenders={f"after {context} tokens": _step_after(context) for context in CONTEXTS},
        check=finite,
        ours=f"after {CONTEXTS[0]} tokens",
        note=f"state: {heads * size * size * 4 / 1024:.0f} KiB, whatever the context",
    )

    context = CONTEXTS[-1]
    token = [x[:, 0] for x in mixer_inputs(mixer("full"), 1, heads, size)]
    keys, values = (
        jax.random.normal(key, (1, heads, size, context))
        for key in jax.random.split(jax.random.key(1), 2)
    )
    # The last slot is free: the step writes its token there and attends to all of them.
    contenders = {
        "toolkit": _softmax_step(token, KVCache(keys, values, jnp.full(1, context - 1, jnp.int32)))
    }
    query, *last = (np.asarray(x)[:, None] for x in token)
    whole = [
        np.concatenate([np.moveaxis(np.asarray(x)[..., :-1], 3, 1), new], 1)
        for x, new in zip((keys, values), last, strict=True)
    ]
    peer = torch_sdpa([query, *whole], None, cores, is_causal=False)
    if peer is not None:
        contenders["torch SDPA"] = lambda: peer()[:, 0]
    yield Case(
        name=f"softmax_attention_step B=1 H={heads} D={size} context={context} float32",
        contenders=contenders,
        check=agree(TOLERANCE),
        ours="toolkit",
        targets={"torch SDPA": 1 / 1.1},
        note=f"cache: {2 * heads * size * context * 4 / 2**20:.0f} MiB, read once per token",
    )


def _step_after(context: int) -> Callable[[], Any]:
    row = mixer("gdn")
    arrays = mixer_inputs(row, min(context, PREFILLED), DECODE_HEADS, DECODE_SIZE)
    read, step, state = jax.jit(row.function), jax.jit(row.step), None
    for _ in range(max(1, context // PREFILLED)):
        _, state = read(*arrays, initial_state=state)
    return lambda: step(*(x[:, -1] for x in arrays), state)


def _softmax_step(token: list[jax.Array], cache: KVCache) -> Callable[[], jax.Array]:
    """A step that always writes the same slot, so that it can be repeated."""

    def step(cache: KVCache) -> tuple[jax.Array, KVCache]:
        out, new = mixer("full").step(*token, cache)
        return out, replace(new, length=cache.length)

    jitted, held = jax.jit(step, donate_argnums=0), [cache]

    def call() -> jax.Array:
        out, held[0] = jitted(held[0])
        return out

    return call


def latent_cases(cores: int) -> Iterator[PlannedCase]:
    """A step after each context, and a device's part of one by how latents are cut."""
    for context in LATENT_CONTEXTS:
        name = f"mla_step, {LATENT}, B=1, context={context} float32"
        yield PlannedCase(name, partial(latent_case, PRESETS[LATENT], context))
    yield from latent_shards.cases()


def latent_case(config: LatentConfig, context: int, name: str) -> Case:
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

    contenders = {ABSORBED: _latent_step(absorbed, held, x, weights)}
    if context <= EXPANDED:
        contenders["keys and values made anew"] = _latent_step(expanded, held, x, weights)
    read = sum(array.nbytes for array in jax.tree.leaves(weights)) + held.nbytes
    products = 2 * config.heads * (2 * config.latent_size + config.rope_size) * context
    total = products + 2 * sum(array.size for array in jax.tree.leaves(weights))
    numbers = jax.random.normal(jax.random.key(2), (read // 4,))
    add = jax.jit(jnp.sum)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(TOLERANCE) if len(contenders) > 1 else finite,
        ours=ABSORBED,
        yardstick=Yardstick(
            "weights and cache read once",
            lambda: jax.block_until_ready(add(numbers)),
            work=read,
            ours=read,
            unit="byte",
            least=1 / SLOWEST_LATENT,
        ),
        note=f"{read / 1e6:.0f} MB, {total / 1e6:,.0f} MFLOP of which {products / 1e6:,.0f} with "
        "the cache",
    )


def _latent_step(
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
