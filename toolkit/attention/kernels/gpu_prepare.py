r"""What is known of all chunks before the state is, on chip, where one decay serves all channels.

The factors of `gpu_factors`, and under a delta rule the solution of `gpu_solve`, in one kernel with
one thread block per chunk, from the tokens where they lie: queries, keys and values [batch, time,
heads, size] are read once, by bulk copies of [64, size] that step over the other heads. Heads of
values that share a query and key read the same one. Neither a copy with the heads before the time,
or with keys repeated, nor scores in float32 pass through memory:

    between_ij = e^(G_i - G_j), 0 for j > i and between documents
    P = (Q K^T) * between,   A = beta * (K K^T) * between below the diagonal
    R = e^G * Q,             L = e^(G_C - G) * K,          T, U, E of A

What is one number per token comes stacked from XLA; G as two sums whose differences are exact.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu_factors import Factors, Solution, cut, document_masks
from toolkit.attention.kernels.gpu_solve import operand, scratch, write_solution
from toolkit.attention.kernels.gpu_support import BF16, CHUNK, F32, launch, token_place
from toolkit.attention.kernels.gpu_walk import Transposed, sum_of_products
from toolkit.attention.linear.engine.decays import exact_sums

SQUARE = (CHUNK, CHUNK)
COARSE, FINE, ENTRY, LEAVE, DOCUMENT, BETA, KEY_STRENGTH = range(7)


class Prepared(NamedTuple):
    """What the walk and the outputs need."""

    factors: Factors
    solution: Solution | None


def _numbers(g, beta, documents) -> tuple[Array, Array]:
    """One row of numbers per token for each of the names above, and what passes a chunk."""
    coarse, fine = exact_sums(cut(g))
    entry = jnp.exp(coarse + fine)
    leave = jnp.exp(coarse[:, :, -1:] - coarse + fine[:, :, -1:] - fine)
    through, document = entry[:, :, -1], jnp.zeros_like(coarse)
    if documents is not None:
        masks = document_masks(documents)
        entry, leave = jnp.where(masks.entry, entry, 0), jnp.where(masks.leave, leave, 0)
        through = jnp.where(masks.through, through, 0)
        document = cut(documents)[..., None].astype(F32)
    numbers = [coarse, fine, entry, leave, document]
    if beta is not None:
        strength = cut(beta)[..., None]
        numbers += [strength, strength * entry]
    return jnp.moveaxis(jnp.concatenate(numbers, axis=-1), -1, 2), through


def prepare(
    q: Float[Array, "batch time key_heads key"],
    k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "rows time 1"],
    beta: Float[Array, "rows time"] | None,
    documents: Int[Array, "rows time"] | None,
    *,
    interpret: Any = False,
) -> Prepared:
    """Factors and solution of all chunks, in bf16.

    C^2 K multiply-adds per chunk, and under a delta rule twice that and those of `solve`. Reads
    2 C (2 K + V) bytes and writes 2 (2 C K + C^2), with a delta rule 2 (C^2 + C K + C V) more.
    """
    numbers, through = _numbers(g, beta, documents)
    (rows, count, kinds, _), (_, _, heads, value) = numbers.shape, v.shape
    key, is_delta = q.shape[-1], beta is not None

    def body(*refs):
        inputs, outputs = 3 + is_delta, 3 + 3 * is_delta
        sources, results = refs[:inputs], refs[inputs : inputs + outputs]
        q_smem, k_smem, leave_smem, scores_smem, numbers_smem, *rest = refs[inputs + outputs :]
        *rest, loaded = rest
        place = lax.axis_index("row"), lax.axis_index("chunk")
        plgpu.copy_gmem_to_smem(sources[0].at[place], numbers_smem, loaded)
        for source, buffer in zip(sources[1:], (q_smem, k_smem, *rest[:1]), strict=True):
            tokens = token_place(*place, heads, group=heads // source.shape[2])
            plgpu.copy_gmem_to_smem(source.at[tokens], buffer, loaded)
        plgpu.barrier_wait(loaded)

        def per_row(kind, shape=SQUARE):
            return lax.broadcast_in_dim(numbers_smem[kind], shape, (0,))

        def difference(kind):
            return per_row(kind) - lax.broadcast_in_dim(numbers_smem[kind], SQUARE, (1,))

        def scores(left):
            return sum_of_products(SQUARE, [(left, Transposed(k_smem))], interpret) * between

        def scaled(buffer, kind):
            return (per_row(kind, (CHUNK, key)) * buffer[...].astype(F32)).astype(BF16)

        def send(buffer, result):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, result.at[place])

        i, j = (lax.broadcasted_iota(jnp.int32, SQUARE, axis) for axis in (0, 1))
        is_past = (j <= i) & (difference(DOCUMENT) == 0.0)
        between = jnp.exp(jnp.where(is_past, difference(COARSE) + difference(FINE), -jnp.inf))
        scores_smem[...] = scores(q_smem).astype(BF16)
        leave_smem[...] = scaled(k_smem, LEAVE)
        read, leave, attention, *solution = results
        send(scores_smem, attention)
        send(leave_smem, leave)
        q_smem[...] = scaled(q_smem, ENTRY)
        send(q_smem, read)
        if is_delta:
            values_smem, system_smem, strips = rest
            system_smem[...] = jnp.where(i == j, 0.0, per_row(BETA) * scores(k_smem))
            plgpu.commit_smem()
            by_token = lambda kind, block: numbers_smem[BETA + kind, block]  # noqa: E731
            chunk = [x.at[place] for x in solution]
            write_solution(system_smem, values_smem, k_smem, by_token, strips, chunk, interpret)
        plgpu.wait_smem_to_gmem(0)

    def chunks(*shape):
        return jax.ShapeDtypeStruct((rows, count, *shape), BF16)

    tokens = [chunks(CHUNK, key), chunks(CHUNK, key), chunks(*SQUARE)]
    solved = [chunks(*SQUARE), chunks(CHUNK, value), chunks(CHUNK, key)] if is_delta else []
    kernel = launch(
        body,
        out_type=[*tokens, *solved],
        scratch_types=[
            operand(key),
            operand(key),
            plgpu.SMEM((CHUNK, key), BF16),
            plgpu.SMEM(SQUARE, BF16),
            plgpu.SMEM((kinds, CHUNK), F32),
            *([operand(value), plgpu.SMEM(SQUARE, F32), scratch()] if is_delta else []),
            plgpu.Barrier(num_arrivals=3 + is_delta),
        ],
        grid=(rows, count),
        grid_names=("row", "chunk"),
        interpret=interpret,
    )
    read, leave, attention, *solved = kernel(numbers, q, k, *([v] if is_delta else []))
    through = jnp.broadcast_to(through, (rows, count, key))
    factors = Factors(read, leave, attention, through, v, None)
    return Prepared(factors, Solution(*solved) if solved else None)
