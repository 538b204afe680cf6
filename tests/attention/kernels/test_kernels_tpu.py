"""TPU kernels: values and gradients by interpreter, races and stray memory, and a real compile.

No TPU is needed: the interpreter runs the kernels on a CPU, and libtpu compiles them for chips
that are not there. What only a chip can show, speed, is not shown here.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # races_found has no other home
from jax.experimental.pallas import tpu as pltpu

from toolkit.attention import gated_delta_net_reference, gated_linear_attention_reference
from toolkit.attention.kernels.tpu.blocks import dot, unit_lower_inverse
from toolkit.attention.kernels.tpu.chunked import chunked
from toolkit.attention.kernels.tpu.step import step

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

VALUE = 5e-6  # relative error of outputs and states in float32
GRADIENT = 1e-4
REFLECTION = 1e-4  # beta = 2 and equal keys: a triangular system of condition 1600 a chunk
BFLOAT16, OUTPUT, GATE = 8e-3, 5e-3, 2e-2  # as of the kernels for Hopper
INVERSE = 1e-5

ROWS, TIME, KEY, SIZE = 6, 96, 16, 8  # three programs of two rows, with three chunks
CHUNK = 32
SMALLEST_LOG = -87.3  # what the mixers clamp g to
# The programs are small and run once: what takes time is to optimise them.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Name -> (has one log-decay a channel, has the delta rule).
FAMILIES = {
    "additive": (False, False),
    "additive by channel": (True, False),
    "gated delta": (False, True),
    "kimi delta": (True, True),
}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(family, *, time=TIME, key=KEY, value=SIZE, decay=0.3, likeness=0.0, seed=0):
    """q, k, v, g, beta, initial_state; keys are alike by `likeness`, equal at 1."""
    by_channel, has_delta = FAMILIES[family]
    random = np.random.default_rng(seed)
    q, own = (unit(random.standard_normal((ROWS, time, key))) for _ in range(2))
    common = unit(random.standard_normal((ROWS, 1, key)))
    k = unit(likeness * common + (1 - likeness**2) ** 0.5 * own)
    g = -random.exponential(decay, (ROWS, time, key if by_channel else 1))
    beta = random.uniform(0.0, 2.0, (ROWS, time)) if has_delta else None
    v = random.standard_normal((ROWS, time, value))
    state = random.standard_normal((ROWS, key, value))
    arrays = (q, k, v, np.maximum(g, SMALLEST_LOG), beta, state)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


def kimi_delta_reference(q, k, v, g, beta, state, documents):
    """S <- Diag(e^g) S,  S <- S + beta k (v - S^T k)^T,  o = S^T q, a token at a time."""

    def token(carry, inputs):
        state, document = carry
        q_t, k_t, v_t, g_t, beta_t, document_t = inputs
        state = jnp.where(document_t == document, state, 0)
        state = jnp.exp(g_t)[:, None] * state
        state = state + beta_t * jnp.outer(k_t, v_t - k_t @ state)
        return (state, document_t), q_t @ state

    def row(state, *inputs):
        (state, _), out = jax.lax.scan(token, (state, inputs[-1][0]), inputs)
        return out, state

    return jax.vmap(row)(state, q, k, v, g, beta, documents)


def reference(q, k, v, g, beta, state, documents=None):
    """The token-by-token form of the family that these inputs belong to."""
    if documents is None:
        documents = jnp.zeros(q.shape[:2], jnp.int32)
    if beta is not None and g.shape[-1] > 1:
        return kimi_delta_reference(q, k, v, g, beta, state, documents)
    one_head = [x[:, :, None] for x in (q, k, v)]
    options = {"scale": 1.0, "initial_state": state[:, None], "segment_ids": documents}
    if beta is None:
        gates = [jnp.broadcast_to(g, q.shape)[:, :, None]]
        out, state = gated_linear_attention_reference(*one_head, *gates, **options)
    else:
        gates = [g, beta[..., None]]
        out, state = gated_delta_net_reference(*one_head, *gates, **options)
    return out[:, :, 0], state[:, 0]


def with_gradients(function, arrays, documents):
    """Outputs, final state, and the gradients of a random projection of both."""
    given = tuple(i for i, x in enumerate(arrays) if x is not None)

    def projected(*arrays):
        random = np.random.default_rng(1)
        results = function(*arrays, documents)
        weights = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in results]
        sums = [jnp.sum(w * x).astype(jnp.float32) for w, x in zip(weights, results, strict=True)]
        return sums[0] + sums[1], results

    return jax.value_and_grad(projected, argnums=given, has_aux=True)(*arrays)


@functools.partial(jax.jit, static_argnames=("chunk", "interpret"), compiler_options=QUICKLY)
def kernel_with_gradients(arrays, documents, chunk=CHUNK, interpret=True):
    def function(*inputs):
        *inputs, documents = inputs
        return chunked(*inputs, chunk=chunk, documents=documents, interpret=interpret)

    return with_gradients(function, arrays, documents)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def reference_with_gradients(arrays, documents):
    return with_gradients(reference, arrays, documents)


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def assert_same(arrays, documents=None, *, within=VALUE, **options):
    (_, results), gradients = kernel_with_gradients(arrays, documents, **options)
    with enable_x64(True):
        doubles = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arrays)
        (_, wanted), wanted_gradients = reference_with_gradients(doubles, documents)
    for name, got, value in zip(("out", "state"), results, wanted, strict=True):
        assert relative_error(got, value) < within, name
    for i, (got, value) in enumerate(zip(gradients, wanted_gradients, strict=True)):
        assert relative_error(got, value) < GRADIENT, f"gradient {i}"


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family):
    assert_same(draw(family))
    # Decays from none at all to nothing left, side by side.
    assert_same(draw(family, decay=20.0, seed=1))
    # Keys as alike as natural ones get, with writing strengths up to 2.
    assert_same(draw(family, decay=0.01, likeness=0.99, seed=2))


@pytest.mark.parametrize(
    ("family", "group"),
    [("gated delta", 2), ("gated delta", 6), ("additive", 3), ("kimi delta", 6)],
)
def test_rows_of_values_may_share_keys(family, group):
    """Whole groups in a program, and parts of one, whose gradients are summed after it."""
    q, k, *others = draw(family)
    q, k = q[::group], k[::group]
    (_, got), gradients = kernel_with_gradients((q, k, *others), None)
    copied = [jnp.repeat(x, group, axis=0) for x in (q, k)]
    (_, wanted), wanted_gradients = kernel_with_gradients((*copied, *others), None)
    summed = [x.reshape(-1, group, *x.shape[1:]).sum(axis=1) for x in wanted_gradients[:2]]
    pairs = zip((*got, *gradients), (*wanted, *summed, *wanted_gradients[2:]), strict=True)
    for x, y in pairs:
        assert relative_error(x, y) < VALUE


@pytest.mark.parametrize("family", ["gated delta", "kimi delta"])
def test_documents_do_not_meet(family):
    lengths = ([7, 25, 31, 33], [64, 1, 1, 30]) * (ROWS // 2)  # borders inside chunks and on one
    documents = jnp.asarray([np.repeat([3, 4, 7, 9], row) for row in lengths], jnp.int32)
    assert_same(draw(family, seed=3), documents)


@pytest.mark.parametrize(("beta", "within"), [(1.0, VALUE), (2.0, REFLECTION)])
def test_repeated_keys_without_decay(beta, within):
    q, k, v, g, _, state = draw("gated delta", likeness=1.0, seed=4)
    arrays = (q, k, v, jnp.zeros_like(g), jnp.full(q.shape[:2], beta), state)
    assert_same(arrays, within=within)


def test_inverse_of_the_worst_matrices():
    """Powers of these matrices overflow float32; substitution does not see them."""
    size = 64
    random = np.random.default_rng(5)
    alike = unit(0.99 * random.standard_normal((1, 32)) + 0.14 * random.standard_normal((size, 32)))
    for gram in (np.ones((size, size)), 2 * np.ones((size, size)), 2 * alike @ alike.T):
        below = np.tril(gram, -1)
        got = jax.jit(unit_lower_inverse)(jnp.asarray(below, jnp.float32))
        assert relative_error(got, np.linalg.inv(np.eye(size) + below)) < INVERSE


def test_products_of_mixed_dtypes_are_exact_to_float32():
    random = np.random.default_rng(6)
    a, b = (jnp.asarray(random.standard_normal((64, 64)), jnp.float32) for _ in range(2))
    for left, right in ((a, b), (a, b.astype(jnp.bfloat16)), (a.astype(jnp.bfloat16), b)):
        wanted = np.asarray(left, np.float64).T @ np.asarray(right, np.float64)
        assert relative_error(jax.jit(dot, static_argnums=2)(left, right, (0, 0)), wanted) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "precision"), [(family, None) for family in FAMILIES] + [("gated delta", "highest")]
)
def test_bfloat16_inputs_have_products_of_bfloat16_and_float32_states(family, precision):
    """As accurate as the kernels for Hopper; float32 products are there for the asking."""
    q, k, v, *gates, state = draw(family)
    rounded = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with jax.default_matmul_precision(precision):
        (_, results), gradients = kernel_with_gradients((*rounded, *gates, state), None)
    widened = [x.astype(jnp.float32) for x in rounded]
    (_, wanted), wanted_gradients = kernel_with_gradients((*widened, *gates, state), None)
    kinds = [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3, *[jnp.float32] * 3]
    limits = [OUTPUT, OUTPUT, BFLOAT16, BFLOAT16, BFLOAT16, GATE, GATE, BFLOAT16]
    if precision is not None:  # of the rounded inputs, nothing else is rounded
        limits = [BFLOAT16, VALUE] + [BFLOAT16] * 6
    if not FAMILIES[family][1]:  # no beta
        del kinds[6], limits[6]
    pairs = zip((*results, *gradients), (*wanted, *wanted_gradients), strict=True)
    for (got, want), kind, limit in zip(pairs, kinds, limits, strict=True):
        assert got.dtype == kind
        assert relative_error(got.astype(jnp.float32), want) < limit


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_step_continues_the_sequence(family):
    *tokens, state = draw(family, time=3, key=8, seed=7)
    wanted, wanted_state = jax.jit(reference)(*tokens, state)
    one_step = jax.jit(functools.partial(step, interpret=True), donate_argnums=5)
    outs = []
    for t in range(3):
        out, state = one_step(*(None if x is None else x[:, t] for x in tokens), state)
        outs.append(out)
    assert relative_error(jnp.stack(outs, axis=1), wanted) < VALUE
    assert relative_error(state, wanted_state) < VALUE


def test_no_races_and_no_stray_memory():
    """Memory starts as NaN and every access is checked against the copies under way."""
    watched = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    documents = jnp.asarray([[0] * 20 + [1] * 12] * ROWS, jnp.int32)
    arrays = draw("gated delta", time=32, key=8, seed=8)
    assert_same(arrays, documents, chunk=16, interpret=watched)
    assert not interpret_pallas_call.races.races_found

    *tokens, state = draw("kimi delta", time=1, key=8, seed=9)
    token = [x[:, 0] for x in tokens]
    got, wanted = step(*token, state, interpret=watched), step(*token, state, interpret=True)
    assert not interpret_pallas_call.races.races_found
    for x, y in zip(got, wanted, strict=True):
        assert relative_error(x, y) < VALUE


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"chunk": 24}, ValueError, "chunk must be a power of two"),
        ({"chunk": 64}, ValueError, "time must be a multiple of chunk = 64; got 96"),
        ({"dtype": jnp.float16}, TypeError, "float32 or bfloat16 on a TPU; got float16"),
        ({"gate": jnp.bfloat16}, TypeError, "g must be float32; got bfloat16"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    q, k, v, g, beta, state = draw("gated delta")
    q, k, v = (x.astype(change.get("dtype", x.dtype)) for x in (q, k, v))
    g = g.astype(change.get("gate", g.dtype))
    with pytest.raises(error, match=message):
        chunked(q, k, v, g, beta, state, chunk=change.get("chunk", CHUNK))


# Compiles on a machine without a TPU, in a process of its own: libtpu reads the environment.
COMPILE = textwrap.dedent(
    """
    import functools, json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from toolkit.attention.kernels.tpu.chunked import chunked
    from toolkit.attention.kernels.tpu.step import step

    chip, dtype = sys.argv[1:]
    rows, time, size, chunk = 16, 4096, 128, 64
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip + ":2x2").devices

    def shapes(count, is_token, channels, has_delta):
        sharding = NamedSharding(Mesh(np.array(devices[:count]), ("rows",)), P("rows"))
        like = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        leading = (rows,) if is_token else (rows, time)
        x = like((*leading, size), dtype)
        g = like((*leading, channels), jnp.float32)
        beta = like(leading, jnp.float32) if has_delta else None
        return x, x, x, g, beta, like((rows, size, size), jnp.float32)

    def forward(*inputs):
        return chunked(*inputs, chunk=chunk)

    def training(inputs, d_out, d_state):
        out, pull = jax.vjp(forward, *inputs)
        return out, pull((d_out, d_state))

    def report(function, *arguments, donate=()):
        compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        collectives = [x for x in ("all-reduce", "all-gather") if x in compiled.as_text()]
        return dict(arguments=memory.argument_size_in_bytes, temp=memory.temp_size_in_bytes,
            aliased=memory.alias_size_in_bytes, flops=cost["flops"],
            bytes=cost["bytes accessed"], collectives=collectives)

    found = {}
    for family, options in dict(additive=(1, False), gdn=(1, True), kda=(size, True)).items():
        inputs = shapes(1, False, *options)
        found[family + " forward"] = report(forward, *inputs)
        found[family + " training"] = report(training, inputs, inputs[2], inputs[5])
        found[family + " step"] = report(step, *shapes(1, True, *options), donate=(5,))
    inputs = shapes(4, False, 1, False)
    mesh = Mesh(np.array(devices), ("rows",))
    on_four = jax.shard_map(forward, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    found["four devices"] = report(on_four, *inputs)
    print(json.dumps(found))
    """
)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("chip", "dtype"),
    [
        ("v5e", "bfloat16"),
        *(pytest.param("v6e", x, marks=pytest.mark.nightly) for x in ("bfloat16", "float32")),
    ],
)
def test_compiles_for_real_chips(chip, dtype):
    libtpu = importlib.import_module("libtpu")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": str(libtpu.get_library_path()),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a second process on the machine is refused
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    command = [sys.executable, "-c", COMPILE, chip, dtype]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])

    rows, time, size, chunk = 16, 4096, 128, 64
    states = 4 * rows * size * size
    boundaries = states * time // chunk
    block = 2 * rows * time * size * (1 if dtype == "bfloat16" else 2)  # bytes of one of q, k, v
    for name, program in found.items():
        assert not program["collectives"], name
    for family in ("additive", "gdn", "kda"):
        forward, training = found[f"{family} forward"], found[f"{family} training"]
        decode = found[f"{family} step"]
        # Nothing but inputs and outputs forward; backward the states at the boundaries, which
        # the compiler may keep in VMEM, and copies of what is one number a token.
        assert forward["temp"] < 0.05 * block, family
        assert training["temp"] < boundaries + 0.1 * block, family
        assert decode["aliased"] == states, family
        assert decode["temp"] < 0.2 * states, family
        assert 2 * states < decode["bytes"] < 2.3 * states, family
        # Multiply-adds of the docstring, and bytes of four blocks and the small rest.
        products = 2 * chunk * size**2 + 2 * chunk**2 * size
        if family != "additive":
            products += chunk * size**2 + 2 * chunk**2 * size + 3 * chunk**3
        products *= rows * time // chunk
        assert forward["flops"] == pytest.approx(2 * products, rel=0.02), family
        assert training["flops"] == pytest.approx(8 * products, rel=0.02), family
        by_channel = 4 * rows * time * size if family == "kda" else 0
        assert forward["bytes"] == pytest.approx(4 * block + by_channel, rel=0.1), family
