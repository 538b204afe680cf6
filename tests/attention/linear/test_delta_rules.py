"""The delta rules beyond the contracts: one as another, hard keys, reflections, transformers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    comba,
    comba_reference,
    comba_step,
    delta_net,
    draw_inputs,
    gated_delta_net,
    gated_delta_net_2,
    gated_delta_net_reference,
    gated_delta_product,
    gated_delta_product_reference,
    gated_delta_product_step,
    kimi_delta_attention,
    mixer,
    rwkv7,
)
from toolkit.testing.states import assert_close, random_state, results

FLOAT64_TOLERANCE = 1e-11
HARD_KEYS_TOLERANCE = 1e-4
PEER_TOLERANCE = 2e-5
TIME = 50

GDN, KDA = mixer("gdn"), mixer("kda")


def test_gated_delta_net_without_decay_is_delta_net():
    with enable_x64(True):
        q, k, v, g, beta = draw_inputs(GDN, TIME, dtype=jnp.float64)
        undecayed = lambda q, k, v, beta: gated_delta_net(q, k, v, 0 * g, beta)  # noqa: E731
        got, wanted = (results(f, [q, k, v, beta]) for f in (delta_net, undecayed))
        assert_close(got, wanted, FLOAT64_TOLERANCE)


def test_kimi_delta_attention_with_equal_channels_is_gated_delta_net():
    with enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def by_channels(q, k, v, g, beta):
            g = jnp.broadcast_to(g[..., None], (*g.shape, k.shape[-1]))
            return kimi_delta_attention(q, k, v, g, beta)

        wanted = results(gated_delta_net, inputs)
        assert_close(results(by_channels, inputs), wanted, FLOAT64_TOLERANCE)


def test_comba_that_feeds_back_what_decays_is_gated_delta_net():
    """b = e^g reads the decayed state; with d = 0 queries are as they come."""
    with enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def tied(q, k, v, g, beta):
            return comba(q, k, v, g, beta, feedback=jnp.exp(g), correction=0 * g)

        wanted = results(gated_delta_net, inputs)
        assert_close(results(tied, inputs), wanted, FLOAT64_TOLERANCE)


def decays_then_reads(q, k, v, g, beta, feedback, correction):
    """Comba's public loop over tokens, which decays before it reads, with numpy."""
    out, state = (
        np.zeros(v.shape),
        np.zeros((*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])),
    )
    heads = np.repeat(np.arange(k.shape[2]), v.shape[2] // k.shape[2])
    for t in range(v.shape[1]):
        state *= np.exp(g[:, t])[..., None, None]
        key, read = k[:, t, heads], feedback[:, t][..., None] * k[:, t, heads]
        written = beta[:, t][..., None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", read, state))
        state += key[..., None] * written[..., None, :]
        query = q[:, t, heads] - correction[:, t][..., None] * key
        out[:, t] = k.shape[-1] ** -0.5 * np.einsum("bhk,bhkv->bhv", query, state)
    return out, state


@pytest.mark.parametrize("form", ["xla", "scan", "reference", "step"])
def test_comba_may_decay_before_it_reads(form):
    with enable_x64(True):
        inputs = draw_inputs(mixer("comba"), 20, dtype=jnp.float64)
        wanted = decays_then_reads(*map(np.array, inputs))
        if form == "step":
            outs, state = [], jnp.zeros(wanted[1].shape)
            for t in range(20):
                out, state = comba_step(*(x[:, t] for x in inputs), state, decays_first=True)
                outs.append(out)
            got = jnp.stack(outs, axis=1), state
        elif form == "reference":
            got = comba_reference(*inputs, decays_first=True)
        else:
            got = comba(*inputs, decays_first=True, implementation=form)
        jax.tree.map(partial(np.testing.assert_allclose, atol=FLOAT64_TOLERANCE), got, wanted)
        # The paper's equation is another one.
        assert abs(comba(*inputs)[0] - wanted[0]).max() > 1e-3


def test_gated_delta_net_2_with_equal_gates_is_kimi_delta_attention():
    with enable_x64(True):
        inputs = draw_inputs(KDA, TIME, dtype=jnp.float64)

        def tied(q, k, v, g, beta):
            erase, write = (jnp.broadcast_to(beta[..., None], x.shape) for x in (k, v))
            return gated_delta_net_2(q, k, v, g, erase, write)

        wanted = results(kimi_delta_attention, inputs)
        assert_close(results(tied, inputs), wanted, FLOAT64_TOLERANCE)


def test_delta_product_with_one_correction_is_gated_delta_net():
    with enable_x64(True):
        inputs = draw_inputs(GDN, TIME, dtype=jnp.float64)

        def one_correction(q, k, v, g, beta):
            return gated_delta_product(q, k[..., None, :], v[..., None, :], g, beta[..., None])

        wanted = results(gated_delta_net, inputs)
        assert_close(results(one_correction, inputs), wanted, FLOAT64_TOLERANCE)


def test_rwkv7_with_tied_keys_is_delta_net():
    """Erasing and writing under one key, both by beta, corrects by the difference."""
    with enable_x64(True):
        q, k, v, beta = draw_inputs(mixer("delta"), TIME, dtype=jnp.float64)

        def tied(q, k, v, beta):
            rate = jnp.broadcast_to(beta[..., None], k.shape)
            return rwkv7(q, rate * k, v, 0 * k, k, rate, scale=k.shape[-1] ** -0.5)

        wanted = results(delta_net, [q, k, v, beta])
        assert_close(results(tied, [q, k, v, beta]), wanted, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_correlated_keys(strength):
    """Keys correlated 0.99 and a repeated one: an inverse by powers fails, these do not."""
    q, k, v, g, beta = draw_inputs(KDA, 130, batch=1, key=64)
    k = k.at[:, 1:].set(jnp.sqrt(0.99) * k[:, :1] + 0.1 * k[:, 1:])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    k = k.at[:, ::3].set(k[:, :1])
    inputs = [q, k, v, 0 * g, jnp.full_like(beta, strength)]
    got = jax.jit(partial(results, KDA.function))(inputs)
    with enable_x64(True):
        wanted = jax.jit(partial(results, KDA.reference))([x.astype(jnp.float64) for x in inputs])
    for a, b in zip(got, wanted, strict=True):
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
        assert error < HARD_KEYS_TOLERANCE


def test_delta_product_reads_the_state_once_however_often_it_corrects():
    with enable_x64(True):
        keys = iter(jax.random.split(jax.random.key(0), 5))
        q, k, v, g, beta = (
            jax.random.uniform(next(keys), (2, *shape), jnp.float64)
            for shape in ((2, 8), (2, 3, 8), (4, 3, 6), (4,), (4, 3))
        )
        token = (q, k, v, -g, beta)
        state = random_state(mixer("delta_product"), 4, jnp.float64, key=8, value=6)

        def sequence(*args):
            *token, state = args
            token = [x[:, None] for x in token]
            out, state = gated_delta_product_reference(*token, initial_state=state)
            return out[:, 0], state

        wanted = results(sequence, [*token, state])
        assert_close(results(gated_delta_product_step, [*token, state]), wanted, FLOAT64_TOLERANCE)
        program = jax.jit(gated_delta_product_step).lower(*token, state).as_text()
    assert program.count("dot_general") == 1


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


@pytest.mark.parametrize("correlation", [0.99, 1.0], ids=["correlated", "repeated"])
def test_correlated_keys_written_whole(correlation):
    """beta = 1, no decay: an inverse by powers fails here (test_inverse.py), the mixer does not."""
    random, shape = np.random.default_rng(0), (1, 130, 1, 64)
    q, v, own = (random.standard_normal(shape) for _ in range(3))
    common = random.standard_normal((1, 1, 1, 64))
    k = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    inputs = q, k, v, np.zeros(shape[:3]), np.ones(shape[:3])
    with enable_x64(True):
        wanted = gated_delta_net_reference(*map(jnp.asarray, inputs))
    for chunk in (None, 64):
        run = jax.jit(partial(gated_delta_net, chunk=chunk))
        got = run(*(jnp.asarray(x, jnp.float32) for x in inputs))
        for a, b in zip(got, wanted, strict=True):
            error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
            assert error < HARD_KEYS_TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("time", [63, 130])
def test_equal_to_transformers(time):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = [*draw_inputs(GDN, time), random_state(GDN, 2, jnp.float32)]
    out, state = jax.jit(gated_delta_net)(*inputs[:5], initial_state=inputs[5])
    q, k, v, g, beta, initial = (torch.tensor(np.asarray(x)) for x in inputs)
    peer = modeling.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True
    )
    assert_close((out, state), peer, PEER_TOLERANCE)
