"""A state may be a pytree: a mixer that keeps a matrix and a count per head is held to it all."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int
from toy_mixer import TOY

from toolkit._checks import checked
from toolkit.attention import register_dataclass
from toolkit.attention.inputs import recurrent
from toolkit.looped.mixing.linear.recurrent import RecurrentCache
from toolkit.testing.sequences import sequence_contracts
from toolkit.testing.states import state_contracts

SIZES = (2, 2, 16, 8)


@register_dataclass
@dataclass(frozen=True)
class Counted:
    """A matrix, and how many tokens of the document it has seen."""

    memory: Float[Array, "batch heads key value"]
    count: Int[Array, "batch heads"]


def count(like, state, segment_ids):
    documents = jnp.zeros(like.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    is_start = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    time = like.shape[1]
    last = jnp.max(jnp.where(is_start, jnp.arange(time, dtype=jnp.int32)[None], 0), axis=1)[:, None]
    before = 0 if state is None else jnp.where(is_start.any(1)[:, None], 0, state.count)
    return jnp.broadcast_to(before + time - last, (like.shape[0], like.shape[2])).astype(jnp.int32)


def counted(function):
    @checked
    def run(*inputs, initial_state: Counted | None = None, segment_ids=None, **options):
        start = None if initial_state is None else initial_state.memory
        out, memory = function(*inputs, initial_state=start, segment_ids=segment_ids, **options)
        return out, Counted(memory, count(inputs[2], initial_state, segment_ids))

    return run


def counted_step(*inputs):
    *token, state = inputs
    out, memory = TOY.step(*token, state.memory)
    return out, Counted(memory, state.count + 1)


def empty_state(batch, heads, key, value, capacity, dtype):
    memory = TOY.empty_state(batch, heads, key, value, capacity, dtype)
    return Counted(memory, jnp.zeros((batch, heads), jnp.int32))


ROW = recurrent(
    name="counted",
    title="Counted",
    paper="-",
    transition=None,
    inputs=TOY.inputs,
    function=counted(TOY.function),
    step=counted_step,
    reference=counted(TOY.reference),
    empty_state=empty_state,
    forward_flops=TOY.forward_flops,
    step_flops=TOY.step_flops,
)
CONTRACTS = sequence_contracts() | state_contracts()
OF_STATES = (
    "states_groups_and_documents_carry_gradients",
    "bfloat16_keeps_its_state_in_float32",
    "not_finite_numbers_show_in_their_own_document_only",
)


@pytest.mark.parametrize("contract", OF_STATES)
def test_the_contracts_of_states_are_those_of_every_array_in_them(contract):
    CONTRACTS[contract](ROW)


def forgets_its_count(*inputs, **options):
    out, state = ROW.function(*inputs, **options)
    return out, replace(state, count=0 * state.count)


def loses_the_gradient(*inputs, initial_state=None, **options):
    state = jax.tree.map(jax.lax.stop_gradient, initial_state)
    return ROW.function(*inputs, initial_state=state, **options)


@pytest.mark.parametrize("function", [forgets_its_count, loses_the_gradient])
def test_an_array_of_the_state_that_is_wrong_is_found(function):
    with pytest.raises(AssertionError):
        CONTRACTS["states_groups_and_documents_carry_gradients"](replace(ROW, function=function))


def test_an_array_of_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"initial_state.count \[batch, heads\] must have shape"):
        ROW.function(
            *(jnp.zeros(()) for _ in range(5)),
            initial_state=replace(
                empty_state(*SIZES, 1, jnp.float32), count=jnp.zeros((2, 3), int)
            ),
        )


def test_rows_of_a_cache_are_freed_and_restored_in_all_arrays():
    filled = jax.tree.map(lambda x: x + 1, empty_state(*SIZES, 1, jnp.float32))
    cache = RecurrentCache(filled)
    freed = cache.free(jnp.asarray([1])).state
    for x in jax.tree.leaves(freed):
        np.testing.assert_array_equal(x[0], 1)
        np.testing.assert_array_equal(x[1], 0)
    later = jax.tree.map(lambda x: x + 1, cache)
    restored = later.restore([cache, later], jnp.asarray([0, 1])).state
    for x in jax.tree.leaves(restored):
        np.testing.assert_array_equal(x[0], 1)
        np.testing.assert_array_equal(x[1], 2)
    with pytest.raises(TypeError, match="cannot take tokens back"):
        cache.truncate(jnp.asarray([0, 0]))
