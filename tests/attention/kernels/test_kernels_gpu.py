"""The Hopper kernels without a GPU: interpreted against the token loop, and lowered for CUDA.

Queries, keys and values are bf16 and so are the operands of every product, so the tolerances are
those of bf16: the error's root mean square over the reference's.
"""

import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import H200, INTERPRETER, assert_no_races, forget_kernels, lowered, relative_error
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # private in every version
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.topologies import get_topology_desc
from tiers import by_night

from toolkit.attention import gated_delta_net_reference, gated_linear_attention_reference
from toolkit.attention.kernels.gpu import chunked as gpu_chunked
from toolkit.attention.kernels.gpu.channels import channel_factors
from toolkit.attention.kernels.gpu.factors import Delta
from toolkit.attention.kernels.gpu.gradients import WIDEST
from toolkit.attention.kernels.gpu.prepare import numbers_of_tokens
from toolkit.attention.kernels.gpu.solve import INSTRUCTIONS, solve
from toolkit.attention.kernels.gpu.support import check_chip, launch, token_place

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

OUTPUT, QKV, GATE = 0.005, 0.008, 0.02  # relative errors, as flash-linear-attention tests them
FLOAT32 = 1e-6
ROUNDING = 2**-9  # bf16's largest relative rounding error
BF16, F32 = jnp.bfloat16, jnp.float32
# Batch, time, heads, head size of the published speeds; channels that decay apart; a delta rule?
REAL_SHAPES = [
    (2, 16384, 16, 128, 1, True),
    (1, 8192, 96, 128, 128, True),
    (4, 4096, 64, 128, 1, False),
    (8, 2048, 32, 256, 1, True),
]


def chunked(q, k, v, g, beta, state, **options):
    """The kernels' heads of one sequence as rows."""
    tokens = [None if x is None else jnp.moveaxis(x, 0, 1)[None] for x in (q, k, v, g, beta)]
    out, state = gpu_chunked.chunked(*tokens, state[None], **options)
    return jnp.moveaxis(out[0], 1, 0), state[0]


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
    yield
    forget_kernels()


CASES = {
    "simple decay": (2, {"time": 128, "key": 64, "value": 32, "is_delta": False}),
    "channels": (
        1,
        {"time": 64, "key": 64, "value": 64, "is_delta": False, "channels": 64, "decay": 9},
    ),
    "gated delta net": (2, {"time": 128, "key": 64, "value": 32}),
    "gates that jump": (1, {"time": 128, "key": 100, "value": 96}),
    "heads beyond the kernel of gradients": (1, {"time": 64, "key": 140, "value": 32}),
    "kimi delta attention": (1, {"time": 128, "key": 60, "value": 24, "channels": 60}),
}


BY_NIGHT = {"channels", "gates that jump", "heads beyond the kernel of gradients"}


@pytest.mark.parametrize("name", by_night(BY_NIGHT, CASES))
def test_chunks_equal_the_token_loop(name):
    heads, sizes = CASES[name]
    inputs = make_inputs(heads, **sizes)
    if name == "gates that jump":
        random = np.random.default_rng(1)
        jumps = random.choice([-87.0, -50.0], inputs.g.shape)
        g = jnp.where(random.random(jumps.shape) < 0.2, jumps.astype(np.float32), inputs.g)
        inputs = inputs._replace(g=g)
    documents = None
    if name == "kimi delta attention":  # a strength of zero has a gradient all the same
        inputs = inputs._replace(beta=inputs.beta.at[:, ::9].set(0.0))
    if name in ("simple decay", "channels", "gated delta net"):  # inside a chunk, and at its edge
        ends = jnp.array([30, 64, 120])
        documents = jnp.searchsorted(ends, jnp.arange(sizes["time"]), side="right")
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


@pytest.mark.parametrize("channels", [1, pytest.param(64, marks=pytest.mark.nightly)])
def test_heads_of_values_may_share_keys(channels):
    """As if each had a copy, whose gradients are summed."""
    inputs = make_inputs(2, 64, 64, 32, channels=channels)
    shared = inputs._replace(q=inputs.q[:1], k=inputs.k[:1])

    def copied(x):
        q, k = (jnp.repeat(z, 2, axis=0) for z in (x.q, x.k))
        return chunked(*x._replace(q=q, k=k), interpret=INTERPRETER)

    got = values_and_gradients(lambda x: chunked(*x, interpret=INTERPRETER), shared)
    assert_no_races()
    want = values_and_gradients(copied, shared)
    for value, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(value, reference) < OUTPUT


def test_decays_that_are_zero_are_not_added_up_while_compiling():
    """A mixer without decay gives constant zeros, which XLA adds up for tens of seconds."""

    def sums():
        return numbers_of_tokens(jnp.zeros((2, 128, 1)), None, None)

    assert re.search(r"\b(reduce-window|dot|add)\(", jax.jit(sums).lower().compile().as_text())


def exact_factors(q, k, g):
    """In float64, with a decay per pair of tokens and channel."""
    total = np.cumsum(g, axis=0)
    past = np.tril(np.ones((64, 64), bool))[..., None]
    survives = np.exp(np.where(past, total[:, None] - total[None], -np.inf))
    scores, system = (np.einsum("ik,jk,ijk->ij", x, k, survives) for x in (q, k))
    return np.exp(total) * q, np.exp(total[-1] - total) * k, scores, np.tril(system, -1)


@pytest.mark.parametrize("name", ["mild", pytest.param("abrupt", marks=pytest.mark.nightly)])
def test_factors_of_channels_lose_nothing_beside_abrupt_gates(name):
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.standard_normal((1, 64, 1, 128)), BF16) for _ in range(2))
    g = -np.logaddexp(0, random.standard_normal(q.shape)) / 4
    if name == "abrupt":
        g = np.where(random.random(g.shape) < 0.3, random.choice([-87.0, -50.0], g.shape), g)
    g, beta = jnp.asarray(g, F32), jnp.ones((1, 64))
    got = channel_factors(q, k, q, g, beta, None, interpret=INTERPRETER)
    assert_no_races()
    want = exact_factors(*(np.array(x[0, :, 0], np.float64) for x in (q, k, g)))
    assert got.delta is not None
    found = got.read, got.leave, got.scores, got.delta.system
    for value, reference in zip(found, want, strict=True):
        assert relative_error(value[0, 0], reference) < 1.5 * ROUNDING


def test_detector_sees_a_race():
    """A kernel that reads a copy it did not wait for."""

    def body(source, result, buffer, loaded):
        plgpu.copy_gmem_to_smem(source, buffer, loaded)
        result[...] = buffer[...]
        plgpu.barrier_wait(loaded)

    copy = launch(
        body,
        out_type=jax.ShapeDtypeStruct((128,), F32),
        scratch_types=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
        interpret=INTERPRETER,
    )
    jax.block_until_ready(copy(jnp.ones(128)))
    assert gpu_callbacks.get_races().races_found


def test_inverse_of_repeated_keys():
    """Where T cancels most: one direction written over and over, with reflections."""
    k = make_inputs(1, 64, 64, 32).k[None].astype(F32)
    k = k[:, :, :1] + 0.05 * k
    k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(BF16)
    gram = jnp.einsum("rnik,rnjk->rnij", k, k, preferred_element_type=F32)
    system = 1.9 * jnp.tril(gram, -1)
    values = make_inputs(1, 64, 64, 32).v[None]
    delta = Delta(system, k, jnp.full((1, 1, 2, 64), 1.9))
    tokens = jnp.moveaxis(values, 1, 2).reshape(1, 64, 1, 32)
    got = solve(delta, tokens, interpret=INTERPRETER)
    assert_no_races()
    inverse = np.linalg.inv(np.eye(64) + np.array(system[0, 0], np.float64))
    want = [1.9 * inverse @ np.array(x[0, 0], np.float64) for x in (values, k)]
    assert relative_error(got.inverse[0, 0], inverse) < ROUNDING
    assert relative_error(got.values[0, 0], want[0]) < ROUNDING
    assert relative_error(-got.erase[0, 0], want[1]) < ROUNDING
    program = str(jax.make_jaxpr(solve)(delta, tokens))
    assert program.count("wgmma_ref ") == INSTRUCTIONS + 2 * 2 * 4  # of T, and of U and E


def abstract(rows, time, size, channels, is_delta) -> Inputs:
    def array(*shape, dtype=F32):
        return jax.ShapeDtypeStruct(shape, dtype)

    qkv = [array(rows, time, size, dtype=BF16)] * 3
    beta = array(rows, time) if is_delta else None
    return Inputs(*qkv, array(rows, time, channels), beta, array(rows, size, size))


@pytest.mark.parametrize("shape", by_night(REAL_SHAPES[1:], REAL_SHAPES), ids=str)
def test_real_shapes_lower_for_cuda(shape):
    _, time, heads, size, channels, is_delta = shape

    def train(x):
        out, pull = jax.vjp(chunked, *x)
        return out, pull(out)

    inputs = abstract(heads, time, size, channels, is_delta)
    kernels = 4 + (channels != 1 and is_delta)  # prepare, or factors and solve; walks, outputs
    kernels += 2 * (channels != 1 or size <= WIDEST)  # prepare or factors again, gradients
    assert lowered(train, inputs).count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize(
    ("is_delta", "key_heads"),
    [
        (True, 2),
        (False, 6),
        pytest.param(True, 6, marks=pytest.mark.nightly),
        pytest.param(False, 2, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_read_and_written_where_they_lie(is_delta, key_heads):
    """Nothing puts the heads before the time, or repeats a key for several heads of values: XLA
    would write all tokens once more.
    """
    gate, v = (jax.ShapeDtypeStruct((2, 128, 6, *n), d) for n, d in (((), F32), ((64,), BF16)))
    state = jax.ShapeDtypeStruct((2, 6, 64, 64), F32)
    g = jax.ShapeDtypeStruct((2, 128, 6, 1), F32)
    q = jax.ShapeDtypeStruct((2, 128, key_heads, 64), BF16)
    program = lowered(gpu_chunked.chunked, q, q, v, g, gate if is_delta else None, state)
    operations = re.findall(r"stablehlo\.(\w+).*xbf16>", program)
    assert "custom_call" in operations
    batch, place, head, _ = token_place(11, 2, heads=6, group=6 // key_heads)
    assert (int(batch), place.start, int(head)) == (1, 128, key_heads - 1)
    copies = {"transpose", "gather", "concatenate", "pad", "broadcast_in_dim", "convert"}
    assert not copies & set(operations)

    def train(*x):
        out, pull = jax.vjp(gpu_chunked.chunked, *x)
        return pull(out)

    program = lowered(train, q, q, v, g, gate if is_delta else None, state)
    operations = set(re.findall(r"stablehlo\.(\w+).*xbf16>", program))
    operations -= {"convert"} if key_heads < 6 else set()  # what heads share is summed in float32
    assert not (copies | {"dot_general"}) & operations


def test_sharded_rows_lower_for_cuda():
    """Each device takes its rows; the results say that they vary from device to device."""
    rows = jax.sharding.PartitionSpec("rows")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    def train(x):
        out, pull = jax.vjp(chunked, *x)
        return out, pull(out)

    sharded = jax.shard_map(train, mesh=mesh, in_specs=rows, out_specs=rows)
    assert lowered(sharded, abstract(4, 128, 64, 1, True)).count("custom_call @mosaic_gpu") == 6


def test_lowering_refuses_too_much_shared_memory():
    def body(source, result, buffer, loaded):
        plgpu.copy_gmem_to_smem(source, buffer, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(buffer, result)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((256, 256), F32)  # 256 KB
    scratch = [plgpu.SMEM(shape.shape, F32), plgpu.Barrier()]
    with pytest.raises(Exception, match="smem"):
        lowered(launch(body, out_type=shape, scratch_types=scratch, interpret=False), shape)


def test_unfit_inputs_are_refused():
    good = abstract(1, 128, 64, 1, True)

    def refuse(error, message, chunk=64, **changes):
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda *x: chunked(*x, chunk=chunk), *good._replace(**changes))

    refuse(TypeError, "bfloat16", k=jax.ShapeDtypeStruct(good.k.shape, F32))
    refuse(ValueError, "chunk must be 64", chunk=32)
    odd = abstract(1, 100, 64, 1, True)
    refuse(ValueError, "multiple of 64; got 100", **odd._asdict())
    wide = abstract(1, 128, 320, 1, True)
    refuse(ValueError, "at most 256", **wide._asdict())


def test_other_chips_are_refused():
    device = SimpleNamespace(platform="gpu", compute_capability="10.0", device_kind="NVIDIA B200")
    with pytest.raises(NotImplementedError, match=r"B200 has 10\.0"):
        check_chip(interpret=False, device=device)
    device.compute_capability = "9.0"
    check_chip(interpret=False, device=device)


@pytest.fixture
def hopper_without_a_gpu(monkeypatch):
    """A compile-only H200, where jax's CUDA plugin and nvcc are installed. No GPU is needed."""
    nvcc = pytest.importorskip("nvidia.cuda_nvcc", reason="needs nvidia-cuda-nvcc")
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", nvcc.__path__[0])
    try:
        topology = get_topology_desc("1x1x1", "cuda", topology="1x1x1", target_config=H200)
    except NotImplementedError:
        pytest.skip("needs jax's CUDA plugin")
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def test_kernels_compile_to_machine_code(hopper_without_a_gpu):
    inputs = abstract(2, 256, 128, 1, True)

    def train(x):
        out, pull = jax.vjp(chunked, *x)
        return out, pull(out)

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=hopper_without_a_gpu)

    inputs = jax.tree.map(place, inputs)
    compiled = jax.jit(train, out_shardings=hopper_without_a_gpu).lower(inputs).compile()
    assert compiled.as_text().count("mosaic_gpu") >= 6
