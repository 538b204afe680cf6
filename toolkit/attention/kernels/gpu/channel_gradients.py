r"""Gradients of queries, keys and log-decays where every channel decays on its own, on chip.

The way back through `channels`, one thread block per chunk, 64 channels at a time. Given are the
gradients of its results: dP and, under a delta rule, dA times beta, dR, dL and that of e^G * K. For
every bit of a place, with E the factors of that bit and M the pairs that belong to it,

    dQ += E * ((M * dP) (E * K))
    dK += E * ((M * dP)^T (E * Q) + (M * dA) (E * K) + (M * dA)^T (E * K))

G raises what a token reads and lowers what is read of it, so that with dQ and dK of these products,
and dK counted negatively in the first half, where it is read, dG = Q * dQ + K * dK. What enters and
leaves the chunk adds its own, and the gradient of g at a place sums dG over all later ones:
products of ones and of dG as the sum of two bf16 numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.channels import (
    BITS,
    DOCUMENT,
    ENTRY,
    LEAVE,
    TILE,
    as_ones,
    between,
    first_differ_in,
    numbers_of_tokens,
    places,
    sums,
)
from toolkit.attention.kernels.gpu.factors import Factors
from toolkit.attention.kernels.gpu.prepare import per_column, per_row
from toolkit.attention.kernels.gpu.solve import halves
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, launch, program, token_place
from toolkit.attention.kernels.gpu.walk import Transposed, sum_of_products


def channel_gradients(
    q: Float[Array, "batch time key_heads key"], k: Float[Array, "batch time key_heads key"],
    g: Float[Array, "batch time heads key"], documents: Int[Array, "rows time"] | None,
    of: Factors, *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Gradients of q, k and g and, under a delta rule, of beta times beta by the scores alone.

    `of` holds the gradients of the factors, those of a system times beta, in bf16; that of
    `through` is times it.

    C^2 K multiply-adds of scores for each of 6 bits, thrice more with a delta rule, and as many for
    the sums. Reads 12 C K bytes and 2 C^2, with a delta rule twice that and 2 C K; writes 8 C K.
    """
    (batch, time, heads, key), is_delta = g.shape, of.delta is not None
    rows, count = batch * heads, time // CHUNK
    numbers = numbers_of_tokens(None, documents, rows, count)
    tokens = {"Q": q, "K": k, "g": g}
    squares, tiles = [of.scores], [of.read, of.leave]
    if of.delta is not None:
        squares, tiles = [*squares, of.delta.system], [*tiles, of.delta.keys]
    sources = [*tokens.values(), *squares, *tiles, of.through, numbers]
    tile, grid = (CHUNK, TILE), (rows, count)
    d_tokens = jax.ShapeDtypeStruct((batch, time, heads, key), BF16)
    types = [d_tokens, d_tokens, jax.ShapeDtypeStruct(g.shape, F32)]
    types += [jax.ShapeDtypeStruct((rows, count, key // TILE, CHUNK), F32)] * is_delta

    def body(*refs):
        inputs, outputs = refs[: len(sources)], refs[len(sources) : len(sources) + len(types)]
        token_refs, square_refs = inputs[:3], inputs[3 : 3 + len(squares)]
        *tile_refs, through, numbers_hbm = inputs[3 + len(squares) :]
        smem = refs[len(sources) + len(types) :]
        token_smem, square_smem, of_bit_smem, entry_smem, pair, work, vectors, barriers = smem
        q_smem, k_smem, g_smem = token_smem
        late_smem, early_smem = work
        numbers_smem, columns_smem, through_smem, beta_smem = vectors
        given, loaded, late_loaded = barriers
        row, chunk = program(grid)
        place = row, chunk
        plgpu.copy_gmem_to_smem(numbers_hbm.at[place], numbers_smem, given)
        plgpu.copy_gmem_to_smem(numbers_hbm.at[place], columns_smem, given)
        for source, buffer in zip(square_refs, square_smem, strict=True):
            plgpu.copy_gmem_to_smem(source.at[place], buffer, given)
        i, j = places()
        entry_smem[...] = as_ones(j <= i)
        plgpu.barrier_wait(given)

        def of_one_document(x):
            if documents is None:
                return x
            other = per_row(numbers_smem, DOCUMENT) != per_column(columns_smem, DOCUMENT)
            return jnp.where(other, jnp.zeros_like(x), x)

        for buffer in square_smem:
            buffer[...] = of_one_document(buffer[...].astype(F32)).astype(BF16)
        plgpu.commit_smem()

        def passes(kind, factor):
            if documents is None:
                return factor
            return per_row(numbers_smem, kind, tile) * factor

        def product(*pairs):
            return sum_of_products(tile, pairs, interpret)

        def wide(buffer):
            return buffer[...].astype(F32)

        def belong(those):
            """What of the gradients of scores belongs to these pairs, on chip."""
            for source, buffer in zip(square_smem, of_bit_smem, strict=True):
                buffer[...] = jnp.where(those, wide(source), 0.0).astype(BF16)

        def one_tile(number, _):
            columns = pl.ds(number * TILE, TILE)

            def tokens_of(array):
                return token_place(*place, heads, columns, group=heads // array.shape[2])

            for source, buffer in zip(token_refs, token_smem, strict=True):
                plgpu.copy_gmem_to_smem(source.at[tokens_of(source)], buffer, loaded)
            plgpu.barrier_wait(loaded)
            for buffer, half in zip(pair, halves(g_smem[...]), strict=True):
                buffer[...] = half
            plgpu.commit_smem()

            def one_bit(number, gradients):
                of_q, of_k, signed = gradients
                bit = lax.shift_left(1, number)
                factor = jnp.exp(sums(between(bit), pair, interpret))
                late_smem[...] = (factor * wide(q_smem)).astype(BF16)
                early_smem[...] = (factor * wide(k_smem)).astype(BF16)
                belong(first_differ_in(bit))
                plgpu.commit_smem()
                of_q += factor * product((of_bit_smem[0], early_smem))
                pairs = [(Transposed(of_bit_smem[0]), late_smem)]
                if is_delta:
                    pairs += [(x, early_smem) for x in (Transposed(of_bit_smem[1]), of_bit_smem[1])]
                new = factor * product(*pairs)
                plgpu.commit_smem()  # all have been read
                is_late = (lax.broadcasted_iota(jnp.int32, tile, 0) & bit) != 0
                return of_q, of_k + new, signed + jnp.where(is_late, new, -new)

            nothing = (jnp.zeros(tile, F32),) * 3
            if not interpret:
                nothing = tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in nothing)
            of_q, of_k, signed = lax.fori_loop(0, BITS, one_bit, nothing)
            if is_delta:
                beta_smem[...] = 0.5 * jnp.sum(wide(k_smem) * (of_k + signed), axis=1)
            of_g = wide(q_smem) * of_q + wide(k_smem) * signed
            belong(i == j)
            for source, buffer in zip(tile_refs, (*work, of_bit_smem[-1]), strict=False):
                part = source.at[(*place, slice(None), columns)]
                plgpu.copy_gmem_to_smem(part, buffer, late_loaded)
            plgpu.copy_gmem_to_smem(through.at[(*place, columns)], through_smem, late_loaded)
            plgpu.commit_smem()
            of_q += product((of_bit_smem[0], k_smem))
            of_k += product((of_bit_smem[0], q_smem))
            plgpu.commit_smem()  # both have been read
            leave_smem = of_bit_smem[0]
            leave_smem[...] = as_ones(j > i)
            plgpu.commit_smem()
            plgpu.barrier_wait(late_loaded)
            entry = passes(ENTRY, jnp.exp(sums(entry_smem, pair, interpret)))
            new = entry * wide(late_smem)
            of_q, of_g = of_q + new, of_g + wide(q_smem) * new
            if is_delta:
                new = entry * wide(of_bit_smem[1])
                of_k, of_g = of_k + new, of_g + wide(k_smem) * new
            new = passes(LEAVE, jnp.exp(sums(leave_smem, pair, interpret))) * wide(early_smem)
            leaving = wide(k_smem) * new
            plgpu.commit_smem()  # all has been read
            of_k += new
            for buffer, half in zip((*pair, *work), (*halves(of_g), *halves(leaving)), strict=True):
                buffer[...] = half
            q_smem[...], k_smem[...] = of_q.astype(BF16), of_k.astype(BF16)
            plgpu.commit_smem()
            later = [(Transposed(entry_smem), x) for x in pair]
            later += [(Transposed(leave_smem), x) for x in work]
            g_smem[...] = product(*later) + lax.broadcast_in_dim(through_smem[...], tile, (1,))
            plgpu.commit_smem()
            own = token_place(*place, heads, columns)
            for buffer, result in zip(token_smem, outputs, strict=False):
                plgpu.copy_smem_to_gmem(buffer, result.at[own])
            if is_delta:
                plgpu.copy_smem_to_gmem(beta_smem, outputs[3].at[(*place, number)])
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, key // TILE, one_tile, None)

    operand = plgpu.SMEM(tile, BF16)
    vector = plgpu.SMEM((TILE,), F32)
    kinds = plgpu.SMEM(numbers.shape[2:], F32)
    kernel = launch(
        body,
        out_type=types,
        scratch_types=[
            [plgpu.SMEM(tile, x.dtype) for x in tokens.values()],
            [operand] * len(squares),
            [operand] * len(squares),
            operand,
            *[[operand] * 2] * 2,
            [kinds, kinds, vector, vector],
            [
                plgpu.Barrier(num_arrivals=2 + len(squares)),
                plgpu.Barrier(num_arrivals=3),
                plgpu.Barrier(num_arrivals=len(tiles) + 1),
            ],
        ],
        grid=grid,
        interpret=interpret,
    )
    d_q, d_k, d_g, *d_beta = kernel(*sources)
    group = heads // q.shape[2]

    def of_key_heads(x):
        return x if group == 1 else jnp.sum(x.reshape(*q.shape[:3], group, key), axis=3)

    of_beta = jnp.sum(d_beta[0], axis=2) if is_delta else None
    return of_key_heads(d_q), of_key_heads(d_k), d_g, of_beta
