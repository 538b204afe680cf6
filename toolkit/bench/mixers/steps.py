"""One decoded token: a recurrent mixer's, against reading and writing its state once; softmax's.

A CPU's program reads the state for all its reads, then reads and writes it for the update: nothing
joins the two. Reading alone takes a core as long as reading and writing, so that beyond the caches
a step costs at least two passes (2.2 to 2.5 measured at 64 MiB on two cores; a loop in C that
updates each head while a cache holds it, 1.35 of a pass on one core).

`cases` is a part of suite `mixers`; `decode_cases` is suite `decode`: a state costs the same after
any context, a cache is read at the speed of memory. `latent_cases` is suite `latent`: absorbed
latent attention at DeepSeek-V2-Lite's sizes, against reading weights and cache once. With 16 heads
it makes 15 operations per byte of a float32 cache: after long contexts products take the time. Also
one device's part of such a step, where a GPU has a kernel for it.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from toolkit.attention import KVCache, Mixer, mixer
from toolkit.attention.latent import (
    PRESETS,
    LatentCache,
    LatentConfig,
    LatentWeights,
    mla,
    mla_step,
)
from toolkit.attention.latent.slots import Implementation, attend_slots
from toolkit.bench.agreement import agree, finite
from toolkit.bench.harness import Case, PlannedCase, Yardstick, bound, in_place
from toolkit.bench.mixers.gpu import Work
from toolkit.bench.mixers.inputs import mixer_inputs
from toolkit.bench.peers import torch_sdpa
from toolkit.measure import published_peak

HEADS, SIZE = 16, 128
# One sequence, 1 MiB of state; and 64 MiB, which the caches of a core do not hold.
BATCHES = (1, 64)
ON_A_CHIP = 512  # sequences, so that a step takes longer than to start it
TOLERANCE = 1e-4
CHIP_TOLERANCE = 0.01  # where float32 products round their operands
EARLIER = 16  # tokens that leave the state of a step
SLOWEST = 1.3  # most wanted of the step's time over one read and one write of the state
OURS, PASS = "toolkit, step", "state read and written once"
DECODE_HEADS, DECODE_SIZE = 8, 64
CONTEXTS = (1024, 8192, 131072)
LATENT, LATENT_CONTEXTS, ABSORBED = "deepseek_v2_lite", (4096, 32768), "toolkit, absorbed"
EXPANDED = 4096  # longest context whose keys and values are made anew
SLOWEST_LATENT = 1.5  # most wanted of a step's time over one read of weights and cache
PREFILLED = 1024  # tokens read at once: a state goes on from there to any longer context
# A step's attention on one device, by how latents are cut.
SHARDED, DEVICES = PRESETS["deepseek_v3"], 8
SLICES = (1, 2, 4, 8)
GRID = tuple((batch, slots) for batch in (1, 8, 64) for slots in (1024, 8192, 32768, 131072))
SMALL = ((1, 2048),)
KERNEL, XLA, PEER = "toolkit, pallas", "toolkit, xla", "jax.nn.dot_product_attention"
COPIED = 1 << 28  # bytes, more than any cache of a chip holds
LEAST_RATE = 0.8  # least wanted share of the rate of a copy
SHARD_TOLERANCES = {"bfloat16": 0.01, "float32": 1e-4}


def cases(rows: Sequence[Mixer], batches: Sequence[int] = BATCHES) -> Iterator[PlannedCase]:
    """Every row's step, for one sequence and for many."""
    for row in rows:
        for batch in batches:
            yield PlannedCase(
                f"{row.name} step B={batch} H={HEADS} D={SIZE} float32",
                partial(step_case, row, batch),
            )


def step_case(row: Mixer, batch: int, name: str) -> Case:
    """One mixer's step, its state updated in place, beside x <- c x over as many bytes; on a
    TPU by its kernel and by XLA.
    """
    token = [x[:, 0] for x in mixer_inputs(row, 1, HEADS, SIZE, batch=batch)]
    earlier = mixer_inputs(row, EARLIER, HEADS, SIZE, batch=batch)
    _, start = jax.jit(partial(row.function, **row.options))(*earlier)

    def step(state: Any, *token: jax.Array, **form: str) -> tuple[jax.Array, Any]:
        return row.step(*token, state, **form, **row.options)

    def scale(x: Any) -> tuple[None, Any]:
        # With c other than -1 numbers would run out of range, which is slow.
        return None, jax.tree.map(operator.neg, x)

    state = row.state_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options)
    forms: dict[str, Callable[..., Any]] = {OURS: step}
    if jax.default_backend() == "tpu" and "pallas" in row.implementations:
        forms = {
            KERNEL: partial(step, implementation="pallas"),
            XLA: partial(step, implementation="xla"),
        }
    return Case(
        name=name,
        contenders={
            name: in_place(form, jax.tree.map(jnp.copy, start), *token)
            for name, form in forms.items()
        },
        check=_check(row, token, start),
        ours=next(iter(forms)),
        yardstick=Yardstick(
            PASS, in_place(scale, jax.tree.map(jnp.copy, start)), work=2 * state, ours=2 * state,
            unit="byte", least=1 / SLOWEST,
        ),
        note=f"state {state / 2**20:.0f} MiB, modelled traffic of a step "
        f"{row.step_bytes(batch, 1, HEADS, SIZE, SIZE, **row.options) / 2**20:.0f} MiB",
    )  # fmt: skip


def _check(row: Mixer, token: list[jax.Array], state: Any) -> Callable[[Mapping[str, Any]], None]:
    """The first step equals the reference for a sequence of one token."""

    def check(results: Mapping[str, Any]) -> None:
        sequence = [x[:, None] for x in token]
        with jax.default_matmul_precision("highest"):
            out, _ = row.reference(*sequence, initial_state=state, **row.options)
        tolerance = TOLERANCE if jax.default_backend() == "cpu" else CHIP_TOLERANCE
        agree(tolerance)({"reference": out[:, 0], **results})

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
        "toolkit": _softmax_step(
            token,
            KVCache(keys, values, jnp.full(1, context - 1, jnp.int32), jnp.zeros(1, jnp.int32)),
        )
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
    token = [x[:, -1] for x in arrays]
    return lambda: step(*token, state)


def _softmax_step(token: list[jax.Array], cache: KVCache) -> Callable[[], jax.Array]:
    """A step that always writes the same slot, so that it can be repeated."""

    def step(cache: KVCache) -> tuple[jax.Array, KVCache]:
        out, new = mixer("full").step(*token, cache)
        return out, replace(new, length=cache.length)

    return in_place(step, cache)


def latent_cases(cores: int) -> Iterator[PlannedCase]:
    """A step after each context, and a device's part of one by how latents are cut."""
    for context in LATENT_CONTEXTS:
        name = f"mla_step, {LATENT}, B=1, context={context} float32"
        yield PlannedCase(name, partial(latent_case, PRESETS[LATENT], context))
    yield from shard_cases()


def latent_case(config: LatentConfig, context: int, name: str) -> Case:
    """A step that writes its token into the last slot, again and again."""
    weights = LatentWeights.random(config, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    empty = LatentCache.empty(1, config.latent_size, config.rope_size, context)
    cache = replace(
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

    contenders = {ABSORBED: _latent_step(absorbed, cache, x, weights)}
    if context <= EXPANDED:
        contenders["keys and values made anew"] = _latent_step(expanded, cache, x, weights)
    read = sum(array.nbytes for array in jax.tree.leaves(weights)) + cache.nbytes
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

    def same_length(cache: LatentCache, x: jax.Array, weights: LatentWeights):
        y, new = step(cache, x, weights)
        return y, replace(new, length=cache.length)

    return in_place(same_length, jax.tree.map(jnp.copy, cache), x, weights)


def shard_work(slices: int, batch: int, slots: int, element_bytes: int = 2) -> Work:
    """Modelled work of one device: the cache read once, queries and outputs of its heads."""
    heads, latent = SHARDED.heads * slices // DEVICES, SHARDED.latent_size // slices
    products = 2 * heads * (2 * latent + SHARDED.rope_size)
    read = slots * (latent + SHARDED.rope_size) + heads * (2 * latent + SHARDED.rope_size)
    return Work(batch * slots * products, element_bytes * batch * read)


def shard_cases(grid: Sequence[tuple[int, int]] = GRID) -> Iterator[PlannedCase]:
    """What one of eight devices attends to in a step of DeepSeek-V3, by how latents are cut.

    Whole ones (MLA) with 16 heads per device, or 2, 4 or 8 slices (TPLA) with 32, 64 or 128: 576,
    320, 192 and 128 numbers per token. On a GPU in bfloat16, with the Pallas kernel; a small part
    of it elsewhere, in float32, without.
    """
    is_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if is_gpu else "float32"
    for batch, slots in grid if is_gpu else SMALL:
        for slices in SLICES:
            width = SHARDED.latent_size // slices + SHARDED.rope_size
            name = f"latents of {width}, H={SHARDED.heads * slices // DEVICES} B={batch} "
            build = partial(shard_case, slices, batch, slots, dtype, is_gpu)
            yield PlannedCase(f"{name}context={slots} {dtype}", build)


def shard_case(slices: int, batch: int, slots: int, dtype: str, is_gpu: bool, name: str) -> Case:
    """One device's decode step over its slice of the latents, with its peer."""
    heads, latent = SHARDED.heads * slices // DEVICES, SHARDED.latent_size // slices
    sizes = {"latent": latent, "rope": SHARDED.rope_size}
    keys = iter(jax.random.split(jax.random.key(0), 4))
    drawn = jax.jit(jax.random.normal, static_argnums=(1, 2))
    q, rope_q = (drawn(next(keys), (batch, heads, n), dtype) for n in sizes.values())
    latents, rope_keys = (drawn(next(keys), (batch, slots, n), dtype) for n in sizes.values())
    filled, scale = jnp.full(batch, slots, jnp.int32), sum(sizes.values()) ** -0.5
    arrays = (q, rope_q, latents, rope_keys, filled)

    def ours(implementation: Implementation) -> Callable[[], Array]:
        attend = partial(attend_slots, scale=scale, implementation=implementation)
        return bound(jax.jit(lambda *arrays: attend(*arrays)[0]), arrays)

    @jax.jit
    def peer(q: Array, rows: Array) -> Array:
        rows = rows[:, :, None]  # keys and values of one head, which all queries share
        return jax.nn.dot_product_attention(q[:, None], rows, rows, scale=scale)[:, 0, :, :latent]

    whole = jnp.concatenate([q, rope_q], -1), jnp.concatenate([latents, rope_keys], -1)
    contenders = {KERNEL: ours("pallas")} if is_gpu else {}
    contenders |= {XLA: ours("xla"), PEER: bound(peer, whole)}
    work = shard_work(slices, batch, slots, jnp.dtype(dtype).itemsize)
    device = jax.devices()[0].device_kind
    peak = published_peak(device) if is_gpu else None
    # In place: a CPU would give every result fresh pages, and what is timed after it too.
    copied = in_place(lambda x: (jnp.zeros(()), -x), jnp.ones(COPIED // 4))
    return Case(
        name=name,
        contenders=contenders,
        check=agree(SHARD_TOLERANCES[dtype], norm="rms"),
        ours=next(iter(contenders)),
        targets={PEER: 1.0},
        yardstick=Yardstick(
            "a copy",
            lambda: jax.block_until_ready(copied()),
            work=2 * COPIED,
            ours=work.bytes,
            unit="byte",
            least=LEAST_RATE if is_gpu else None,
        ),
        floor=None if peak is None else work.floor_seconds(peak),
        note=f"on {device}: {work.bytes / 1e6:,.1f} MB, {work.flops / 1e9:,.2f} GFLOP",
    )
