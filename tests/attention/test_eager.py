"""Eager calls, as in a notebook: from the second call on, nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import counted_programs

from toolkit.attention import MIXERS, draw_inputs, mixer, softmax_attention

OPTIONS = {
    "window": {"sliding_window": 5},
    "nsa": {"block_size": 4, "selected_blocks": 4, "sliding_window": 5},
    "moba": {"block_size": 4, "selected_blocks": 2},
    "dsa": {"selected_tokens": 6},
    "hca": {"block_size": 4, "sliding_window": 5},
    "csa": {"block_size": 4, "selected_entries": 3, "sliding_window": 5},
    "qsa": {"block_size": 4, "selected_tokens": 8},
}


@pytest.mark.by_family
@pytest.mark.parametrize("time", [20, 160])  # softmax is dense up to 128 keys
@pytest.mark.parametrize("name", MIXERS)
def test_a_second_eager_call_compiles_nothing(name, time):
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, time, batch=1)

    def loss(*inputs):
        return jnp.sum(row.function(*inputs, **row.options)[0])

    gradient = jax.grad(loss, argnums=range(len(inputs)))
    for call in (loss, gradient):
        call(*inputs)
        with counted_programs() as programs:
            call(*inputs)
        assert not programs, f"{len(programs)} programs compiled again"


@pytest.mark.parametrize("name", MIXERS)
def test_a_second_eager_step_compiles_nothing(name):
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = [x[:, 0] for x in draw_inputs(row, 1, batch=1)]
    state = row.empty_state(1, 2, 16, 8, 8, jnp.float32, **row.options)
    _, state = row.step(*inputs, state, **row.options)
    with counted_programs() as programs:
        row.step(*inputs, state, **row.options)
    assert not programs, f"{len(programs)} programs compiled again"


def test_an_argument_may_be_none_by_name_as_by_default():
    """Once the fields of a state that is not there were read."""
    x = jnp.ones((1, 4, 2, 8))
    out, _ = softmax_attention(x, x, x, initial_state=None)
    assert jnp.array_equal(out, softmax_attention(x, x, x)[0])
