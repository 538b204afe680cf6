"""What every token mixer promises: one suite that each row of `MIXERS` inherits."""

from functools import partial

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from toolkit import checking
from toolkit.attention import MIXERS, draw_inputs, mixer
from toolkit.testing.sequences import assert_close, sequence_contracts

FLOAT32_TOLERANCE = 2e-5

WINDOW = 5
# So small that most of a sequence is not seen.
OPTIONS = {
    "window": {"sliding_window": WINDOW},
    "nsa": {"block_size": 3, "selected_blocks": 4, "sliding_window": WINDOW},
    "moba": {"block_size": 3, "selected_blocks": 3},
    "dsa": {"selected_tokens": 6},
    "hca": {"block_size": 3, "sliding_window": WINDOW},
    "csa": {"block_size": 3, "selected_entries": 3, "sliding_window": WINDOW},
    "qsa": {"block_size": 4, "selected_tokens": 8},
}


@pytest.fixture(params=list(MIXERS))
def row(request):
    return mixer(request.param, **OPTIONS.get(request.param, {}))


# What follows from the engine that mixers share is tested by day on one mixer of each family.
BY_FAMILY = (
    "one_token", "the_future", "bfloat16", "packed", "a_state_remembers", "vmap", "shard_map",
    "not_finite", "second_call",
)  # fmt: skip
CASES = [
    pytest.param(
        name, marks=[pytest.mark.by_family] if any(word in name for word in BY_FAMILY) else []
    )
    for name in sequence_contracts()
]


@pytest.mark.parametrize("contract", CASES)
def test_contract(row, contract):
    sequence_contracts()[contract](row)


@pytest.mark.by_family
def test_the_shapes_in_the_signatures_hold(row):
    def check(function):
        checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)
        return jax.jit(partial(checked, **row.options))

    inputs = draw_inputs(row, 3)
    out, _ = check(row.function)(*inputs)
    check(row.reference)(*inputs)
    state = row.empty_state(2, 2, 16, 8, 4, jnp.float32, **row.options)
    out_t, _ = check(row.step)(*(x[:, 0] for x in inputs), state)
    assert_close(out_t, out[:, 0], FLOAT32_TOLERANCE)


def test_wrong_inputs_are_named(row):
    named = dict(zip(row.names, draw_inputs(row, 6, heads=4), strict=True))

    def run(*, implementation=None, **changed):
        arrays = {**named, **changed}.values()
        return row.function(*arrays, implementation=implementation, **row.options)

    with pytest.raises(ValueError, match=r"q must have 4 axes .*got shape \(2, 6, 4\)"):
        run(q=named["q"][..., 0])
    with pytest.raises(ValueError, match=r"must have shape|multiple"):
        run(q=named["q"][:, :, :3])
    with pytest.raises(ValueError, match=r"v .*must have shape"):
        run(v=named["v"][:, :5])
    with pytest.raises(TypeError, match=r"one dtype"):
        run(v=named["v"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"implementation must be "):
        run(implementation="fastest")
    if "g" in row.gates:
        message = r"g is a natural-log decay and must be <= 0"
        with checking(), pytest.raises(ValueError, match=message):
            run(g=-named["g"])
