r"""What does not depend on the state, for all chunks, on chip, where one decay serves all channels.

The factors of `factors`, and under a delta rule the solution of `solve`, in one kernel with
one thread block per chunk, from the tokens where they lie: queries, keys and values [batch, time,
heads, size] are read once, by bulk copies of [64, size] that step over the other heads. Heads of
values that share a query and key read the same one. Neither a copy with the heads before the time,
or with keys repeated, nor scores in float32 pass through memory:

    between_ij = e^(G_i - G_j), 0 for j > i and between documents
    P = (Q K^T) * between,   A = beta * (K K^T) * between below the diagonal
    R = e^G * Q,             L = e^(G_C - G) * K,          T, U, E of A

The backward pass kept T: it recomputes the factors and E = -T diag(beta e^G) K, but neither T nor
U.

Numbers per token come stacked from XLA, G as two sums whose differences are exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.factors import Factors, cut, document_masks, exact_sums
from toolkit.attention.kernels.gpu.solve import operand, scratch, write_solution
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, launch, program, token_place
from toolkit.attention.kernels.gpu.walk import Transposed, sum_of_products

SQUARE = (CHUNK, CHUNK)
COARSE, FINE, ENTRY, LEAVE, DOCUMENT, BETA, KEY_STRENGTH = range(7)


def numbers_of_tokens(
    g: Float[Array, "rows time 1"],
    beta: Float[Array, "rows time"] | None,
    documents: Int[Array, "rows time"] | None,
) -> tuple[Float[Array, "rows chunks kinds C"], Float[Array, "rows chunks 1"]]:
    """One row of numbers per token for each of the names above, and what passes a chunk."""
    # XLA would add up the zeros of a mixer without decay while it compiles, for tens of seconds.
    coarse, fine = exact_sums(lax.optimization_barrier(cut(g)))
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


def per_row(numbers: Any, kind: int, shape: tuple[int, int] = SQUARE) -> Array:
    """On chip, the number of every token along its row."""
    return lax.broadcast_in_dim(numbers[kind], shape, (0,))


def per_column(numbers: Any, kind: int) -> Array:
    """On chip, the number of every token along its column of a square."""
    return lax.broadcast_in_dim(numbers[kind], SQUARE, (1,))


def decays_between(numbers: Any, same_numbers: Any) -> Array:
    """On chip, e^(G_i - G_j) for j <= i in one document, else 0.

    The numbers lie there twice: jax 0.11 loads a place once, and has no way from the registers of a
    row to those of a column.
    """

    def difference(kind):
        return per_row(numbers, kind) - per_column(same_numbers, kind)

    i, j = (lax.broadcasted_iota(jnp.int32, SQUARE, axis) for axis in (0, 1))
    is_past = (j <= i) & (difference(DOCUMENT) == 0.0)
    return jnp.exp(jnp.where(is_past, difference(COARSE) + difference(FINE), -jnp.inf))


def below_diagonal(x: Array) -> Array:
    """On chip, x_ij for j < i, else 0."""
    i, j = (lax.broadcasted_iota(jnp.int32, SQUARE, axis) for axis in (0, 1))
    return jnp.where(j < i, x, 0.0)


def prepare(
    q: Float[Array, "batch time key_heads key"], k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"], g: Float[Array, "rows time 1"],
    beta: Float[Array, "rows time"] | None, documents: Int[Array, "rows time"] | None,
    inverse: Float[Array, "rows chunks C C"] | None = None, *,
    interpret: Any = False,
) -> tuple[Factors, list[Array]]:  # fmt: skip
    """The factors of all chunks in bf16 and, under a delta rule, T, U and E, or E of a known T.

    C^2 K multiply-adds per chunk, and under a delta rule twice that and those of `solve`; with T
    only C^2 K more. Reads 2 C (2 K + V) bytes and writes 2 (2 C K + C^2), with a delta rule
    2 (C^2 + C K + C V) more. With T it reads that instead of V, and writes 2 C K more.
    """
    numbers, through = numbers_of_tokens(g, beta, documents)
    (rows, count, kinds, _), (_, _, heads, value) = numbers.shape, v.shape
    key, is_delta = q.shape[-1], beta is not None
    is_solved = is_delta and inverse is None
    sources, shapes = [numbers, q, k], [(CHUNK, key), (CHUNK, key), SQUARE]
    if is_solved:
        sources, shapes = [*sources, v], [*shapes, SQUARE, (CHUNK, value), (CHUNK, key)]
    elif is_delta:
        sources, shapes = [*sources, inverse], [*shapes, (CHUNK, key)]

    grid = (rows, count)

    def body(*refs):
        inputs, outputs = len(sources), len(sources) + len(shapes)
        (numbers, *tokens), results = refs[:inputs], refs[inputs:outputs]
        numbers_smem, columns_smem, q_smem, k_smem, *later = refs[outputs:]
        leave_smem, scores_smem, rest, loaded = later
        row, chunk = program(grid)
        place = row, chunk
        plgpu.copy_gmem_to_smem(numbers.at[place], numbers_smem, loaded)
        plgpu.copy_gmem_to_smem(numbers.at[place], columns_smem, loaded)
        if is_delta and not is_solved:
            plgpu.copy_gmem_to_smem(tokens.pop().at[place], rest[0], loaded)
        for source, buffer in zip(tokens, (q_smem, k_smem, *rest[:is_solved]), strict=True):
            part = token_place(*place, heads, group=heads // source.shape[2])
            plgpu.copy_gmem_to_smem(source.at[part], buffer, loaded)
        plgpu.barrier_wait(loaded)

        def scores(left):
            return sum_of_products(SQUARE, [(left, Transposed(k_smem))], interpret) * between

        def scaled(buffer, kind):
            strength = per_row(numbers_smem, kind, (CHUNK, key))
            return (strength * buffer[...].astype(F32)).astype(BF16)

        def send(buffer, result):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, result.at[place])

        between = decays_between(numbers_smem, columns_smem)
        scores_smem[...] = scores(q_smem).astype(BF16)
        leave_smem[...] = scaled(k_smem, LEAVE)
        read, leave, attention, *solution = results
        send(scores_smem, attention)
        send(leave_smem, leave)
        q_smem[...] = scaled(q_smem, ENTRY)
        send(q_smem, read)
        if is_solved:
            values_smem, system_smem, strips = rest
            strength = per_row(numbers_smem, BETA)
            system_smem[...] = below_diagonal(strength * scores(k_smem))
            plgpu.commit_smem()
            by_token = lambda kind, block: columns_smem[BETA + kind, block]  # noqa: E731
            chunk = [x.at[place] for x in solution]
            write_solution(system_smem, values_smem, k_smem, by_token, strips, chunk, interpret)
        elif is_delta:
            strength = per_column(columns_smem, KEY_STRENGTH)
            applied = (-strength * rest[0][...].astype(F32)).astype(BF16)
            erase = sum_of_products((CHUNK, key), [(applied, k_smem)], interpret)
            plgpu.commit_smem()  # the keys have been read
            k_smem[...] = erase.astype(BF16)
            send(k_smem, *solution)
        plgpu.wait_smem_to_gmem(0)

    own = []
    if is_solved:
        own = [operand(value), plgpu.SMEM(SQUARE, F32), scratch()]
    elif is_delta:
        own = [plgpu.SMEM(SQUARE, BF16)]
    kernel = launch(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, count, *shape), BF16) for shape in shapes],
        scratch_types=[
            plgpu.SMEM((kinds, CHUNK), F32),
            plgpu.SMEM((kinds, CHUNK), F32),
            operand(key),
            operand(key),
            plgpu.SMEM((CHUNK, key), BF16),
            plgpu.SMEM(SQUARE, BF16),
            own,
            plgpu.Barrier(num_arrivals=len(sources) + 1),
        ],
        grid=grid,
        interpret=interpret,
    )
    read, leave, attention, *solution = kernel(*sources)
    through = jnp.broadcast_to(through, (rows, count, key))
    return Factors(read, leave, attention, through, v, None), solution
