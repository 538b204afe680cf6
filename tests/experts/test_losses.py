"""Losses and the bias that balance loads: golden values, and the conventions of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.experts import (
    RoutingStatistics,
    balance_loss,
    load_entropy,
    max_violation,
    pooled_statistics,
    route,
    routing_statistics,
    updated_choice_bias,
    z_loss,
)

GOLDEN = 3e-7
RATE = 1e-3


def logits(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(64, 8)), jnp.float32)


def statistics(seed=0, **how):
    return routing_statistics(route(logits(seed), 2), **how)


def test_golden_values():
    found = statistics()
    assert found.loads.tolist() == [20, 19, 10, 19, 16, 15, 12, 17]
    np.testing.assert_allclose(balance_loss(found), 1.025950812557, rtol=GOLDEN)
    np.testing.assert_allclose(z_loss(found), 6.248262609, rtol=GOLDEN)


def test_levels_are_sums():
    """Sums over layers before the product are Hugging Face's loss; means of losses are another."""
    layers = jax.tree.map(lambda *x: jnp.stack(x), statistics(0), statistics(1))
    chosen = 2
    np.testing.assert_allclose(chosen * balance_loss(statistics()), 2.051901625113, rtol=GOLDEN)
    pooled = pooled_statistics(layers)
    np.testing.assert_allclose(chosen * balance_loss(pooled), 2.020879030, rtol=GOLDEN)
    np.testing.assert_allclose(chosen * balance_loss(layers), 2.030863, rtol=1e-6)


def test_padding_counts_in_nothing():
    """The first 8 of each 16 tokens are real; the others may be NaN."""
    mask = jnp.arange(64) % 16 < 8
    z = jnp.where(mask[:, None], logits(), jnp.nan)
    found = routing_statistics(route(z, 2), mask=mask)
    np.testing.assert_allclose(2 * balance_loss(found), 2.081396, rtol=1e-6)
    assert found.tokens == 32
    assert found.loads.sum() == 64
    assert jnp.abs(2 * balance_loss(statistics()) - 2.081396) > 0.01  # counting it is another loss


def test_the_loss_of_sequences_is_that_of_deepseek():
    """Scores are sigmoids that add up to 1; the mean over sequences."""
    z = logits().reshape(4, 16, 8)
    routing = route(z, 2, scores="sigmoid")
    scores = np.asarray(jax.nn.sigmoid(z), np.float64)
    share = scores / scores.sum(-1, keepdims=True)
    counts = np.stack([np.bincount(np.ravel(e), minlength=8) for e in routing.experts])
    wanted = (8 / (2 * 16) * counts * share.mean(1)).sum(-1).mean()
    found = balance_loss(routing_statistics(routing))
    np.testing.assert_allclose(found, wanted, rtol=GOLDEN)


def test_the_gradient_flows_through_probabilities_alone():
    def loss(z):
        return balance_loss(routing_statistics(route(z, 2)))

    z = logits()
    found = jax.grad(loss)(z)
    share = statistics().loads / 128
    wanted = jax.grad(lambda z: 8 * (share * jax.nn.softmax(z).mean(0)).sum())(z)
    np.testing.assert_allclose(found, wanted, atol=1e-8)
    assert jnp.abs(found).max() > 1e-5


def test_even_loads_lose_one_and_no_choice_that_follows_the_probabilities_less():
    share = np.random.default_rng(0).dirichlet(np.ones(8), size=50)
    each = jnp.asarray(64 * share, jnp.float32)
    own = RoutingStatistics(each, each, jnp.zeros(50), jnp.full(50, 64.0))
    for i in range(50):
        assert balance_loss(jax.tree.map(lambda x: x[i], own)) >= 1  # noqa: B023
    even = jnp.full(8, 8.0)
    np.testing.assert_allclose(
        balance_loss(RoutingStatistics(even, each[0], jnp.zeros(()), jnp.array(64.0))), 1, rtol=1e-6
    )


def counts_after(steps):
    bias, counts = np.zeros(8, np.float32), []
    popularity = np.array([2, 1, 0, 0, 0, 0, -1, -2])
    for step in range(steps):
        z = np.random.default_rng(step).normal(size=(512, 8)) + popularity
        routing = route(jnp.asarray(z, jnp.float32), 2, scores="sigmoid", choice_bias=bias)
        loads = routing_statistics(routing).loads
        counts.append(np.asarray(loads, int).tolist())
        bias = updated_choice_bias(jnp.asarray(bias), loads, RATE)
    return bias, counts


def test_a_bias_levels_loads_without_a_loss():
    bias, counts = counts_after(400)
    assert counts[:3] == [
        [453, 241, 68, 81, 86, 81, 13, 1],
        [434, 276, 73, 78, 75, 78, 9, 1],
        [426, 270, 75, 75, 79, 86, 12, 1],
    ]
    wanted = [-0.334, -0.23, -0.056, -0.05, -0.051, -0.049, 0.186, 0.378]
    np.testing.assert_allclose(bias, wanted, atol=2e-3)
    late = np.mean([max_violation(jnp.asarray(c, jnp.float32)) for c in counts[-50:]])
    assert late < 0.2 < max_violation(jnp.asarray(counts[0], jnp.float32))


def test_the_sign_of_a_sum_is_not_the_sum_of_signs():
    """Two micro-batches of opposite loads move nothing together, and something one by one."""
    first, second = jnp.array([5.0, 1.0, 3.0]), jnp.array([1.0, 5.0, 6.0])
    bias = jnp.zeros(3)
    together = updated_choice_bias(bias, first + second, RATE)
    apart = updated_choice_bias(updated_choice_bias(bias, first, RATE), second, RATE)
    assert jnp.abs(together - apart).max() >= RATE


def test_how_even_loads_are():
    assert max_violation(jnp.array([[2.0, 2.0], [4.0, 0.0]])).tolist() == [0.0, 1.0]
    np.testing.assert_allclose(load_entropy(jnp.array([[2.0, 2.0], [4.0, 0.0]])), [1, 0], atol=1e-6)
    assert max_violation(jnp.zeros(4)) == -1  # nothing was routed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics(mask=jnp.ones(63, bool)), "mask"),
        (lambda: routing_statistics(route(jnp.ones(8), 2)), "that of a single token"),
        (lambda: pooled_statistics(statistics()), "axes must be from 0 to 0; got 1"),
        (lambda: updated_choice_bias(jnp.ones(3), jnp.ones(4)), "loads"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)
