"""What a mixer with a state of one size promises besides: states, groups, extreme gates."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import Mixer, draw_inputs
from toolkit.testing.sequences import assert_close

FLOAT64_TOLERANCE = 1e-11
TIME = 50
# Ends of documents inside a chunk, at its edge, of one token, and a number used twice.
DOCUMENTS = np.stack([np.repeat([4, 1, 2, 4, 9], [10, 22, 1, 10, 7]), np.repeat([0, 1], [32, 18])])
# Of the largest value.
ABRUPT_OUTPUT_TOLERANCE, ABRUPT_GRADIENT_TOLERANCE = 1e-6, 1e-5
DECAYS = (0.0, -30.0, -200.0, -np.inf)
EARLIER = 9  # tokens that leave the state to begin with


def numbers(tree):
    """The floating-point arrays of a state, or of gradients, which counts have none of."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def results(function, inputs, **options):
    """Output, final state and the gradients of a loss that uses both, as a list of arrays."""

    def loss(*inputs):
        out, state = function(*inputs, **options)
        of_state = sum(jnp.sum(jnp.cos(2 * x)) for x in numbers(state))
        return jnp.sum(jnp.sin(3 * out)) + of_state, (out, state)

    places = range(len(inputs))
    run = jax.jit(jax.value_and_grad(loss, argnums=places, has_aux=True, allow_int=True))
    (_, values), gradients = run(*inputs)
    return [*jax.tree.leaves(values), *numbers(gradients)]


def with_state(function):
    """The function with its initial state as one more argument, to differentiate it too."""
    return lambda *inputs, **options: function(*inputs[:-1], initial_state=inputs[-1], **options)


def random_state(row, heads, dtype, **sizes):
    """A state to begin with: what a few other tokens leave."""
    inputs = draw_inputs(row, EARLIER, heads=heads, seed=5, dtype=dtype, **sizes)
    _, state = _reader(row.reference, tuple(row.options.items()))(*inputs)
    return state


@cache
def _reader(function, options):
    return jax.jit(partial(function, **dict(options)))


def states_groups_and_documents_carry_gradients(row: Mixer, *, is_grouped: bool = True) -> None:
    """Of every form: an initial state, documents in chunks, two value heads per key head."""
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, heads=4, dtype=jnp.float64)
        if is_grouped:  # heads of q and k that serve two value heads each
            inputs = [x[:, :, :2] for x in inputs[:2]] + inputs[2:]
        inputs.append(random_state(row, 4, jnp.float64))
        options = {"segment_ids": jnp.asarray(DOCUMENTS), "scale": 0.7}
        wanted = results(with_state(row.reference), inputs, **options)
        for form in row.differentiable:
            got = results(with_state(row.function), inputs, implementation=form, **options)
            assert_close(got, wanted, FLOAT64_TOLERANCE)


def values_alone_are_those_of_the_equation(row: Mixer) -> None:
    """Which take a way of their own, where nothing is differentiated."""
    with jax.enable_x64(True):
        drawn = draw_inputs(row, TIME, heads=4, dtype=jnp.float64)
        inputs = [*drawn, random_state(row, 4, jnp.float64)]
        options = {"segment_ids": jnp.asarray(DOCUMENTS)}
        wanted = jax.jit(partial(with_state(row.reference), **options))(*inputs)
        assert_close(with_state(row.function)(*inputs, **options), wanted, FLOAT64_TOLERANCE)


def not_finite_numbers_show_in_their_own_document_only(row: Mixer) -> None:
    """In its head, from its token on, and in the state if the document is the last."""
    inputs = draw_inputs(row, 40, batch=1)
    segment_ids = jnp.asarray(np.repeat([0, 1], [20, 20])[None])
    run = jax.jit(partial(row.function, segment_ids=segment_ids))

    def spoilt(name, token, head, number):
        place, x = row.names.index(name), inputs[row.names.index(name)]
        changed = x.at[(0, token, head, *(0 for _ in x.shape[3:]))].set(number)
        return run(*inputs[:place], changed, *inputs[place + 1 :])

    for name in row.names[1:]:
        out, state = spoilt(name, 5, 0, jnp.nan)
        assert np.isnan(out[0, 5:20, 0]).all()
        assert np.isfinite(out[0, :5]).all()
        assert np.isfinite(out[0, 20:]).all()
        assert np.isfinite(out[0, :, 1]).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    out, state = spoilt("v", 30, 1, jnp.inf)
    assert np.isfinite(out[0, :30]).all()
    assert any(np.isnan(x[0, 1]).all() for x in numbers(state))
    out, _ = run(*inputs, initial_state=spoilt_state(state))
    assert np.isnan(out[0, :20]).all()
    assert np.isfinite(out[0, 20:]).all()


def _widened(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def spoilt_state(state):
    """NaN wherever a state can hold it."""
    is_floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if is_floating(x) else x, state)


def gates_at_their_limits(row: Mixer) -> None:
    """No decay, a nearly cleared state, an exactly cleared one: at half the tokens, in a third of
    the channels, whose decays then cannot be factored from the chunk's entry; or all of them among
    mild ones, which must lose nothing beside them."""
    if "g" not in row.names:
        return
    inputs = [*draw_inputs(row, TIME), random_state(row, 2, jnp.float32)]
    got_of, wanted_of = (
        jax.jit(partial(results, with_state(f))) for f in (row.function, row.reference)
    )
    place = row.names.index("g")
    mild, random = inputs[place], np.random.default_rng(0)
    tokens, channels = (slice(None), slice(0, None, 2)), (slice(None), slice(0, None, 3))
    places = [tokens, (*tokens, *channels)] if mild.ndim == 4 else [tokens]
    gates = [mild.at[where].set(decay) for where in places for decay in DECAYS]
    is_abrupt, decays = random.random(mild.shape) < 0.3, random.choice([-50.0, -np.inf], mild.shape)
    gates.append(jnp.where(is_abrupt, decays.astype(np.float32), mild))
    for g in gates:
        gated = [*inputs[:place], g, *inputs[place + 1 :]]
        got = got_of(gated)
        with jax.enable_x64(True):
            wanted = wanted_of(jax.tree.map(_widened, gated))
        count = len(numbers(inputs))  # of the gradients, which come last
        tolerances = [ABRUPT_OUTPUT_TOLERANCE] * (len(got) - count)
        tolerances += [ABRUPT_GRADIENT_TOLERANCE] * count
        for a, b, tolerance in zip(got, wanted, tolerances, strict=True):
            largest = np.max(np.abs(b)) + np.finfo(np.float32).tiny
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


def bfloat16_keeps_its_state_in_float32(row: Mixer) -> None:
    """Of the function, the reference and the step."""
    inputs = draw_inputs(row, 20, dtype=jnp.bfloat16)
    for function in (row.function, row.reference):
        out, state = jax.eval_shape(function, *inputs)
        assert out.dtype == jnp.bfloat16
        assert all(x.dtype == jnp.float32 for x in numbers(state))
    out_t, state = jax.eval_shape(row.step, *(x[:, 0] for x in inputs), state)
    assert out_t.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in numbers(state))


def state_contracts(*, is_grouped: bool = True) -> dict[str, Any]:
    """By name, as functions of a row."""
    plain = (
        values_alone_are_those_of_the_equation,
        not_finite_numbers_show_in_their_own_document_only,
        gates_at_their_limits,
        bfloat16_keeps_its_state_in_float32,
    )
    groups = states_groups_and_documents_carry_gradients
    return {groups.__name__: partial(groups, is_grouped=is_grouped)} | {
        contract.__name__: contract for contract in plain
    }
