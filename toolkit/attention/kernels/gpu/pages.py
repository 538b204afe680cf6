r"""One query per head against chosen pages of a cache: only these are read, and once.

    out_h = sum_{i in pages, low <= i < high} softmax_i(q_h . k_i) v_i

The query heads of a group share a page table and are the rows of the matrix products, as in
`latent`: a bulk copy brings the keys and values of a page on chip while up to three more are under
way. Splits share the pages of a row and are merged exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.latent import (
    CHANNELS,
    HEADS,
    LOG2_E,
    SLOTS,
    merged_splits,
    next_softmax,
    plus_product,
    sum_of_scores,
    whole_periods,
)
from toolkit.attention.kernels.gpu.support import (
    BF16,
    F32,
    PROCESSORS,
    SHARED_MEMORY,
    check_chip,
    launch,
    program,
)


def attend_pages(
    q: Float[Array, "rows group key"],
    keys: Float[Array, "rows slots key"],
    values: Float[Array, "rows slots value"],
    pages: Int[Array, "rows pages"],
    low: Int[Array, "rows pages"],
    high: Int[Array, "rows pages"],
    *,
    page_size: int,
    interpret: Any = False,
) -> tuple[Float[Array, "rows group value"], Float[Array, "rows group"]]:
    """Attention of scaled queries to the slots from `low` to `high` of every page of a row's table.

    A row is a key-value head of a sequence. 2 group (key + value) FLOPs and 2 (key + value) bytes
    per slot of a page, which decide. Returns outputs and the logarithms of the sums of
    exponentials, in float32; 0 and -inf where no slot is asked for. A cache whose slots are no
    multiple of 8 is copied.
    """
    group = q.shape[1]
    _check(q, keys, values, page_size)
    check_chip(interpret)
    q = jnp.pad(q, [(0, 0), (0, -group % HEADS), (0, 0)])
    # Pages after the last one with a slot are never read.
    place = jnp.arange(1, pages.shape[1] + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(high > low, place, 0), axis=1, initial=0)
    keys, values = whole_periods(keys, values)
    parts = _attend(q, keys, values, pages, low, high, used, interpret)
    out, lse = merged_splits(*parts)
    return out[:, :group], lse[:, :group]


def _check(q, keys, values, page_size):
    for name, array in (("q", q), ("keys", keys), ("values", values)):
        if array.dtype != BF16:
            raise TypeError(f"The Pallas page kernel takes bfloat16; got {name} {array.dtype}.")
        if array.shape[2] % 64 or array.shape[2] > CHANNELS:
            raise ValueError(
                f"The Pallas page kernel takes 64, 128, 192 or 256 channels; "
                f"got {name} with {array.shape[2]}."
            )
    if q.shape[1] > HEADS:
        raise ValueError(f"The Pallas page kernel takes groups of {HEADS} heads; got {q.shape[1]}.")
    if page_size != SLOTS or keys.shape[1] < SLOTS:
        raise ValueError(
            f"The Pallas page kernel takes pages of {SLOTS} slots, of a cache that holds one; "
            f"got pages of {page_size} and {keys.shape[1]} slots."
        )


def _attend(q, keys, values, pages, low, high, used, interpret):
    """Sums [rows, splits, heads, value], largest scores and totals [rows, splits, heads]."""
    rows, heads, key = q.shape
    slots, value = values.shape[1:]
    stages = 4 if key + value <= 256 else 2
    block_bytes = 2 * heads * key + 2 * stages * SLOTS * (key + value)
    at_once = PROCESSORS * max(1, SHARED_MEMORY // (block_bytes + 2048))
    splits = max(1, min(pages.shape[1], at_once // rows))
    square = (heads, SLOTS)

    grid = (rows, splits)

    def body(*refs):
        q, keys, values, pages, low, high, used, out, largest_out, total_out, *scratch = refs
        q_smem, key_smem, value_smem, q_loaded, loaded = scratch
        row, split = program(grid)
        count = used[row]
        first, last = (lax.div(count * (split + i), splits) for i in (0, 1))

        def start(i):  # the last page of a cache may end behind it
            return jnp.minimum(pages[row, i] * SLOTS, slots - SLOTS)

        def load(i, stage):
            those, barrier = pl.ds(start(i), SLOTS), loaded.at[stage]
            plgpu.copy_gmem_to_smem(keys.at[row, those], key_smem.at[stage], barrier)
            plgpu.copy_gmem_to_smem(values.at[row, those], value_smem.at[stage], barrier)

        plgpu.copy_gmem_to_smem(q.at[row], q_smem, q_loaded)
        for stage in range(stages):
            pl.when(first + stage < last)(lambda stage=stage: load(first + stage, stage))
        plgpu.barrier_wait(q_loaded)

        def step(i, carry):
            sums, largest, total = carry
            stage, begin = lax.rem(i - first, stages), start(i)
            bounds = low[row, i], high[row, i]
            plgpu.barrier_wait(loaded.at[stage])
            own = value_smem.at[stage]

            def is_asked(shape, axis):
                slot = begin + lax.broadcasted_iota(jnp.int32, shape, axis)
                return (slot >= bounds[0]) & (slot < bounds[1])

            @pl.when((bounds[0] > begin) | (bounds[1] < begin + SLOTS))
            def without_the_others():  # 0 * NaN is NaN
                asked = is_asked(own.shape, 0)
                own[...] = jnp.where(asked, own[...], jnp.zeros(own.shape, BF16))
                plgpu.commit_smem()

            s = sum_of_scores([(q_smem, key_smem.at[stage])], interpret) * LOG2_E
            s = jnp.where(is_asked(square, 1), s, -jnp.inf)
            p, kept, largest, total = next_softmax(s, largest, total)
            sums = sums * lax.broadcast_in_dim(kept, sums.shape, (0,))
            sums = plus_product(sums, p.astype(BF16), own, interpret)
            plgpu.commit_smem()  # whatever was read of this stage has been read
            pl.when(i + stages < last)(lambda: load(i + stages, stage))
            return sums, largest, total

        none = jnp.full((heads,), -jnp.inf, F32)
        carry = jnp.zeros((heads, value), F32), none, jnp.zeros((heads,), F32)
        sums, largest, total = lax.fori_loop(first, last, step, carry)
        out[row, split] = sums
        largest_out[row, split] = largest
        total_out[row, split] = total

    shapes = (rows, splits, heads, value), (rows, splits, heads), (rows, splits, heads)
    kernel = launch(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, F32) for shape in shapes],
        scratch_types=[
            plgpu.SMEM((heads, key), BF16),
            plgpu.SMEM((stages, SLOTS, key), BF16),
            plgpu.SMEM((stages, SLOTS, value), BF16),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        grid=grid,
        interpret=interpret,
    )
    return kernel(q, keys, values, pages, low, high, used)
