"""The platform is that for which a program is lowered, not the one on which it is traced."""

import re

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import draw_inputs, mixer

# Where heads are one batch, every product of two matrices is a batch of products.
CASES = {
    "full": {},
    "nsa": {"block_size": 16, "selected_blocks": 3, "sliding_window": 16},
    "moba": {"block_size": 16, "selected_blocks": 2},
    "dsa": {"selected_tokens": 16},
}


WAITS = {"nsa": "slow", "moba": "nightly"}  # they are traced for longer


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[getattr(pytest.mark, WAITS[name])] if name in WAITS else [])
        for name in CASES
    ],
)
def test_heads_are_one_batch_on_accelerators_and_one_by_one_on_a_cpu(name):
    row = mixer(name, **CASES[name])
    inputs = draw_inputs(row, 160, batch=2, heads=2, dtype=jnp.float32)

    def loss(*inputs):
        return row.function(*inputs, **row.options)[0].sum()

    traced = jax.jit(jax.grad(loss)).trace(*inputs)
    batches = {}
    for platform in ("cpu", "cuda", "tpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        batches[platform] = program.count("batching_dims"), program.count("stablehlo.dot_general")
    assert batches["cuda"] == batches["tpu"]
    assert len(set(batches["cuda"])) == 1  # all of them
    assert batches["cpu"][0] < batches["cuda"][0] / 2


def test_the_cheaper_selection_is_the_platforms():
    """At these sizes copies are worth it on a CPU alone."""
    row = mixer("dsa", selected_tokens=32)
    inputs = draw_inputs(row, 1024, batch=1, heads=2)
    traced = jax.jit(lambda *x: row.function(*x, **row.options)[0]).trace(*inputs)
    gathers = [
        traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.gather")
        for platform in ("cpu", "cuda")
    ]
    assert gathers[0] > gathers[1]


@pytest.mark.parametrize(
    "name",
    [
        "full",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("nsa", "dsa")),
        pytest.param("moba", marks=pytest.mark.nightly),
    ],
)
def test_attention_multiplies_bfloat16_in_bfloat16_on_nvidia_gpus(name):
    """Gradients too, whose cotangents are float32. What remains in TF32 are means of blocks, which
    are float32, and the sum over index heads.
    """
    row = mixer(name, **CASES[name])
    inputs = draw_inputs(row, 160, batch=1, heads=2, dtype=jnp.bfloat16)

    def loss(q, *others):
        return row.function(q, *others, **row.options)[0].astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*inputs)
    lines = re.findall("dot_general.*", traced.lower(lowering_platforms=("cuda",)).as_text())
    is_rounded = re.compile(r"lhs_precision_type = bf16|\(tensor<[0-9x]*bf16>, tensor<[0-9x]*bf16>")
    others = [line for line in lines if not is_rounded.search(line)]
    assert len(lines) > len(others)
    small = re.compile(r"x10x" if name in ("nsa", "moba") else r"tensor<(1x)?64x2xf32>")
    assert all(small.search(line) for line in others), others


@pytest.mark.parametrize("name", ["gdn", "mamba2", "kda", "rwkv7"])
def test_products_of_half_precision_are_as_the_device_prefers(name):
    """But the inverse of a correction; and `jax.default_matmul_precision` asks for more."""
    row = mixer(name)

    def loss(*inputs):
        return row.function(*inputs, **row.options)[0].astype(jnp.float32).sum()

    run = jax.grad(loss) if name == "gdn" else loss  # gradients take long to trace

    def products(dtype, platform="tpu", exact="HIGHEST"):
        inputs = draw_inputs(row, 64, batch=1, heads=2, dtype=dtype, gate_dtype=jnp.float32)
        traced = jax.jit(run).trace(*inputs)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # A product with a vector asks whether tokens are finite, one with a matrix sums log-decays.
        lines = re.findall("dot_general.*", text)
        lines = [line for line in lines if not re.search(r", tensor<\d+x(\d+x)?[a-z]", line)]
        return sum(exact in line for line in lines), len(lines)

    highest, number = products(jnp.float32)
    assert highest == number > 0
    highest, number = products(jnp.bfloat16)
    assert 4 * highest < number
    # Where the default would be TF32.
    rounded = products(jnp.bfloat16, "cuda", "lhs_precision_type = bf16")
    assert rounded == (number - highest, number)
    assert products(jnp.float16, "cuda", "lhs_precision_type")[0] == 0
    with jax.default_matmul_precision("highest"):
        highest, number = products(jnp.bfloat16)
        assert highest == number
