"""The platform is that for which a program is lowered, not the one on which it is traced."""

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import draw_inputs, mixer

# A loop over heads is a `while` that the programs of accelerators do not have: what stays are the
# walks over tiles, or over chunks of queries.
CASES = {
    "full": {},
    "nsa": {"block_size": 16, "selected_blocks": 3, "sliding_window": 16},
    "moba": {"block_size": 16, "selected_blocks": 2},
    "dsa": {"selected_tokens": 16},
}


@pytest.mark.parametrize("name", CASES)
def test_heads_are_one_batch_on_accelerators_and_one_by_one_on_a_cpu(name):
    row = mixer(name, **CASES[name])
    inputs = draw_inputs(row, 160, batch=2, heads=2, dtype=jnp.float32)

    def loss(*inputs):
        return row.function(*inputs, **row.options)[0].sum()

    traced = jax.jit(jax.grad(loss)).trace(*inputs)
    loops = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while")
        for platform in ("cpu", "cuda", "tpu")
    }
    assert loops["cuda"] == loops["tpu"]
    # Forward and backward.
    assert loops["cpu"] >= loops["cuda"] + 2


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
