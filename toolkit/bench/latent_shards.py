"""What one of eight devices attends to in a step of DeepSeek-V3, by how the latents are cut.

Whole latents (MLA) with 16 heads per device, or 2, 4 or 8 slices (TPLA) with 32, 64 or 128: 576,
320, 192 and 128 numbers per token. On a GPU, in bfloat16, the Pallas kernel against XLA's form and
`jax.nn.dot_product_attention` on the same cache, and beside the rate of a copy; a small part of it
elsewhere, in float32, without the kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from toolkit.attention.latent import PRESETS
from toolkit.attention.latent.slots import Implementation, attend_slots
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase, Yardstick, bound
from toolkit.bench.mixers_gpu import Work
from toolkit.measure import published_peak

MODEL, DEVICES = PRESETS["deepseek_v3"], 8
SLICES = (1, 2, 4, 8)
GRID = tuple((batch, slots) for batch in (1, 8, 64) for slots in (1024, 8192, 32768, 131072))
SMALL = ((1, 2048),)
KERNEL, XLA, PEER = "toolkit, pallas", "toolkit, xla", "jax.nn.dot_product_attention"
COPIED = 1 << 28  # bytes, more than any cache of a chip holds
LEAST = 0.8  # least wanted share of the rate of a copy
TOLERANCES = {"bfloat16": 0.01, "float32": 1e-4}


def shard_work(slices: int, batch: int, slots: int, element_bytes: int = 2) -> Work:
    """Modelled work of one device: the cache read once, queries and outputs of its heads."""
    heads, latent = MODEL.heads * slices // DEVICES, MODEL.latent_size // slices
    products = 2 * heads * (2 * latent + MODEL.rope_size)
    read = slots * (latent + MODEL.rope_size) + heads * (2 * latent + MODEL.rope_size)
    return Work(batch * slots * products, element_bytes * batch * read)


def cases() -> Iterator[PlannedCase]:
    """Every cut at every size of the device at hand."""
    is_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if is_gpu else "float32"
    for batch, slots in GRID if is_gpu else SMALL:
        for slices in SLICES:
            width = MODEL.latent_size // slices + MODEL.rope_size
            name = f"latents of {width}, H={MODEL.heads * slices // DEVICES} B={batch} "
            build = partial(_case, slices, batch, slots, dtype, is_gpu)
            yield PlannedCase(f"{name}context={slots} {dtype}", build)


def _case(slices: int, batch: int, slots: int, dtype: str, is_gpu: bool, name: str) -> Case:
    heads, latent = MODEL.heads * slices // DEVICES, MODEL.latent_size // slices
    sizes = {"latent": latent, "rope": MODEL.rope_size}
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
    numbers = jnp.ones(COPIED // 4)
    negate = jax.jit(jnp.negative)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(TOLERANCES[dtype], norm="rms"),
        ours=next(iter(contenders)),
        targets={PEER: 1.0},
        yardstick=Yardstick(
            "a copy",
            lambda: jax.block_until_ready(negate(numbers)),
            work=2 * COPIED,
            ours=work.bytes,
            unit="byte",
            least=LEAST if is_gpu else None,
        ),
        floor=None if peak is None else work.floor_seconds(peak),
        note=f"on {device}: {work.bytes / 1e6:,.1f} MB, {work.flops / 1e9:,.2f} GFLOP",
    )
