"""The delta rules beyond the contracts: one as another, states, strong decays, hard keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_results import assert_close, random_state, results, with_state

from toolkit.attention import (
    comba,
    delta_net,
    draw_inputs,
    gated_delta_net,
    gated_delta_net_2,
    gated_delta_product,
    kimi_delta_attention,
    mixer,
    rwkv7,
)

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
HARD_KEYS_TOLERANCE = 1e-4
TIME = 50

NAMES = ("gdn", "comba", "kda", "gdn2", "delta_product", "rwkv7")
GDN, COMBA, KDA, GDN2, PRODUCT, RWKV7 = (mixer(name) for name in NAMES)


def test_gated_delta_net_without_decay_is_delta_net():
    with jax.enable_x64(True):
        q, k, v, g, beta = draw_inputs(GDN, TIME, dtype=jnp.float64)
        undecayed = lambda q, k, v, beta: gated_delta_net(q, k, v, 0 * g, beta)  # noqa: E731
        got, wanted = (results(f, [q, k, v, beta]) for f in (delta_net, undecayed))
        assert_close(got, wanted, FLOAT64_TOLERANCE)


def test_kimi_delta_attention_with_equal_channels_is_gated_delta_net():
    with jax.enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def by_channels(q, k, v, g, beta):
            g = jnp.broadcast_to(g[..., None], (*g.shape, k.shape[-1]))
            return kimi_delta_attention(q, k, v, g, beta)

        wanted = results(gated_delta_net, inputs)
        assert_close(results(by_channels, inputs), wanted, FLOAT64_TOLERANCE)


def test_comba_that_feeds_back_what_decays_is_gated_delta_net():
    """b = e^g reads the decayed state; with d = 0 queries are as they come."""
    with jax.enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def tied(q, k, v, g, beta):
            return comba(q, k, v, g, beta, feedback=jnp.exp(g), correction=0 * g)

        wanted = results(gated_delta_net, inputs)
        assert_close(results(tied, inputs), wanted, FLOAT64_TOLERANCE)


def test_gated_delta_net_2_with_equal_gates_is_kimi_delta_attention():
    with jax.enable_x64(True):
        inputs = draw_inputs(KDA, TIME, dtype=jnp.float64)

        def tied(q, k, v, g, beta):
            erase, write = (jnp.broadcast_to(beta[..., None], x.shape) for x in (k, v))
            return gated_delta_net_2(q, k, v, g, erase, write)

        wanted = results(kimi_delta_attention, inputs)
        assert_close(results(tied, inputs), wanted, FLOAT64_TOLERANCE)


def test_delta_product_with_one_correction_is_gated_delta_net():
    with jax.enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def one_correction(q, k, v, g, beta):
            return gated_delta_product(q, k[..., None, :], v[..., None, :], g, beta[..., None])

        wanted = results(gated_delta_net, inputs)
        assert_close(results(one_correction, inputs), wanted, FLOAT64_TOLERANCE)


def test_rwkv7_with_tied_keys_is_delta_net():
    """Erasing and writing under one key, both by beta, corrects by the difference."""
    with jax.enable_x64(True):
        q, k, v, beta = draw_inputs(mixer("delta"), TIME, dtype=jnp.float64)

        def tied(q, k, v, beta):
            rate = jnp.broadcast_to(beta[..., None], k.shape)
            return rwkv7(q, rate * k, v, 0 * k, k, rate, scale=k.shape[-1] ** -0.5)

        wanted = results(delta_net, [q, k, v, beta])
        assert_close(results(tied, [q, k, v, beta]), wanted, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "scan"])
@pytest.mark.parametrize("row", [COMBA, KDA, GDN2, PRODUCT, RWKV7], ids=lambda row: row.name)
def test_states_and_documents_carry_gradients(row, implementation):
    with jax.enable_x64(True):
        inputs = draw_inputs(row, TIME, heads=4, dtype=jnp.float64)
        if row is not RWKV7:  # heads of q and k that serve two value heads each
            inputs = [x[:, :, :2] for x in inputs[:2]] + inputs[2:]
        inputs.append(random_state(4, jnp.float64))
        # Ends of documents inside a chunk, at its edge, of one token, and a number used twice.
        first = np.repeat([4, 1, 2, 4, 9], [10, 22, 1, 10, 7])
        segment_ids = jnp.asarray(np.stack([first, np.repeat([0, 1], [32, 18])]))
        options = {"segment_ids": segment_ids, "scale": 0.7}
        got = results(with_state(row.function), inputs, implementation=implementation, **options)
        wanted = results(with_state(row.reference), inputs, **options)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("row", [KDA, GDN2, RWKV7], ids=lambda row: row.name)
def test_channels_may_fade_as_much_as_they_like(row):
    """Decays that cannot be factored from the chunk's entry, some channels cleared outright."""
    inputs = draw_inputs(row, TIME)
    got_of = jax.jit(partial(results, row.function))
    wanted_of = jax.jit(partial(results, row.reference))
    for decay in (0.0, -30.0, -jnp.inf):
        inputs[3] = inputs[3].at[:, ::2, :, ::3].set(decay)
        got = got_of(inputs)
        with jax.enable_x64(True):
            wanted = wanted_of([x.astype(jnp.float64) for x in inputs])
        assert all(np.isfinite(x).all() for x in got)
        # The tolerance grows with the running sum of g, whose rounding the differences inherit.
        assert_close(got, wanted, FLOAT32_TOLERANCE * max(1.0, min(-decay, 87.0)))


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_correlated_keys(strength):
    """Keys correlated 0.99 and a repeated one: an inverse by powers fails, these do not."""
    q, k, v, g, beta = draw_inputs(KDA, 130, batch=1, key=64)
    k = k.at[:, 1:].set(jnp.sqrt(0.99) * k[:, :1] + 0.1 * k[:, 1:])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    k = k.at[:, ::3].set(k[:, :1])
    inputs = [q, k, v, 0 * g, jnp.full_like(beta, strength)]
    got = jax.jit(partial(results, KDA.function))(inputs)
    with jax.enable_x64(True):
        wanted = jax.jit(partial(results, KDA.reference))([x.astype(jnp.float64) for x in inputs])
    for a, b in zip(got, wanted, strict=True):
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
        assert error < HARD_KEYS_TOLERANCE


def test_delta_product_follows_a_rotation():
    """Two reflections make a rotation of the state: what DeltaNet with beta <= 1 cannot do."""
    angle = 2 * np.pi / 5
    first, second = np.array([1.0, 0.0]), np.array([np.cos(angle / 2), np.sin(angle / 2)])
    k = np.broadcast_to(np.stack([first, second]), (1, 5, 1, 2, 2))
    start = np.eye(2)[None, None]
    _, state = gated_delta_product(
        jnp.zeros((1, 5, 1, 2)),
        jnp.asarray(k, jnp.float32),
        jnp.zeros((1, 5, 1, 2, 2)),
        jnp.zeros((1, 5, 1)),
        jnp.full((1, 5, 1, 2), 2.0),
        initial_state=jnp.asarray(start, jnp.float32),
    )
    np.testing.assert_allclose(state, start, atol=1e-6)
