"""Mamba-3: the paper's recurrence with complex states, its order of accuracy, long rotations."""

import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import Mamba3State, draw_inputs, mamba2, mamba3, mamba3_step, mixer

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
KEY, VALUE = 6, 3


def drawn(time, **how):
    return draw_inputs(mixer("mamba3"), time, batch=1, heads=1, key=KEY, value=VALUE, **how)


def by_complex_states(q, k, v, g, dt, mix, angle):
    """A pair of key channels as one complex channel whose state turns at every token."""
    q, k, v, g, dt, mix, angle = (
        np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, g, dt, mix, angle)
    )
    q, k = (x[:, 0::2] + 1j * x[:, 1::2] for x in (q, k))
    state, before, out = np.zeros((KEY // 2, VALUE), complex), 0, []
    for t in range(len(q)):
        now = np.outer(k[t].conj(), v[t])
        # The state turns by e^(-i angle); q and k meet unturned.
        turn = np.exp(g[t]) * np.exp(1j * angle[t])[:, None]
        state = turn * (state + (1 - mix[t]) * dt[t] * before) + mix[t] * dt[t] * now
        out.append((q[t] @ state).real)
        before = now
    return np.stack(out)


def test_it_is_a_complex_state_space():
    """In which the trapezoid's earlier end decays and turns with the state."""
    with enable_x64(True):
        inputs = drawn(37, dtype=jnp.float64)
        out, state = mamba3(*inputs)
        wanted = by_complex_states(*inputs)
        np.testing.assert_allclose(
            out[0, :, 0], wanted, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
        )
        assert np.all((state.angle >= 0) & (state.angle < 2 * np.pi))


def test_without_turning_and_with_whole_shares_it_is_mamba2():
    with enable_x64(True):
        q, k, v, g, dt, mix, angle = drawn(37, dtype=jnp.float64)
        out, state = mamba3(q, k, v, g, dt, jnp.ones_like(mix), 0 * angle)
        wanted = mamba2(q, k, v, g, dt)
        for a, b in zip((out, state.memory), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize(("mix", "order"), [(1.0, 1), (0.5, 2)])
def test_its_order_is_that_of_the_trapezoid(mix, order):
    """Of dH/dt = -H + cos t: half the step leaves a quarter of the error, without it a half."""
    with enable_x64(True):
        errors = []
        for steps in (64, 128):
            dt, time = 1 / steps, np.arange(steps + 1) / steps
            v = jnp.asarray(np.cos(time)).reshape(1, -1, 1, 1)
            one = jnp.ones_like(v[..., 0])
            out, _ = mamba3(
                jnp.ones_like(v), jnp.ones_like(v), v, -dt * one,
                # The sum begins at the first token, not before it.
                (dt * one).at[:, 0].set(0.0), mix * one, jnp.zeros((1, steps + 1, 1, 0)),
            )  # fmt: skip
            exact = (np.cos(1) + np.sin(1) - np.exp(-1)) / 2
            errors.append(abs(float(out[0, -1, 0, 0]) - exact))
        assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.05)


def test_angles_keep_their_digits_over_many_turns():
    """In float32 against float64; one plain sum of angles is the control."""
    time = 3000
    *inputs, angle = drawn(time)
    angle = angle + 2.0
    out, _ = mamba3(*inputs, angle)
    with enable_x64(True):
        exact = [x.astype(jnp.float64) for x in (*inputs, angle)]
        wanted = np.asarray(mamba3(*exact)[0])
        total = np.cumsum(np.asarray(exact[-1]), axis=1)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())
    plain = np.cumsum(np.asarray(angle, np.float32), axis=1, dtype=np.float32)
    assert np.abs(plain - total).max() > 100 * FLOAT32_TOLERANCE


def test_another_number_of_angles_is_refused():
    *inputs, angle = drawn(5)
    with pytest.raises(ValueError, match=r"angle must have 3 pairs, half of the 6 .*got 2"):
        mamba3(*inputs, angle[..., :2])
    state = mixer("mamba3").empty_state(1, 1, KEY, VALUE, 1, jnp.float32)
    assert isinstance(state, Mamba3State)
    with pytest.raises(ValueError, match=r"angle .*pairs"):
        mamba3_step(*(x[:, 0] for x in (*inputs, angle[..., :2])), state)
