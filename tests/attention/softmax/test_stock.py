"""Kernels of others: asked for by name, held against the reference, refused what they lack."""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import draw_inputs, mixer, softmax_attention

TIME = 256


def inputs(dtype=jnp.bfloat16, size=64):
    return draw_inputs(mixer("full"), TIME, batch=2, heads=4, key=size, value=size, dtype=dtype)


LENGTHS = jnp.array([7, 256], jnp.int32)
REFUSED = [
    ("cudnn", {}, jnp.float32, "takes bfloat16 and float16; got float32"),
    ("cudnn", {"logits_soft_cap": 3.0}, jnp.bfloat16, "has no logits_soft_cap"),
    ("cudnn", {"segment_ids": jnp.zeros((2, TIME), jnp.int32)}, jnp.bfloat16, "has no segment_ids"),
    ("cudnn", {"is_causal": False, "sliding_window": 3}, jnp.bfloat16, "windows of causal"),
    ("cudnn", {"return_residual": True}, jnp.bfloat16, "has no return_residual"),
    ("splash", {"sinks": jnp.zeros(4)}, jnp.float32, "has no sinks"),
    ("splash", {"key_value_seq_lengths": LENGTHS}, jnp.float32, "has no key_value_seq_lengths"),
    ("splash", {"dropout_rate": 0.1, "dropout_key": 0}, jnp.float32, "has no dropout_rate"),
]


@pytest.mark.parametrize(("name", "options", "dtype", "message"), REFUSED)
def test_what_a_kernel_lacks_is_refused(name, options, dtype, message):
    if "dropout_key" in options:
        options = options | {"dropout_key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        softmax_attention(*inputs(dtype), implementation=name, **options)


def test_odd_numbers_of_tokens_are_refused_unless_one_more_changes_nothing():
    odd = [x[:, 1:] for x in inputs()]
    with pytest.raises(ValueError, match="even numbers of tokens unless causal; got 255 and 255"):
        softmax_attention(*odd, implementation="cudnn", is_causal=False)


@pytest.mark.parametrize(
    ("name", "message"), [("cudnn", "does not run"), ("splash", "needs a TPU")]
)
def test_without_the_machine_it_is_said_in_one_line(name, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(*inputs(), implementation=name)


def gradient(*arrays, **options):
    def loss(*arrays):
        return softmax_attention(*arrays, **options)[0].astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


@pytest.fixture
def machine_with_cudnn(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as stock  # asks the machine at tracing

    monkeypatch.setattr(stock, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(stock, "check_compute_capability", lambda capability: True)


@pytest.mark.parametrize(
    ("options", "time"),
    [
        ({}, TIME),
        ({}, 129),
        ({"sliding_window": 100}, TIME),
        ({"is_causal": False}, TIME),
        ({"query_seq_lengths": LENGTHS}, TIME),
    ],
)
def test_programs_for_a_gpu_hold_the_kernel_of_cudnn(options, time, machine_with_cudnn):
    arrays = [x[:, :time] for x in inputs()]
    traced = jax.jit(partial(gradient, implementation="cudnn", **options)).trace(*arrays)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("__cudnn$fmha") >= 2  # forward and backward


def test_a_second_derivative_of_cudnn_is_refused_in_a_line(machine_with_cudnn):
    q, k, v = inputs()

    def slope(q, implementation):
        return gradient(q, k, v, implementation=implementation)[0].astype(jnp.float32).sum()

    message = 'the gradient of implementation="cudnn" has no derivative; implementation="blockwise"'
    for second in (jax.grad, jax.jacfwd):  # reverse over reverse, and forward over reverse
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(second(partial(slope, implementation="cudnn"))).trace(q)
        jax.jit(second(partial(slope, implementation="blockwise"))).trace(q)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 100},
        {"is_causal": False},
        {"logits_soft_cap": 3.0, "segment_ids": jnp.repeat(jnp.arange(2), 128)[None].repeat(2, 0)},
    ],
)
def test_programs_for_a_tpu_hold_splash_attention(options):
    traced = jax.jit(partial(gradient, implementation="splash", **options)).trace(*inputs())
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") >= 3  # forward, dq, dk and dv


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 100},
        {"is_causal": False, "logits_soft_cap": 3.0},
        {"segment_ids": jnp.asarray(np.repeat([0, 1], [100, 156]))[None].repeat(2, 0)},
    ],
)
def test_splash_attention_interpreted_equals_the_blockwise_form(options, monkeypatch):
    from toolkit.attention.softmax import stock

    def interpreted(branches, *arrays, otherwise):
        return branches["tpu"](*arrays, interpret=True)

    monkeypatch.setattr(stock, "run_on", interpreted)
    arrays = inputs(jnp.float32)
    arrays = [arrays[0], *(x[:, :, :2] for x in arrays[1:])]
    got, _ = softmax_attention(*arrays, implementation="splash", **options)
    wanted, _ = softmax_attention(*arrays, implementation="blockwise", **options)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


# Compiles on a machine without a TPU, in a process of its own: libtpu reads the environment.
COMPILE = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from toolkit.attention import softmax_attention
devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
x = jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16, sharding=sharding)
def loss(*x):
    return softmax_attention(*x, implementation="splash")[0].astype(jnp.float32).sum()
compiled = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=sharding).lower(x, x, x).compile()
print(compiled.as_text().count("tpu_custom_call"))
"""


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_splash_attention_compiles_for_real_chips(chip):
    libtpu = importlib.import_module("libtpu")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": str(libtpu.get_library_path()),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    command = [sys.executable, "-c", COMPILE, f"{chip}:2x2"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.splitlines()[-1]) >= 3
