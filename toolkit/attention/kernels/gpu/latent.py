r"""One query per head against a latent cache (flash-decoding): every row of it is read once.

    s_hj = scale (q_h . c_j + p_h . r_j)        out_h = sum_j exp(s_hj) c_j / sum_j exp(s_hj)

A latent c_j is key and value of all heads, so a thread block takes 64 heads as the rows of its
matrix products and walks over the cache in blocks of 64 slots: a bulk copy brings
[64, latent + rope] on chip, where both products read it, while the next copy is under way.
Scores, exponentials and sums stay in registers, in float32. Latents of more than 256 channels need
two warpgroups, since one has registers for [64, 256] sums: each sums half of the channels and
repeats the scores, which costs 1.5 times the products and no bytes.

The filled slots of a row are cut into splits, so that even a few rows occupy all processors; their
sums, largest scores and unnormalised outputs are merged exactly after the kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.support import (
    BF16,
    F32,
    PROCESSORS,
    SHARED_MEMORY,
    check_chip,
    launch,
    program,
)
from toolkit.attention.kernels.gpu.walk import sum_of_products

HEADS = SLOTS = 64  # of a thread block: the M of a WGMMA instruction; of a bulk copy
PERIOD = 8  # slots of the swizzle, where a bulk copy has to begin
CHANNELS = 256  # of outputs whose sums fit the registers of a warpgroup
STAGES = 2
LOG2_E = 1.4426950408889634
LOWEST = -1e30  # below all scores but -inf: where nothing is seen, exponentials are 0, not NaN

dot = partial(jnp.dot, preferred_element_type=F32)


def decode(
    q: Float[Array, "batch heads latent"], rope_q: Float[Array, "batch heads rope"],
    latents: Float[Array, "batch slots latent"], rope_keys: Float[Array, "batch slots rope"],
    filled: Int[Array, " batch"], *,
    scale: float, interpret: Any = False,
) -> tuple[Float[Array, "batch heads latent"], Float[Array, "batch heads"]]:  # fmt: skip
    """Attention of one query per head to the first `filled` slots of every row of a cache.

    2 heads (2 latent + rope) FLOPs and 2 (latent + rope) bytes per filled slot, which decide for
    at most 64 heads: at 4.8 TB/s 16 rows of 32,768 slots of 512 + 64 channels take 126
    microseconds. Returns outputs and the logarithms of the sums of exponentials, in float32; 0 and
    -inf for a row without tokens. A cache whose slots are no multiple of 8 is copied.
    """
    heads, size = q.shape[1:]
    _check(q, rope_q, latents, rope_keys)
    check_chip(interpret)
    padding = -heads % HEADS
    q, rope_q = (jnp.pad(x, [(0, 0), (0, padding), (0, 0)]) for x in (q, rope_q))
    latents, rope_keys = whole_periods(latents, rope_keys)
    sums, largest, totals = _attend(
        q, rope_q, latents, rope_keys, filled, scale * LOG2_E, interpret
    )
    out, lse = merged_splits(sums, largest, totals)
    return out[:, :heads, :size], lse[:, :heads]


def whole_periods(*caches: Float[Array, "rows slots size"]) -> list[Array]:
    """Pad slots to a block at least, and to whole periods of the swizzle, where a block begins."""
    slots = caches[0].shape[1]
    missing = max(SLOTS - slots, -slots % PERIOD)
    return [jnp.pad(x, [(0, 0), (0, missing), (0, 0)]) if missing else x for x in caches]


def merged_splits(
    sums: Float[Array, "rows splits heads value"],
    largest: Float[Array, "rows splits heads"],
    totals: Float[Array, "rows splits heads"],
) -> tuple[Float[Array, "rows heads value"], Float[Array, "rows heads"]]:
    """Outputs and logs of the sums of exponentials, from those of splits relative to 2^largest."""
    # -inf for a split without tokens, which then weighs nothing.
    most = largest.max(axis=1, keepdims=True)
    weights = jnp.exp2(largest - jnp.where(most == -jnp.inf, 0, most))
    total = jnp.sum(weights * totals, axis=1)
    out = jnp.sum(weights[..., None] * sums, axis=1)
    lse = (most[:, 0] + jnp.log2(total)) / LOG2_E
    return out / jnp.where(total == 0, 1, total)[..., None], lse


def next_softmax(s: Array, largest: Array, total: Array) -> tuple[Array, Array, Array, Array]:
    """Exponentials of more scores; earlier sums of every row have to be multiplied by `kept`."""
    new_largest = jnp.maximum(largest, jnp.max(s, axis=1))
    finite = jnp.maximum(new_largest, LOWEST)
    kept = jnp.exp2(largest - finite)
    p = jnp.exp2(s - lax.broadcast_in_dim(finite, s.shape, (0,)))
    return p, kept, new_largest, total * kept + jnp.sum(p, axis=1)


def sum_of_scores(pairs: list[tuple[Any, Any]], interpret: Any) -> Array:
    """Queries times keys, both in shared memory, over pairs of them."""
    if interpret:  # which has no transposed operands
        return jnp.stack([dot(x[...], y[...].T) for x, y in pairs]).sum(axis=0)
    shape = pairs[0][0].shape[0], pairs[0][1].shape[0]
    return sum_of_products(shape, [(x, y.transpose((1, 0))) for x, y in pairs])


def plus_product(sums: Array, left: Array, right: Any, interpret: Any) -> Any:
    """Sums in registers, and a product of registers with shared memory."""
    if interpret:  # which has no sums that are kept
        return sums + dot(left, right[...])
    kept = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(lambda x: plgpu.wgmma(x, left, right))(kept)


def _check(q, rope_q, latents, rope_keys):
    arrays = {"q": q, "rope_q": rope_q, "latents": latents, "rope_keys": rope_keys}
    for name, array in arrays.items():
        if array.dtype != BF16:
            raise TypeError(f"The Pallas decode kernel takes bfloat16; got {name} {array.dtype}.")
    size, rope = latents.shape[2], rope_keys.shape[2]
    step = 64 if size <= CHANNELS else 128
    if size % step or size > 2 * CHANNELS or rope != 64:
        raise ValueError(
            f"The Pallas decode kernel takes latents of 64, 128, 192, 256, 384 or 512 channels "
            f"with 64 rotary ones; got {size} with {rope}."
        )


def _attend(q, rope_q, latents, rope_keys, filled, scale, interpret):
    """Sums [batch, splits, heads, latent], largest scores and totals [batch, splits, heads].

    Scores are exponents of 2, the only base that the unit for exponentials has.
    """
    batch, heads, size = q.shape
    slots, rope = rope_keys.shape[1:]
    tiles, groups = heads // HEADS, -(-size // CHANNELS)
    width = size // groups
    block_bytes = 2 * (HEADS + STAGES * SLOTS) * (size + rope)
    blocks_at_once = PROCESSORS * max(1, SHARED_MEMORY // (block_bytes + 2048))
    splits = max(1, min(-(-slots // SLOTS), blocks_at_once // (batch * tiles)))
    square = (HEADS, SLOTS)

    grid = (batch, splits, tiles)

    def body(*refs):
        q, rope_q, latents, rope_keys, filled, out, largest_out, total_out, *scratch = refs
        q_smem, rope_q_smem, latent_smem, rope_smem, q_loaded, loaded, consumed, cleaned = scratch
        row, split, tile = program(grid)
        group = lax.axis_index("group")
        length = filled[row]
        blocks = lax.div(length + SLOTS - 1, SLOTS)
        first, last = (lax.div(blocks * (split + i), splits) for i in (0, 1))

        def start(block):  # the last block of a full cache overlaps the one before
            return jnp.minimum(block * SLOTS, slots - SLOTS)

        def load(block, stage):
            rows, barrier = pl.ds(start(block), SLOTS), loaded.at[stage]
            for i in range(groups):
                columns = pl.ds(i * width, width)
                plgpu.copy_gmem_to_smem(
                    latents.at[row, rows, columns], latent_smem.at[stage, i], barrier
                )
            plgpu.copy_gmem_to_smem(rope_keys.at[row, rows], rope_smem.at[stage], barrier)

        @pl.when(group == 0)
        def begin():
            those = pl.ds(tile * HEADS, HEADS)
            for i in range(groups):
                columns = pl.ds(i * width, width)
                plgpu.copy_gmem_to_smem(q.at[row, those, columns], q_smem.at[i], q_loaded)
            plgpu.copy_gmem_to_smem(rope_q.at[row, those], rope_q_smem, q_loaded)
            for stage in range(STAGES):
                pl.when(first + stage < last)(lambda stage=stage: load(first + stage, stage))

        plgpu.barrier_wait(q_loaded)

        def scores(stage):
            pairs = [(q_smem.at[i], latent_smem.at[stage, i]) for i in range(groups)]
            return sum_of_scores([*pairs, (rope_q_smem, rope_smem.at[stage])], interpret)

        def step(block, carry):
            sums, largest, total = carry
            stage = lax.rem(block - first, STAGES)
            plgpu.barrier_wait(loaded.at[stage])

            @pl.when(start(block) + SLOTS > length)
            def without_the_empty():  # 0 * NaN is NaN
                own = latent_smem.at[stage, group]
                slot = start(block) + lax.broadcasted_iota(jnp.int32, own.shape, 0)
                own[...] = jnp.where(slot < length, own[...], jnp.zeros(own.shape, BF16))
                plgpu.commit_smem()
                if groups > 1:  # the other half is an operand of the scores
                    plgpu.barrier_arrive(cleaned)
                    plgpu.barrier_wait(cleaned)

            s = scores(stage) * scale
            slot = start(block) + lax.broadcasted_iota(jnp.int32, square, 1)
            s = jnp.where((slot >= block * SLOTS) & (slot < length), s, -jnp.inf)
            p, kept, largest, total = next_softmax(s, largest, total)
            sums = sums * lax.broadcast_in_dim(kept, sums.shape, (0,))
            own = latent_smem.at[stage, group]
            sums = plus_product(sums, p.astype(BF16), own, interpret)
            plgpu.barrier_arrive(consumed.at[stage])

            @pl.when((group == 0) & (block + STAGES < last))
            def load_next():
                plgpu.barrier_wait(consumed.at[stage])
                load(block + STAGES, stage)

            return sums, largest, total

        zeros = jnp.zeros((HEADS, width), F32)
        none = jnp.full((HEADS,), -jnp.inf, F32)
        sums, largest, total = lax.fori_loop(
            first, last, step, (zeros, none, jnp.zeros((HEADS,), F32))
        )
        those = pl.ds(tile * HEADS, HEADS)
        out[row, split, those, pl.ds(group * width, width)] = sums

        @pl.when(group == 0)
        def write():
            largest_out[row, split, those] = largest
            total_out[row, split, those] = total

    kernel = launch(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch, splits, heads, size), F32),
            jax.ShapeDtypeStruct((batch, splits, heads), F32),
            jax.ShapeDtypeStruct((batch, splits, heads), F32),
        ],
        scratch_types=[
            plgpu.SMEM((groups, HEADS, width), BF16),
            plgpu.SMEM((HEADS, rope), BF16),
            plgpu.SMEM((STAGES, groups, SLOTS, width), BF16),
            plgpu.SMEM((STAGES, SLOTS, rope), BF16),
            plgpu.Barrier(num_arrivals=groups + 1),
            plgpu.Barrier(num_arrivals=groups + 1, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=groups),
        ],
        grid=grid,
        num_threads=groups,
        thread_name="group",
        interpret=interpret,
    )
    return kernel(q, rope_q, latents, rope_keys, filled)
