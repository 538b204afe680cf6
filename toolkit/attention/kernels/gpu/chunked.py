r"""Chunked linear-time mixers on Hopper GPUs: simple decay, Gated DeltaNet, Kimi Delta Attention.

Runs on NVIDIA H100, H200 and GH200 (compute capability 9.0). Blackwell has no WGMMA and is
refused; earlier chips too. Queries, keys and values are bf16. Gates, sums, the chunk inverse and
the carried state are float32; the state is rounded to bf16 as an operand of a product, and the
inverse is found from products of pairs of bf16 numbers (16 bits).

A chunk is 64 tokens. The work is split where its parallelism changes:

    prepare    all chunks at once    scores, decays, T = (I + A)^-1, U, E     prepare
    walk       chunk after chunk     states at boundaries, N                  walk
    outputs    all chunks at once    O = R S + P N                            outputs

    prepare    all chunks at once    factors again, E of the T that was kept  prepare
    walk back  chunk after chunk     gradients of states and of N             walk
    gradients  all chunks at once    of q, k, v, and numbers per token        gradients

Kept for the way back are the inputs, T, N and the states at chunk boundaries. What belongs to
tokens is read and written where they lie, [batch, time, heads, size]: nothing is copied before or
after, or repeated where heads of values share a query and key. Where channels decay apart,
`channels` finds the factors and `solve` the rest; on the way back XLA multiplies what the walk
leaves, from copies with heads before time, and `channel_gradients` does the rest. Gradients of
heads beyond 128 with one decay are XLA's but for the walk (`factors`).

Why split: the walk is sequential in 256 steps for 16,384 tokens, and only rows times tiles of
columns run beside each other: 128 thread blocks at (2, 16384, 16, 128) for 132 processors. A
fused kernel would do everything in those blocks. Split, the walk does 2 of a chunk's 8 products
and none of its inverse, and the rest runs in 8,192 independent blocks. The price is states and N
through memory: 96 KB per chunk of 128 x 128 beside the 64 KB of q, k, v and outputs.

The floor on an H200 (989 TFLOP/s bf16, 4.8 TB/s) at batch 2, time 16384, heads 16, key = value =
128, that is 524,288 tokens of a head, counting each input and output once:

    forward    Gated DeltaNet         88 GFLOP  89 us    541 MB  113 us    floor 113 us
               Kimi Delta Attention   88 GFLOP  89 us    807 MB  168 us    floor 168 us
               simple decay           52 GFLOP  52 us    539 MB  112 us    floor 112 us
    backward   Gated DeltaNet        180 GFLOP 182 us    948 MB  198 us    floor 198 us

What the programs move there, summed over the kernels that XLA compiles for this chip, and how long
that takes at 4.8 TB/s (modelled, as is the floor):

                           forward            forward and backward
    simple decay            1.9 GB  0.4 ms     4.8 GB  1.0 ms
    Gated DeltaNet          2.7 GB  0.6 ms     6.4 GB  1.3 ms
    Kimi Delta Attention    3.4 GB  0.7 ms

Next to gain are the products that XLA makes on the way back where channels decay apart; gradients
on chip for heads of 256; and, in the walk back, R and L from the queries and keys themselves. A
mixer's call moves 1.5 GB more, as it looks for NaN in its inputs and keeps them
from spreading.

What bf16 costs: with keys of unit length in directions of their own, outputs and gradients stay
within 0.005 and 0.008 of the float32 token loop (relative, root mean square). Keys that hardly
differ, written with beta near 2 and no decay, make N alternate in sign and cancel in the state:
there outputs lose 1 % and gates 4 %. Where that matters, take implementation="xla" in float32.

What is proven without a GPU: the interpreter, which runs these very kernels, agrees with the
token loop in values and gradients, with uninitialised memory as NaN and no race found; the
kernels lower for CUDA within shared memory; and with jax's CUDA plugin installed, ptxas compiles
them ahead of time for sm_90a, with at most 197 registers a thread, 255 where gradients of a delta
rule are found, and nothing spilled (heads of 256: 210 where chunks are prepared, 255 and 128 bytes
in the walk back; where channels decay apart 255, and up to 368 bytes). Operands in registers, and
those read by columns, are multiplied by `jnp.dot` where interpreted. On an H100 under jax 0.11.2
every mixer's values (within .005) and gradients (.0071) agreed with the loop in float32. Times
there, recorded in data/measurements/nvidia-h100/accelerator.json, at the shape above:

                            forward    in XLA    fla's    forward and backward    in XLA
    simple decay             1.6 ms    6.9 ms   1.0 ms                  2.7 ms   18.1 ms
    Gated DeltaNet           2.2 ms   13.3 ms   1.3 ms                  4.0 ms   49.2 ms
    channels                 2.7 ms   13.8 ms                           6.9 ms   35.0 ms
    Kimi Delta Attention     3.4 ms   42.0 ms   2.8 ms                 10.1 ms  124.6 ms
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.execution.derivatives import no_derivative
from toolkit.attention.kernels.gpu.channel_gradients import channel_gradients
from toolkit.attention.kernels.gpu.channels import channel_factors
from toolkit.attention.kernels.gpu.factors import (
    Delta,
    Factors,
    Solution,
    cut,
    dot,
    factors,
    shared,
)
from toolkit.attention.kernels.gpu.gradients import WIDEST, gradients
from toolkit.attention.kernels.gpu.outputs import outputs
from toolkit.attention.kernels.gpu.prepare import prepare
from toolkit.attention.kernels.gpu.solve import solve
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, check_chip, check_heads, padded
from toolkit.attention.kernels.gpu.walk import walk, walk_backward

SMALLEST = 1e-6  # of a beta that gradients are divided by


def chunked(
    q: Float[Array, "batch time key_heads key"],
    k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "batch time heads channels"],
    beta: Float[Array, "batch time heads"] | None,
    initial_state: Float[Array, "batch heads key value"],
    *,
    chunk: int = CHUNK,
    documents: Int[Array, "batch time"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    r"""Mix tokens through a decaying state, with or without a delta rule.

        S <- diag(e^g) S,   S <- S + k u^T,   o = S^T q
        u = v, or beta (v - S^T k) with a delta rule

    q, k and v are bf16, the queries already scaled, g finite and not summed up; the time is a
    multiple of 64, padded with k = v = beta = g = 0. The numbers of `documents` never fall, and no
    state passes between two of them; the initial state belongs to the first. `interpret` is False,
    True (jax >= 0.11) or the parameters of the GPU interpreter.

    Forward 3 C K V + 2 C^2 (K + V) + C^3 / 2 multiply-adds per chunk and row with a delta rule,
    2 C K V + C^2 (K + V) without. Kept for the backward pass: the inputs, N and a bf16 state per
    chunk and row. Keys are padded to a multiple of 64 and values to one of 32.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3; Kimi
    Team, "Kimi Linear" (arXiv:2510.26692); Dao and Gu, "Transformers are SSMs"
    (arXiv:2405.21060). The split into phases is flash-linear-attention's.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            raise TypeError(
                f'{name} must be bfloat16 for implementation="pallas" on a GPU; got {x.dtype}. '
                f'implementation="xla" takes float32.'
            )
    if chunk != CHUNK:
        raise ValueError(f"chunk must be {CHUNK} on a GPU; got {chunk}.")
    if q.shape[1] % CHUNK or q.shape[1] == 0:
        raise ValueError(f"time must be a positive multiple of {CHUNK}; got {q.shape[1]}.")
    check_heads(q.shape[-1], v.shape[-1])
    check_chip(interpret)
    key, value = q.shape[-1], v.shape[-1]
    g = padded(g, 64) if g.shape[-1] != 1 else _rows(g)
    heads, sizes = v.shape[2], initial_state.shape
    state = initial_state.reshape(-1, *initial_state.shape[2:])
    state = jnp.pad(state, [(0, 0), (0, -key % 64), (0, -value % 32)])
    if documents is not None:
        documents = jnp.repeat(documents, heads, axis=0)
    beta = None if beta is None else _rows(beta)
    inputs = padded(q, 64), padded(k, 64), padded(v, 32), g, beta, documents, state
    out, state = _differentiable(*inputs, interpret)
    return out[..., :value], state[:, :key, :value].reshape(sizes)


def _values(q, k, v, g, beta, documents, initial_state, interpret) -> tuple[Array, Array]:
    return _forward(q, k, v, g, beta, documents, initial_state, interpret)[0]


def _kept(q, k, v, g, beta, documents, initial_state, interpret):
    inputs = no_derivative("the gradient", (q, k, v, g, beta, documents, initial_state))
    return _forward(*inputs, interpret=interpret)


def _rows(x: Array) -> Array:
    """[batch, time, heads, ...] -> [batch * heads, time, ...]; of tokens that is a copy."""
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])


def _factors(q, k, v, g, beta, documents) -> Factors:
    """In XLA, which copies its inputs."""
    return factors(_rows(q), _rows(k), _rows(v), g, beta, documents)


def _forward(q, k, v, g, beta, documents, initial_state, interpret):
    if g.shape[-1] == 1:
        matrices, solved = prepare(q, k, v, g, beta, documents, interpret=interpret)
        solution = Solution(*solved) if solved else None
    else:
        matrices = channel_factors(q, k, v, g, beta, documents, interpret=interpret)
        solution = None
        if matrices.delta is not None:
            solution = solve(matrices.delta, v, interpret=interpret)
    states, written, final_state = walk(matrices, solution, initial_state, interpret=interpret)
    is_in_place, heads = solution is None, v.shape[2]
    out = outputs(matrices, states, written, heads, is_in_place=is_in_place, interpret=interpret)
    inverse = None if solution is None else solution.inverse
    return (out, final_state), (q, k, v, g, beta, documents, states, written, inverse)


def _backward(interpret, saved, cotangents):
    q, k, v, g, beta, documents, states, written, inverse = saved
    d_out, d_final_state = no_derivative("the gradient", cotangents)
    if g.shape[-1] != 1 or max(q.shape[-1], v.shape[-1]) > WIDEST:
        return _backward_by_products(interpret, saved, d_out, d_final_state)
    inputs = q, k, v, g, beta, documents
    matrices, erase = prepare(*inputs, inverse, interpret=interpret)
    d_states, d_written, d_initial_state = walk_backward(
        matrices, erase[0] if erase else None, d_out, d_final_state, interpret=interpret
    )
    kept = states, written, inverse
    of_inputs = gradients(*inputs, *kept, d_out, d_states, d_written, interpret=interpret)
    return (*of_inputs, None, d_initial_state)


def _backward_by_products(interpret, saved, d_out, d_final_state):
    """For channels that decay apart and heads beyond 128: XLA multiplies what the walk leaves."""
    q, k, v, g, beta, documents, states, written, inverse = saved
    are_apart, pull = g.shape[-1] != 1, None
    if are_apart:
        matrices = channel_factors(q, k, v, g, beta, documents, interpret=interpret)
        matrices = matrices._replace(values=cut(_rows(v)))
    else:
        matrices, pull = jax.vjp(partial(_factors, documents=documents), q, k, v, g, beta)
    erase = None
    if matrices.delta is None:
        written = matrices.values
    else:
        scaled = (inverse.astype(F32) * matrices.delta.strengths[:, :, 1:]).astype(BF16)
        keys = shared(matrices.delta.keys, len(scaled))
        erase = -dot("rnij,rnjk->rnik", scaled, keys).astype(BF16)
    # d_states belongs to the state that leaves a chunk, `states` to the one that enters it.
    d_states, d_written, d_initial_state = walk_backward(
        matrices, erase, d_out, d_final_state, interpret=interpret
    )
    d_out = cut(_rows(d_out))
    if matrices.delta is None:
        d_values, d_delta = cut(_rows(d_written)), None
    else:
        # N = T (beta V - strength * keys S), so one product with T^T serves every gradient.
        d_right = dot("rnij,rniv->rnjv", inverse, d_written).astype(BF16)
        d_keys = -dot("rniv,rnkv->rnik", d_right, states)
        strength, key_strength = jnp.moveaxis(matrices.delta.strengths[..., None], 2, 0)
        own = lambda x: shared(x.astype(F32), len(d_keys))  # noqa: E731
        keys, of_keys = jax.vjp(own, matrices.delta.keys)
        d_strengths = [
            jnp.sum(matrices.values.astype(F32) * d_right.astype(F32), axis=-1),
            jnp.sum(keys * d_keys, axis=-1),
        ]
        d_values = (strength * d_right.astype(F32)).astype(BF16)
        d_delta = Delta(
            system=-dot("rniv,rnjv->rnij", d_right, written),
            keys=of_keys(key_strength * d_keys)[0],
            strengths=jnp.stack(d_strengths, axis=2),
        )
    d_matrices = Factors(
        read=dot("rniv,rnkv->rnik", d_out, states).astype(BF16),
        leave=dot("rniv,rnkv->rnik", written, d_states).astype(BF16),
        scores=dot("rniv,rnjv->rnij", d_out, written).astype(BF16),
        through=jnp.sum(states.astype(F32) * d_states.astype(F32), axis=-1),
        values=d_values,
        delta=d_delta,
    )
    if pull is not None:
        return (*pull(d_matrices), None, d_initial_state)
    d_values = jnp.moveaxis(d_values.reshape(*v.shape[:1], v.shape[2], -1, v.shape[-1]), 1, 2)
    d_matrices = d_matrices._replace(through=matrices.through * d_matrices.through)
    of_tokens = partial(channel_gradients, q, k, g, documents, interpret=interpret)
    if d_delta is None:
        d_q, d_k, d_g, d_beta = of_tokens(d_matrices)
    else:
        # The kernel takes the system's gradient times beta, as it multiplies the keys, and gives
        # that of beta times beta; where beta is zero a number that changes no key stands for it.
        strength = jnp.where(jnp.abs(cut(beta)) < SMALLEST, SMALLEST, cut(beta))
        system = (strength[..., None] * d_delta.system).astype(BF16)
        d_q, d_k, d_g, of_beta = of_tokens(
            d_matrices._replace(delta=d_delta._replace(system=system))
        )
        assert of_beta is not None
        d_beta = jnp.sum(d_delta.strengths, axis=2) + of_beta / strength
        d_beta = d_beta.reshape(len(d_beta), -1)
    return d_q, d_k, d_values, d_g, d_beta, None, d_initial_state


_differentiable = jax.custom_vjp(_values, nondiff_argnums=(7,))
_differentiable.defvjp(_kept, _backward)
