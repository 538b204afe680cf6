r"""Gradients of queries, keys, values and gates, where one decay serves all channels.

One kernel with one thread block per chunk does the backward pass of `prepare` and the products of
states and written values before it. Queries, keys, values and gradients of outputs are read in
place, [batch, time, heads, size], and gradients are written likewise; the walks left the state S
before the chunk, dS after it, N and dN. Neither scores nor products pass through memory.
With D_ij = e^(G_i - G_j), 0 for j > i and between documents,

    Y  = T^T dN                                      dV = beta * Y
    dP = (dO N^T) * D                                X  = -(Y N^T) * D below the diagonal
    dQ = e^G * (dO S^T) + dP K
    dK = e^(G_C - G) * (N dS^T) - beta e^G * (Y S^T) + dP^T Q + beta X K + (beta X)^T K

and without a delta rule N = V, dV = dN, and there is no Y or X. The gradients of the numbers of a
token are sums along its row, in float32:

    e^G: Q . (dO S^T)      e^(G_C - G): K . (N dS^T)      beta e^G: -K . (Y S^T)
    beta: V . Y + sum_j X_ij (K K^T)_ij

G moves scores up along its row and down along its column: with
F = dP * (Q K^T) + beta X * (K K^T), dG_i = sum_j F_ij - sum_j F_ji. XLA takes the numbers of a
token back to g and beta, and adds what several heads of values give to a query and key they share.

The kernel needs 199 KB on chip for a delta rule and heads of 128, and its sums of [64, 128] take
nearly all registers; `chunked` differentiates wider heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.prepare import (
    BETA,
    ENTRY,
    KEY_STRENGTH,
    LEAVE,
    SQUARE,
    below_diagonal,
    decays_between,
    numbers_of_tokens,
    per_row,
)
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, launch, program, token_place
from toolkit.attention.kernels.gpu.walk import Transposed, sum_of_products

WIDEST = 128  # channels of a head
# Sums of F along rows and columns, and gradients of the numbers of a token; beta has two.
ALONG, AGAINST, OF_ENTRY, OF_LEAVE, OF_BETA, OF_KEY_STRENGTH, OF_SYSTEM = range(7)


def gradients(
    q: Float[Array, "batch time key_heads key"], k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"], g: Float[Array, "rows time 1"],
    beta: Float[Array, "rows time"] | None, documents: Int[Array, "rows time"] | None,
    states: Float[Array, "rows chunks key value"],
    written: Float[Array, "rows chunks C value"] | Float[Array, "batch time heads value"],
    inverse: Float[Array, "rows chunks C C"] | None, d_out: Float[Array, "batch time heads value"],
    d_states: Float[Array, "rows chunks key value"],
    d_written: Float[Array, "rows chunks C value"] | Float[Array, "batch time heads value"], *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array | None]:  # fmt: skip
    """Gradients of q, k, v, g and beta, of heads of at most `WIDEST` channels.

    2 C K V + C^2 (3 K + V) multiply-adds per chunk, with a delta rule C K V + C^2 (3 K + 2 V) more.
    Reads 4 (C K + C V + K V) bytes and writes 4 C K; with a delta rule 2 (2 C V + C^2) and 2 C V
    more.
    """
    (numbers, _), pull = jax.vjp(lambda g, beta: numbers_of_tokens(g, beta, documents), g, beta)
    (rows, count), heads, is_delta = numbers.shape[:2], v.shape[2], beta is not None
    key, value = q.shape[-1], v.shape[-1]
    tokens = {"Q": q, "K": k, "V": v, "dO": d_out}
    chunks = {"numbers": numbers, "same numbers": numbers}
    if is_delta:
        chunks |= {"N": written, "dN": d_written, "T": inverse}
    late = {"S": states, "dS": d_states}
    sources = tokens | chunks | late
    kinds, of_keys = 7 if is_delta else 4, (CHUNK, key)

    grid = (rows, count)

    def body(*refs):
        *inputs, d_q, d_k, d_numbers, d_through = refs[: len(sources) + 4]
        *d_v, buffers, squares, d_q_smem, d_numbers_smem, d_through_smem = refs[len(sources) + 4 :][
            :-2
        ]
        smem, loaded = dict(zip(sources, buffers, strict=True)), refs[-2:]
        row, chunk = program(grid)
        place = row, chunk
        for name, source in zip(sources, inputs, strict=True):
            part = place
            if name in tokens:
                part = token_place(*place, heads, group=heads // source.shape[2])
            plgpu.copy_gmem_to_smem(source.at[part], smem[name], loaded[name in late])
        own = token_place(*place, heads)

        def product(shape, *pairs):
            return sum_of_products(shape, pairs, interpret)

        def times(kind, x):
            return per_row(smem["numbers"], kind, x.shape) * x

        def decayed(x):
            """Where nothing passes, NaN does not either."""
            return jnp.where(between == 0.0, 0.0, x * between)

        def row_sums(x, buffer):
            return jnp.sum(x * buffer[...].astype(F32), axis=1)

        def send(buffer, result, part):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, result.at[part])

        q_smem, k_smem, v_smem, d_out_smem = (smem[name] for name in tokens)
        written_smem, (d_scores_smem, *rest) = smem["N" if is_delta else "V"], squares
        plgpu.barrier_wait(loaded[0])
        if is_delta:
            y_smem, (d_system_smem,) = smem["dN"], rest
            y = product((CHUNK, value), (Transposed(smem["T"]), y_smem))
            d_numbers_smem[OF_BETA] = row_sums(y, v_smem)
            v_smem[...] = times(BETA, y).astype(BF16)
            plgpu.commit_smem()  # dN has been read
            y_smem[...] = y.astype(BF16)
            send(v_smem, d_v[0], own)
        between = decays_between(smem["numbers"], smem["same numbers"])
        d_scores = decayed(product(SQUARE, (d_out_smem, Transposed(written_smem))))
        d_scores_smem[...] = d_scores.astype(BF16)
        moves = d_scores * product(SQUARE, (q_smem, Transposed(k_smem)))
        if is_delta:
            d_system = decayed(-product(SQUARE, (y_smem, Transposed(written_smem))))
            d_system = below_diagonal(d_system)
            d_system_smem[...] = times(BETA, d_system).astype(BF16)
            d_system = d_system * product(SQUARE, (k_smem, Transposed(k_smem)))
            d_numbers_smem[OF_SYSTEM] = jnp.sum(d_system, axis=1)
            moves += times(BETA, d_system)
        d_numbers_smem[ALONG] = jnp.sum(moves, axis=1)
        d_numbers_smem[AGAINST] = jnp.sum(moves, axis=0)
        plgpu.commit_smem()

        plgpu.barrier_wait(loaded[1])
        state, d_state = (Transposed(smem[name]) for name in late)
        d_read = product(of_keys, (d_out_smem, state))
        d_numbers_smem[OF_ENTRY] = row_sums(d_read, q_smem)
        d_queries = times(ENTRY, d_read) + product(of_keys, (d_scores_smem, k_smem))
        d_q_smem[...] = d_queries.astype(BF16)
        send(d_q_smem, d_q, own)
        d_leave = product(of_keys, (written_smem, d_state))
        d_numbers_smem[OF_LEAVE] = row_sums(d_leave, k_smem)
        d_keys, pairs = times(LEAVE, d_leave), [(Transposed(d_scores_smem), q_smem)]
        if is_delta:
            d_erase = -product(of_keys, (y_smem, state))
            d_numbers_smem[OF_KEY_STRENGTH] = row_sums(d_erase, k_smem)
            d_keys += times(KEY_STRENGTH, d_erase)
            pairs += [(d_system_smem, k_smem), (Transposed(d_system_smem), k_smem)]
        d_keys = (d_keys + product(of_keys, *pairs)).astype(BF16)
        plgpu.commit_smem()  # keys have been read
        k_smem[...] = d_keys
        send(k_smem, d_k, own)
        for first in range(0, key, CHUNK):
            those = pl.ds(first, CHUNK)
            d_through_smem[those] = row_sums(smem["S"][those].astype(F32), smem["dS"].at[those])
        send(d_numbers_smem, d_numbers, place)
        send(d_through_smem, d_through, place)
        plgpu.wait_smem_to_gmem(0)

    def on_chip(name, x):
        return plgpu.SMEM((CHUNK, x.shape[-1]) if name in tokens else x.shape[2:], x.dtype)

    d_tokens = jax.ShapeDtypeStruct((rows // heads, count * CHUNK, heads, key), BF16)
    kernel = launch(
        body,
        out_type=[
            d_tokens,
            d_tokens,
            jax.ShapeDtypeStruct((rows, count, kinds, CHUNK), F32),
            jax.ShapeDtypeStruct((rows, count, key), F32),
            *([jax.ShapeDtypeStruct(v.shape, BF16)] if is_delta else []),
        ],
        scratch_types=[
            [on_chip(name, x) for name, x in sources.items()],
            [plgpu.SMEM(SQUARE, BF16)] * (1 + is_delta),
            plgpu.SMEM(of_keys, BF16),
            plgpu.SMEM((kinds, CHUNK), F32),
            plgpu.SMEM((key,), F32),
            plgpu.Barrier(num_arrivals=len(tokens | chunks)),
            plgpu.Barrier(num_arrivals=len(late)),
        ],
        grid=grid,
        interpret=interpret,
    )
    d_q, d_k, d_numbers, d_through, *d_v = kernel(*sources.values())
    along, against, *rest = jnp.moveaxis(d_numbers, 2, 0)
    # In the order of `numbers_of_tokens`; coarse sums and document numbers have no gradient.
    none = jnp.zeros_like(along)
    d_numbers = [none, along - against, *rest[:2], none]
    if is_delta:
        of_beta, of_key_strength, of_system = rest[2:]
        d_numbers += [of_beta + of_system, of_key_strength]
    d_numbers = jnp.stack(d_numbers, axis=2)
    d_g, d_beta = pull((d_numbers, jnp.sum(d_through, axis=-1, keepdims=True)))

    def of_key_heads(x):
        return x if x.shape == q.shape else jnp.sum(x.reshape(*q.shape[:3], -1, key), axis=3)

    return of_key_heads(d_q), of_key_heads(d_k), (d_v or [d_written])[0], d_g, d_beta
