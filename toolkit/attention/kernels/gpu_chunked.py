"""Chunked linear-time mixers on Hopper GPUs."""
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu_factors import Factors, cut, factors
from toolkit.attention.kernels.gpu_outputs import outputs
from toolkit.attention.kernels.gpu_support import CHUNK, check_chip
from toolkit.attention.kernels.gpu_walk import walk, walk_backward


def _dot(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _chunked(q, k, v, g, beta, documents, initial_state, interpret):
    return _forward(q, k, v, g, beta, documents, initial_state, interpret)[0]


def _forward(q, k, v, g, beta, documents, initial_state, interpret):
    matrices = factors(q, k, v, g, beta, documents)
    states, written, final_state = walk(matrices, initial_state, interpret=interpret)
    out = outputs(matrices, states, written, interpret=interpret).reshape(v.shape)
    saved = (q, k, v, g, beta, documents, states, written)
    return (out, final_state), saved


def _backward(interpret, saved, cotangents):
    *inputs, documents, states, written = saved
    d_out, d_final_state = cotangents
    matrices, pull = jax.vjp(lambda *x: factors(*x, documents), *inputs)
    d_out = cut(d_out)
    d_states, d_written, d_initial = walk_backward(
        matrices, d_out, d_final_state, interpret=interpret
    )
    d_erase = None
    if matrices.erase is not None:
        d_erase = _dot("rniv,rnkv->rnik", d_written, states)
    d_matrices = Factors(
        read=_dot("rniv,rnkv->rnik", d_out, states),
        leave=_dot("rniv,rnkv->rnik", written, d_states),
        scores=_dot("rniv,rnjv->rnij", d_out, written),
        through=_dot("rnkv,rnkv->rnk", states, d_states),
        values=d_written.astype(jnp.float32),
        erase=d_erase,
    )
    return (*pull(d_matrices), None, d_initial)


_chunked.defvjp(_forward, _backward)
