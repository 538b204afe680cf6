"""What a loop may start from: never the state another loop ended with."""

import jax
import jax.numpy as jnp
import numpy as np
from looped_small_model import small, some_tokens

from toolkit.attention import gated_linear_attention
from toolkit.looped import LoopedCache, prefill

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def halving(x, loops, carried):
    """S <- S / 2 + x / 2, out = S, `loops` times; the state reset or carried between loops."""
    state, half = jnp.zeros((1, 1, 1, 1)), jnp.full((1, x.size, 1, 1), jnp.log(0.5))
    out = jnp.asarray(x, jnp.float32)[None, :, None, None]
    one = jnp.ones_like(out)
    for _ in range(loops):
        out, state = gated_linear_attention(
            one,
            one,
            out / 2,
            half,
            scale=1.0,
            initial_state=state if carried else None,
            implementation="scan",
        )
    return np.asarray(out[0, :, 0, 0])


def test_the_smallest_counter_example_to_carried_state():
    reset = [halving(np.array([1.0, last]), 2, carried=False)[0] for last in (2.0, 4.0)]
    np.testing.assert_allclose(reset, 0.25, **FLOAT32_TOLERANCE)
    # The first output now depends on the second input.
    carried = [halving(np.array([1.0, last]), 2, carried=True)[0] for last in (2.0, 4.0)]
    np.testing.assert_allclose(carried, [0.875, 1.375], **FLOAT32_TOLERANCE)


def test_a_model_that_carried_its_state_would_see_the_future():
    model, tokens = small("linear", loops=2), some_tokens()
    changed = tokens.at[:, -1].add(7) % 50

    @jax.jit
    def past(model, tokens):
        empty = LoopedCache.empty(model.config, 1, tokens.shape[1]).loops[0]
        h, caches = model.loop(model.embedding(tokens), None, caches=empty)
        reset, _ = model.loop(h, None, caches=empty)
        carried, _ = model.loop(h, None, caches=caches)
        return reset[:, :-1], carried[:, :-1]

    (reset, carried), (reset_too, carried_too) = past(model, tokens), past(model, changed)
    np.testing.assert_array_equal(reset, reset_too)
    assert not np.allclose(carried, carried_too)


def test_the_past_is_bit_identical_after_every_loop():
    model, tokens = small("linear window", loops=4), some_tokens()
    states = jax.jit(lambda model, tokens: model(tokens, return_loops=True)[1])
    before, after = states(model, tokens), states(model, tokens.at[:, 7:].add(3) % 50)
    np.testing.assert_array_equal(before[:, :, :7], after[:, :, :7])
    assert np.all(np.any(before[:, :, 7:] != after[:, :, 7:], axis=(1, 2, 3)))


def test_the_state_of_a_loop_knows_the_hidden_states_before_it_only():
    """S^(tau) follows from h^(tau-1) alone, and S_t^(tau) from no position after t."""
    model, tokens = small("gdn", loops=2), some_tokens()
    empty = LoopedCache.empty(model.config, 1, 12).loops[0]
    _, cache = prefill(model, tokens, 12)

    @jax.jit
    def two_loops(model):
        first, _ = model.loop(model.embedding(tokens), model.rho[0], caches=empty)
        return first, model.loop(first, None, caches=empty)[1][0]

    hidden, alone = two_loops(model)
    np.testing.assert_allclose(alone.state, cache.loops[1][0].state, **FLOAT32_TOLERANCE)

    @jax.jit
    def states(h):
        """One number of the state after every token, from its steps."""

        layer = model.blocks[0]

        def step(cache, h_t):
            _, cache = layer.mixer.step(layer.mixer_norm(h_t), cache)
            return cache, jnp.sum(jnp.sin(cache.state))

        return jax.lax.scan(step, empty[0], jnp.moveaxis(h, 1, 0))[1]

    influence = np.abs(jax.jacrev(states)(hidden)).sum(axis=(1, 3))
    assert np.all(influence[np.triu_indices(12, 1)] == 0)
    assert np.all(influence[np.tril_indices(12)] > 0)
