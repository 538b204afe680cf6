r"""The factors of all chunks where every channel decays on its own, on chip.

One thread block per chunk computes what `factors` defines, from queries, keys and log-decays where
they lie, [batch, time, heads, channels], 64 channels at a time. No number that belongs to a pair of
tokens and a channel is ever made: for the pairs whose places first differ in one bit, say of value
w, the decay is a product of two factors, both at most one,

    e^(G_i - G_j) = e^(sum of g over m..i) e^(sum of g over j+1..m-1)

with m the place where the half of i begins; i lies in a second half of w tokens, j in the first. So
for each of the six bits of a place there is one factor per token and channel, whichever half it
lies in, one product of 64 x 64 for queries and keys and one for keys and keys, of which the pairs
of that bit are kept. Tokens on the diagonal do not decay.

The sums of g are products too: of a matrix of ones and zeros, which bf16 holds exactly, and of g as
the sum of two bf16 numbers. Every one is a sum of numbers of one sign, so that no difference of
running sums loses digits beside an abrupt gate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.factors import Delta, Factors, cut, document_masks
from toolkit.attention.kernels.gpu.prepare import SQUARE, below_diagonal, per_column, per_row
from toolkit.attention.kernels.gpu.solve import halves
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, launch, program, token_place
from toolkit.attention.kernels.gpu.walk import Transposed, sum_of_products

TILE = 64  # channels at a time
BITS = 6  # of a place in a chunk
# Numbers per token: beta, and, where documents meet, whose it is and what passes its chunk's ends.
BETA, DOCUMENT, ENTRY, LEAVE, THROUGH = range(5)


def numbers_of_tokens(
    beta: Float[Array, "rows time"] | None, documents: Int[Array, "rows time"] | None,
    rows: int, count: int,
) -> Float[Array, "rows chunks kinds C"]:  # fmt: skip
    """One row of numbers per token for each of the names above."""
    numbers = [jnp.zeros((rows, count, CHUNK)) if beta is None else cut(beta)]
    if documents is not None:
        masks = document_masks(documents)
        through = jnp.broadcast_to(masks.through, (rows, count, CHUNK))
        numbers += [cut(documents), masks.entry[..., 0], masks.leave[..., 0], through]
    return jnp.stack([x.astype(F32) for x in numbers], axis=2)


def places() -> tuple[Array, Array]:
    """On chip, the places of the row and of the column of a square."""
    i, j = (lax.broadcasted_iota(jnp.int32, SQUARE, axis) for axis in (0, 1))
    return i, j


def as_ones(holds: Array) -> Array:
    """On chip, a matrix to multiply by."""
    return jnp.where(holds, 1.0, 0.0).astype(BF16)


def between(bit: Array) -> Array:
    """On chip, for the place i of a row: ones for the places between it and the middle of the
    2 * bit places around it.
    """
    i, j = places()
    beyond = jnp.where((i & bit) != 0, i - j, j - i - 1)  # on its side of the middle, not negative
    return as_ones(((i ^ j) < bit) & (beyond >= 0))


def first_differ_in(bit: Array) -> Array:
    """On chip, whether i > j and this is the highest bit in which they differ."""
    i, j = places()
    return ((i ^ j) >= bit) & ((i ^ j) < 2 * bit) & (i > j)


def sums(ones: Array, pair: Any, interpret: Any) -> Array:
    """On chip, sums of log-decays over the places that a row has ones for."""
    return sum_of_products((CHUNK, TILE), [(ones, half) for half in pair], interpret)


def channel_factors(
    q: Float[Array, "batch time key_heads key"], k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"], g: Float[Array, "batch time heads key"],
    beta: Float[Array, "rows time"] | None, documents: Int[Array, "rows time"] | None, *,
    interpret: Any = False,
) -> Factors:  # fmt: skip
    """The factors of all chunks; those of a delta rule are not solved. Keys are multiples of 64.

    C^2 K multiply-adds of scores for each of 7 bits and the diagonal, twice with a delta rule, and
    as many for the sums; 8 exponentials per token and channel. Reads 8 C K bytes and writes
    4 C K + 2 C^2, with a delta rule 2 C K + 4 C^2 more.
    """
    (batch, time, heads, key), is_delta = g.shape, beta is not None
    rows, count = batch * heads, time // CHUNK
    numbers = numbers_of_tokens(beta, documents, rows, count)
    sources = {"Q": q, "K": k, "g": g}
    grid = (rows, count)
    of_keys, wide = (CHUNK, key), (rows, count)
    types = [
        jax.ShapeDtypeStruct((*wide, *of_keys), BF16),  # R
        jax.ShapeDtypeStruct((*wide, *of_keys), BF16),  # L
        jax.ShapeDtypeStruct((*wide, *SQUARE), BF16),  # P
        jax.ShapeDtypeStruct((*wide, key), F32),
    ]
    if is_delta:
        types += [
            jax.ShapeDtypeStruct((*wide, *SQUARE), F32),  # A
            jax.ShapeDtypeStruct((*wide, *of_keys), BF16),  # e^G * K
        ]

    def body(*refs):
        tokens, numbers_hbm, results = refs[:3], refs[3], refs[4 : 4 + len(types)]
        numbers_smem, columns_smem, *buffers, through_smem, given, loaded = refs[4 + len(types) :]
        q_smem, k_smem, g_smem, late_smem, early_smem, until_smem, beyond_smem, *pair = buffers
        read, leave, attention_hbm, through, *delta = results
        row, chunk = program(grid)
        place = row, chunk
        plgpu.copy_gmem_to_smem(numbers_hbm.at[place], numbers_smem, given)
        plgpu.copy_gmem_to_smem(numbers_hbm.at[place], columns_smem, given)
        plgpu.barrier_wait(given)

        def passes(kind, factor):
            if documents is None:
                return factor
            return per_row(numbers_smem, kind, (CHUNK, TILE)) * factor

        def product(left, right):
            return sum_of_products(SQUARE, [(left, Transposed(right))], interpret)

        def one_tile(number, scores):
            columns = pl.ds(number * TILE, TILE)
            for source, buffer in zip(tokens, (q_smem, k_smem, g_smem), strict=True):
                part = token_place(*place, heads, columns, group=heads // source.shape[2])
                plgpu.copy_gmem_to_smem(source.at[part], buffer, loaded)
            plgpu.barrier_wait(loaded)
            g = g_smem[...]
            for buffer, half in zip(pair, halves(g), strict=True):
                buffer[...] = half
            passed = jnp.exp(jnp.sum(g, axis=0))
            if documents is not None:
                passed = passed * columns_smem[THROUGH]
            through_smem[...] = passed
            plgpu.commit_smem()

            def scaled(factor, buffer):
                return (factor * buffer[...].astype(F32)).astype(BF16)

            def one_bit(number, scores):
                # A loop: or what tells the pairs of all bits apart would stay in registers.
                bit = lax.shift_left(1, number)
                factor = jnp.exp(sums(between(bit), pair, interpret))
                late_smem[...] = scaled(factor, q_smem)
                early_smem[...] = scaled(factor, k_smem)
                plgpu.commit_smem()
                belongs = first_differ_in(bit)
                lefts = (late_smem, early_smem)[: len(scores)]
                scores = tuple(
                    old + jnp.where(belongs, product(left, early_smem), 0.0)
                    for old, left in zip(scores, lefts, strict=True)
                )
                plgpu.commit_smem()  # both have been read
                return scores

            i, j = places()
            own = jnp.where(i == j, product(q_smem, k_smem), 0.0)
            scores = lax.fori_loop(0, BITS, one_bit, (scores[0] + own, *scores[1:]))
            entry = passes(ENTRY, jnp.exp(sums(until_smem, pair, interpret)))
            late_smem[...] = scaled(entry, q_smem)
            out = [(late_smem, read), (k_smem, leave)]
            if is_delta:
                early_smem[...] = scaled(entry, k_smem)
                out.append((early_smem, delta[1]))
            left = passes(LEAVE, jnp.exp(sums(beyond_smem, pair, interpret)))
            k_smem[...] = scaled(left, k_smem)
            plgpu.commit_smem()
            for buffer, result in out:
                plgpu.copy_smem_to_gmem(buffer, result.at[(*place, slice(None), columns)])
            plgpu.copy_smem_to_gmem(through_smem, through.at[(*place, columns)])
            plgpu.wait_smem_to_gmem(0)
            return scores

        # Not in registers: those that a loop keeps for its next turn were found overwritten.
        i, j = places()
        until_smem[...], beyond_smem[...] = as_ones(j <= i), as_ones(j > i)
        nothing = (jnp.zeros(SQUARE, F32),) * (1 + is_delta)
        if not interpret:
            nothing = tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in nothing)
        attention, *system = lax.fori_loop(0, key // TILE, one_tile, nothing)

        def of_one_document(x):
            if documents is None:
                return x
            other = per_row(numbers_smem, DOCUMENT) != per_column(columns_smem, DOCUMENT)
            return jnp.where(other, 0.0, x)

        late_smem[...] = of_one_document(attention).astype(BF16)
        if is_delta:
            strength = per_row(numbers_smem, BETA)
            g_smem[...] = below_diagonal(of_one_document(strength * system[0]))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(late_smem, attention_hbm.at[place])
        if is_delta:
            plgpu.copy_smem_to_gmem(g_smem, delta[0].at[place])
        plgpu.wait_smem_to_gmem(0)

    tile = (CHUNK, TILE)
    kernel = launch(
        body,
        out_type=types,
        scratch_types=[
            plgpu.SMEM(numbers.shape[2:], F32),
            plgpu.SMEM(numbers.shape[2:], F32),
            *(plgpu.SMEM(tile, x.dtype) for x in sources.values()),
            *[plgpu.SMEM(tile, BF16)] * 6,
            plgpu.SMEM((TILE,), F32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=len(sources)),
        ],
        grid=grid,
        interpret=interpret,
    )
    read, leave, attention, through, *delta = kernel(*sources.values(), numbers)
    if beta is None:
        return Factors(read, leave, attention, through, v, None)
    strength = cut(beta)
    strengths = jnp.stack([strength, strength], axis=2)
    return Factors(read, leave, attention, through, v, Delta(delta[0], delta[1], strengths))
