"""The Hopper kernels without a GPU: interpreted against the token loop, and lowered for CUDA.

Queries, keys and values are bf16 and so are the operands of every product, so the tolerances are
those of bf16: the error's root mean square over the reference's.
"""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # private in every version
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from 0.11
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from toolkit.attention import gated_delta_net_reference, gated_linear_attention_reference
from toolkit.attention.kernels.gpu_chunked import chunked
from toolkit.attention.kernels.gpu_step import step
from toolkit.attention.kernels.gpu_support import launch

OUTPUT, QKV, GATE = 0.005, 0.008, 0.02  # relative errors, as flash-linear-attention tests them
FLOAT32 = 1e-6
BF16, F32 = jnp.bfloat16, jnp.float32
INTERPRETER = InterpretGPUParams(detect_races=True, uninitialized_memory="nan")

# batch, time, heads, head size: the shapes of the published speeds.
REAL_SHAPES = [(2, 16384, 16, 128), (1, 8192, 96, 128), (4, 4096, 64, 128), (8, 2048, 32, 256)]


class Inputs(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array | None
    state: jax.Array


def make_inputs(rows, time, key, value, *, channels=1, is_delta=True, decay=0.1) -> Inputs:
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(x, (rows, time, key)) for x in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return Inputs(
        (q * key**-0.5).astype(BF16),
        k.astype(BF16),
        jax.random.normal(keys[2], (rows, time, value)).astype(BF16),
        decay * jax.nn.log_sigmoid(jax.random.normal(keys[3], (rows, time, channels))),
        2 * jax.nn.sigmoid(jax.random.normal(keys[4], (rows, time))) if is_delta else None,
        jax.random.normal(keys[5], (rows, key, value)),
    )


def token_loop(inputs: Inputs, documents=None):
    """The references, in float32; Kimi Delta Attention is spelled out."""
    q, k, v = (jnp.moveaxis(x.astype(F32), 0, 1)[None] for x in inputs[:3])
    g = jnp.moveaxis(inputs.g, 0, 1)[None]
    state = inputs.state[None]
    ids = None if documents is None else documents[:1]
    if inputs.beta is None:
        g = jnp.broadcast_to(g, k.shape)
        out, state = gated_linear_attention_reference(
            q, k, v, g, scale=1.0, initial_state=state, segment_ids=ids
        )
    elif inputs.g.shape[-1] == 1:
        beta = inputs.beta.T[None]
        out, state = gated_delta_net_reference(
            q, k, v, g[..., 0], beta, scale=1.0, initial_state=state, segment_ids=ids
        )
    else:
        assert documents is None
        return kimi_loop(inputs)
    return jnp.moveaxis(out[0], 0, 1), state[0]


def kimi_loop(inputs: Inputs):
    def one_token(state, token):
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None] * state
        error = v - jnp.einsum("rk,rkv->rv", k, state)
        state += beta[:, None, None] * k[..., None] * error[:, None]
        return state, jnp.einsum("rk,rkv->rv", q, state)

    tokens = [jnp.moveaxis(x.astype(F32), 1, 0) for x in inputs[:5]]
    state, out = lax.scan(one_token, inputs.state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def relative_error(got, want) -> float:
    got, want = got.astype(F32), want.astype(F32)
    return float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)))


def values_and_gradients(function, inputs: Inputs):
    """Outputs, final state and the gradients of a loss that weighs both."""

    def loss(inputs):
        out, state = function(inputs)
        weight = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(BF16).astype(F32)
        total = jnp.sum(out.astype(F32) * weight)
        return total + jnp.sum(state * jnp.sin(jnp.arange(state.size)).reshape(state.shape)), (
            out,
            state,
        )

    gradients, (out, state) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return out, state, gradients


@pytest.fixture(autouse=True)
def clean_interpreter():
    """The interpreter keeps the memory of a kernel that raised."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def assert_no_races() -> None:
    # jax 0.12 raises by itself; 0.10 and 0.11 print, and remember the last kernel.
    assert not gpu_callbacks.get_races().races_found


CASES = {
    "simple decay": dict(time=192, key=64, value=64, is_delta=False),
    "simple decay, channels": dict(time=64, key=64, value=32, is_delta=False, channels=64, decay=9),
    "gated delta net": dict(time=192, key=64, value=32),
    "kimi delta attention": dict(time=128, key=60, value=24, channels=60),
}


@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_the_token_loop(name):
    inputs = make_inputs(1, **CASES[name])
    documents = None
    if name in ("simple decay", "gated delta net"):  # inside a chunk, and at its edge
        documents = jnp.searchsorted(jnp.array([30, 64, 130]), jnp.arange(192), side="right")
        documents = documents[None].astype(jnp.int32)
    got = values_and_gradients(
        lambda x: chunked(*x, documents=documents, interpret=INTERPRETER), inputs
    )
    assert_no_races()
    want = values_and_gradients(lambda x: token_loop(x, documents), inputs)
    assert relative_error(got[0], want[0]) < OUTPUT
    assert relative_error(got[1], want[1]) < OUTPUT
    limits = Inputs(q=QKV, k=QKV, v=QKV, g=GATE, beta=GATE, state=QKV)
    for field, limit in limits._asdict().items():
        value, reference = getattr(got[2], field), getattr(want[2], field)
        if value is not None:
            assert relative_error(value, reference) < limit, field
