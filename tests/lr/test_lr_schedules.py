"""Schedules against their closed forms, step by step, and as optax takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.lr import (
    cooldown_schedule,
    power_schedule,
    refined_schedule,
    tabulated_schedule,
    warmup_stable_decay_schedule,
)

TOLERANCE = 2e-6  # float32 rates
STEPS = np.arange(120)


def rates(schedule):
    return np.asarray(jax.jit(jax.vmap(schedule))(STEPS))


FALLS = {
    "linear": lambda gone: 1 - gone,
    "cosine": lambda gone: (1 + np.cos(np.pi * gone)) / 2,
    "sqrt": lambda gone: 1 - np.sqrt(gone),
}


@pytest.mark.parametrize("shape", FALLS)
def test_warmup_stable_decay(shape):
    schedule = warmup_stable_decay_schedule(
        0.3, 100, warmup_steps=10, cooldown_steps=20, shape=shape
    )
    fraction = np.clip((STEPS - 80) / 20, 0, 1)
    expected = 0.3 * np.minimum((STEPS + 1) / 10, 1) * FALLS[shape](fraction)
    np.testing.assert_allclose(rates(schedule), expected, rtol=TOLERANCE, atol=1e-8)
    assert (rates(schedule)[100:] == 0).all()
    cooldown = cooldown_schedule(0.3, 20, shape=shape)
    np.testing.assert_allclose(rates(cooldown)[:40], rates(schedule)[80:], rtol=TOLERANCE)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    peak=st.floats(1e-6, 10),
    parts=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20)),
    shape=st.sampled_from(sorted(FALLS)),
)
def test_wsd_of_any_lengths_rises_stays_and_falls_to_zero(peak, parts, shape):
    warmup, stable, cooldown = parts
    total = sum(parts)
    schedule = warmup_stable_decay_schedule(
        peak, total, warmup_steps=warmup, cooldown_steps=cooldown, shape=shape
    )
    rates = np.asarray(schedule(jnp.arange(64)))  # one length: compiled once
    assert (np.diff(rates[:warmup]) > 0).all()
    np.testing.assert_allclose(rates[warmup : warmup + stable + 1], peak, rtol=1e-6)
    assert (np.diff(rates[warmup + stable : total + 1]) <= 0).all()
    assert np.abs(rates[total:]).max() <= 1e-6 * peak


def test_linear_wsd_is_optax_joined():
    ours = warmup_stable_decay_schedule(0.3, 100, cooldown_steps=20)
    peers = optax.join_schedules(
        [optax.constant_schedule(0.3), optax.linear_schedule(0.3, 0.0, 20)], [80]
    )
    np.testing.assert_allclose(rates(ours), rates(peers), rtol=TOLERANCE, atol=1e-8)


def test_power():
    schedule = power_schedule(
        0.02, 100, tokens_per_step=64, amplitude=0.4, warmup_steps=4, cooldown_steps=20
    )
    power = np.minimum(0.02, 0.4 * ((STEPS + 1) * 64.0) ** -0.51)
    envelope = np.minimum((STEPS + 1) / 4, 1) * (1 - np.clip((STEPS - 80) / 20, 0, 1))
    np.testing.assert_allclose(rates(schedule), power * envelope, rtol=1e-5, atol=1e-9)
    assert power[0] == 0.02  # both branches are seen
    assert power[50] < 0.02


def test_refined_of_constant_norms_is_linear_decay():
    schedule = refined_schedule(np.full(101, 3.0), 0.5)
    np.testing.assert_allclose(
        rates(schedule)[:101], 0.5 * (1 - STEPS[:101] / 100), rtol=1e-5, atol=1e-7
    )
    longer = refined_schedule(np.full(101, 3.0), 0.5, 201)
    assert abs(float(longer(100)) - 0.25) < 1e-6


def test_refined_closed_form_and_smoothing():
    norms = np.exp(np.linspace(0, 1, 50))
    weights = norms**-2.0
    shape = np.array([weights[t] * weights[t + 1 :].sum() for t in range(50)])
    schedule = refined_schedule(norms, 2.0, smoothing=0.0)
    np.testing.assert_allclose(rates(schedule)[:50], 2 * shape / shape.max(), rtol=1e-5, atol=1e-7)
    spiked = norms.copy()
    spiked[20] *= 100
    smooth, rough = (rates(refined_schedule(spiked, 2.0, smoothing=f)) for f in (0.1, 0.0))
    assert rough[20] < 1e-3 < 0.8 < smooth[20] / smooth[19]


def test_they_go_into_optax():
    schedule = warmup_stable_decay_schedule(0.1, 10, cooldown_steps=5)
    optimizer = optax.sgd(schedule)
    parameter = jnp.array(0.0)
    state = optimizer.init(parameter)
    for _ in range(10):
        update, state = jax.jit(optimizer.update)(jnp.array(-1.0), state)
        parameter += update
    np.testing.assert_allclose(parameter, 0.1 * (5 + 1 + 0.8 + 0.6 + 0.4 + 0.2), rtol=1e-5)


def test_table_stays_at_its_end():
    schedule = tabulated_schedule([0.1, 0.2, 0.3])
    np.testing.assert_allclose(rates(schedule)[:5], [0.1, 0.2, 0.3, 0.3, 0.3], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: cooldown_schedule(-1.0, 10), "peak"),
        (lambda: cooldown_schedule(1.0, 0), "steps"),
        (lambda: cooldown_schedule(1.0, 10, shape="cubic"), "cubic"),
        (lambda: warmup_stable_decay_schedule(1.0, 10, cooldown_steps=11), "total_steps=10"),
        (
            lambda: power_schedule(
                1.0, 9, tokens_per_step=1, amplitude=1.0, exponent=1.0, cooldown_steps=1
            ),
            "exponent",
        ),
        (lambda: refined_schedule([1.0, 0.0], 1.0), "gradient_norms"),
        (lambda: refined_schedule([1.0], 1.0), "gradient_norms"),
        (lambda: refined_schedule([1.0, 1.0], 1.0, smoothing=2.0), "smoothing"),
        (lambda: tabulated_schedule([np.nan]), "rates"),
        (lambda: tabulated_schedule([]), "rates"),
    ],
)
def test_wrong_arguments_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()
