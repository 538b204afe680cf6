"""What every mixer with a state of fixed size promises besides: states, groups, limits, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import by_night

from toolkit import checking
from toolkit.attention import MIXERS, draw_inputs, mixer
from toolkit.attention.linear.engine import recurrence
from toolkit.testing.states import (
    DOCUMENTS,
    TIME,
    assert_close,
    numbers,
    random_state,
    results,
    state_contracts,
    with_state,
)

FLOAT32_TOLERANCE = 2e-5
UNGROUPED = ("hgrn2", "rwkv7")  # one head of q for every head of v


@pytest.fixture(params=[row.name for row in MIXERS.values() if row.is_recurrent])
def row(request):
    return mixer(request.param)


def empty_state(row, key=16, value=8):
    return row.empty_state(2, 2, key, value, 1, jnp.float32, **row.options)


@pytest.mark.by_family
@pytest.mark.parametrize("contract", state_contracts())
def test_contract(row, contract):
    state_contracts(is_grouped=row.name not in UNGROUPED)[contract](row)


@pytest.mark.parametrize("name", ["gdn", "rwkv7"])
def test_values_alone_of_large_heads_are_those_that_are_differentiated(name):
    """They are made in smaller chunks."""
    row = mixer(name)
    inputs = draw_inputs(row, 70, batch=1, key=72, value=72)
    wanted, _ = jax.vjp(row.function, *inputs)
    assert_close(row.function(*inputs), wanted, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", by_night({"kda", "rwkv7"}, ["gdn", "kda", "rwkv7"]))
def test_the_way_of_values_alone_has_the_same_derivatives(name, monkeypatch):
    """JAX takes those where it forgets the rule that leads to the other way."""
    inputs = [*draw_inputs(mixer(name), TIME), random_state(mixer(name), 2, jnp.float32)]
    run = partial(results, with_state(mixer(name).function), inputs)
    wanted = run(segment_ids=DOCUMENTS)
    monkeypatch.setattr(recurrence, "_scan_chunks", recurrence._scan_chunks.fun)
    jax.clear_caches()
    try:
        assert_close(run(segment_ids=DOCUMENTS), wanted, FLOAT32_TOLERANCE)
    finally:
        jax.clear_caches()


@pytest.mark.by_family
def test_a_positive_log_decay_gives_nan(row):
    """From its token on, packed or not, in every form; only `checking()` refuses it."""
    if "g" not in row.names:
        return
    inputs, place = draw_inputs(row, 3), row.names.index("g")
    inputs[place] = inputs[place].at[0, 1, 0].set(0.5)
    packed = jax.jit(partial(row.function, segment_ids=jnp.zeros((2, 3), jnp.int32)))
    for function in (jax.jit(row.function), packed, jax.jit(row.reference)):
        out, state = function(*inputs)
        spoilt = np.zeros(out.shape[:3], bool)
        spoilt[0, 1:, 0] = True
        np.testing.assert_array_equal(np.isnan(out).all(-1), spoilt)
        are_nan = [np.isnan(x).any(axis=tuple(range(2, x.ndim))) for x in numbers(state)]
        np.testing.assert_array_equal(np.any(are_nan, axis=0), spoilt[:, -1])
    out_t, _ = jax.jit(row.step)(*(x[:, 1] for x in inputs), empty_state(row))
    np.testing.assert_array_equal(np.isnan(out_t).all(-1), spoilt[:, 1])


@pytest.mark.parametrize("name", ["gdn", "gla"])
def test_nobody_looks_for_nan_in_the_zeros_of_a_missing_state(name):
    """XLA evaluates what is constant while it compiles: of a large batch's states for minutes."""
    row = mixer(name)
    inputs = draw_inputs(row, TIME)
    trace = jax.make_jaxpr(lambda *inputs, **state: row.function(*inputs, **state))
    over_a_state = "reduce_and[axes=(2, 3)"
    assert over_a_state in str(trace(*inputs, initial_state=jnp.zeros((2, 2, 16, 8))))
    assert over_a_state not in str(trace(*inputs))


def test_a_chunk_of_more_tokens_than_there_are_is_no_larger():
    row = mixer("gdn")
    inputs = draw_inputs(row, 20)
    got, wanted = (row.function(*inputs, chunk=chunk)[0] for chunk in (1 << 40, 32))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", by_night({"gla"}, ["gdn", "gla"]))
def test_every_chunk_size_gives_the_same_result(name):
    inputs = [*draw_inputs(mixer(name), 70), random_state(mixer(name), 2, jnp.float32)]
    function = with_state(mixer(name).function)
    wanted = results(function, inputs, chunk=16)
    for chunk in (32, 64):
        assert_close(results(function, inputs, chunk=chunk), wanted, FLOAT32_TOLERANCE)


def test_chunks_are_powers_of_two(row):
    for chunk in (8, 48):
        with pytest.raises(ValueError, match=f"chunk must be a power of two .*got {chunk}"):
            row.function(*draw_inputs(row, 3), chunk=chunk)


@pytest.mark.parametrize("name", ["gdn", "gla"])
def test_the_backward_pass_keeps_chunk_states_not_token_states(name):
    """Temporary memory of forward and backward, against one state per token in the token scan."""
    inputs = draw_inputs(mixer(name), 1024, batch=1, key=64, value=64)

    def temporary_bytes(implementation):
        def loss(*x):
            return jnp.sum(mixer(name).function(*x, implementation=implementation)[0])

        compiled = jax.jit(jax.grad(loss, argnums=range(len(inputs)))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    token_states = 1024 * 2 * 64 * 64 * 4
    assert temporary_bytes("xla") < token_states / 4
    assert temporary_bytes("scan") > token_states


def test_wrong_states_and_lengths_are_named(row):
    inputs = draw_inputs(row, 4)
    with pytest.raises(ValueError, match=r"initial_state.* must have shape \(2, 2, .*16"):
        row.function(*inputs, initial_state=empty_state(row, key=8, value=16))
    with pytest.raises(ValueError, match="at least one token"):
        row.function(*(x[:, :0] for x in inputs))
    with pytest.raises(ValueError, match="q_t must have 3 axes"):
        row.step(*inputs, empty_state(row))
    if "beta" in row.names:
        place = row.names.index("beta")
        inputs[place] = inputs[place].at[0, 0].set(jnp.asarray(3.0)).at[0, 1].set(-1.0)
        with (
            checking(),
            pytest.raises(ValueError, match=r"beta is a writing strength .*got -1 to 3"),
        ):
            row.function(*inputs)
