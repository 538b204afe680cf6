"""Routers choose and weigh as those of transformers and of a small NumPy program do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit import checking
from toolkit.experts import (
    ROUTERS,
    clamped_gate,
    expert_loads,
    mixture,
    route,
    router_logits,
)

EXACT = 1e-6
GOLDEN = 5e-7  # golden values have six digits

RULES = {
    "softmax": {"normalise": False},
    "normalised": {},
    "v3": {"scores": "sigmoid", "groups": 4, "chosen_groups": 2, "scale": 2.5},
    "v3 without groups": {"scores": "sigmoid", "scale": 2.5},
    "v2": {
        "groups": 4,
        "chosen_groups": 2,
        "group_score": "max",
        "normalise": False,
        "scale": 16.0,
    },
}
SOFTMAX = [[6, 0], [5, 7], [2, 5], [5, 2], [0, 1], [0, 1]]
VALUES = {  # experts, weights of the first token, sum of y, sum of its magnitudes, first token's y
    "softmax": (SOFTMAX, [0.284063, 0.201804], -4.655998, 23.734058),
    "normalised": (SOFTMAX, [0.584651, 0.415349], -7.811319, 31.986297),
    "v3": (
        [[6, 4], [5, 4], [5, 4], [5, 4], [4, 1], [4, 1]],
        [1.466677, 1.033323],
        -18.060131,
        43.872977,
    ),
    "v3 without groups": (
        [[6, 4], [5, 4], [5, 2], [5, 4], [4, 1], [4, 1]],
        [1.466677, 1.033323],
        -28.632403,
        57.396690,
    ),
    "v2": (SOFTMAX, [4.545002, 3.228868], -74.495965, 379.744926),
}


def golden_inputs():
    draw = np.random.default_rng(7)
    tokens, experts, width, hidden = 6, 8, 4, 5
    x = draw.normal(size=(tokens, width)).astype(np.float32)
    kernel = draw.normal(size=(experts, width)).astype(np.float32)
    shapes = [(experts, width, hidden), (experts, width, hidden), (experts, hidden, width)]
    weights = [draw.normal(size=shape) for shape in shapes]
    bias = (0.3 * draw.normal(size=experts)).astype(np.float32)
    return x, x @ kernel.T, bias, weights


@pytest.mark.parametrize("rule", RULES)
def test_golden_values(rule):
    x, logits, bias, weights = golden_inputs()
    experts, first, total, magnitude = VALUES[rule]
    with enable_x64(True):
        choice_bias = jnp.asarray(bias) if "v3" in rule else None
        routing = route(jnp.asarray(logits), 2, choice_bias=choice_bias, **RULES[rule])
        y = np.asarray(mixture(jnp.asarray(x, jnp.float64), routing, *map(jnp.asarray, weights)))
    assert routing.experts.tolist() == experts
    np.testing.assert_allclose(routing.weights[0], first, rtol=GOLDEN * 4)
    np.testing.assert_allclose(y.sum(), total, rtol=GOLDEN * 4)
    np.testing.assert_allclose(np.abs(y).sum(), magnitude, rtol=GOLDEN * 4)


def by_hand(
    logits,
    count,
    bias=0.0,
    *,
    scores="softmax",
    groups=1,
    chosen_groups=1,
    group_score="top2",
    normalise=True,
    scale=1.0,
    outside=-np.inf,
    weigh_biased=False,
):
    """The rule in NumPy, and with the last two switches the rule that is wrong."""
    z = np.asarray(logits, np.float64)
    soft = np.exp(z - z.max(-1, keepdims=True))
    s = {
        "softmax": soft / soft.sum(-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(z))),
    }[scores]
    c = s + bias
    if groups > 1:
        parts = np.sort(c.reshape(len(c), groups, -1), axis=-1)
        best = parts[..., -1] if group_score == "max" else parts[..., -2:].sum(-1)
        chosen = np.argsort(-best, axis=-1)[:, :chosen_groups]
        mask = (chosen[..., None] == np.arange(groups)).any(1)
        c = np.where(np.repeat(mask, c.shape[1] // groups, axis=1), c, outside)
    experts = np.argsort(-c, axis=-1, kind="stable")[:, :count]
    w = np.take_along_axis(s + bias if weigh_biased else s, experts, axis=-1)
    w = w / w.sum(-1, keepdims=True) if normalise else w
    return experts, scale * w


@pytest.fixture(scope="module")
def drawn():
    draw = np.random.default_rng(0)
    return draw.normal(size=(200, 16)).astype(np.float32), 0.2 * draw.normal(size=16)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_row_is_the_rule_by_hand(name, drawn):
    logits, bias = drawn
    row = ROUTERS[name]
    bias = bias if row.has_choice_bias else 0.0
    choice_bias = jnp.asarray(bias, jnp.float32) if row.has_choice_bias else None
    found = route(jnp.asarray(logits), 4, choice_bias=choice_bias, **row.switches)
    experts, weights = by_hand(logits, 4, bias, **row.switches)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("deepseek_v2", {"normalise": True}),
        ("deepseek_v3", {"weigh_biased": True}),
        ("deepseek_v3", {"outside": 0.0, "bias": -2.0}),
        ("deepseek_v3", {"scores": "softmax"}),
        ("deepseek_v3", {"group_score": "max"}),
        ("olmoe", {"normalise": True}),
    ],
)
def test_a_wrong_rule_is_another_rule(name, wrong, drawn):
    """What the tests above would not let pass."""
    logits, bias = drawn
    row = ROUTERS[name]
    shift = wrong.pop("bias", 0.0) if "bias" in wrong else 0.0
    bias = bias + shift if row.has_choice_bias else 0.0
    right, other = (by_hand(logits, 4, bias, **dict(row.switches) | own) for own in ({}, wrong))
    is_other = (right[0] != other[0]).any(-1) | (np.abs(right[1] - other[1]) > 1e-3).any(-1)
    assert is_other.mean() > 0.1


def test_a_softmax_of_the_chosen_is_the_normalised_softmax_of_all(drawn):
    """gpt-oss takes it after the choice."""
    logits = jnp.asarray(drawn[0])
    best, experts = jax.lax.top_k(logits, 4)
    found = route(logits, 4)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, jax.nn.softmax(best), rtol=EXACT)


def test_of_equals_the_first_is_chosen():
    assert route(jnp.zeros((1, 6)), 3).experts.tolist() == [[0, 1, 2]]


def test_the_bias_chooses_and_never_weighs(drawn):
    """Its gradient is exactly 0, and that of the logits is that of the weights."""
    logits, bias = map(jnp.asarray, drawn)

    def loss(logits, bias):
        routing = route(logits, 4, scores="sigmoid", choice_bias=bias.astype(jnp.float32))
        return (routing.weights * jnp.arange(4)).sum()

    d_logits, d_bias = jax.grad(loss, argnums=(0, 1))(logits, bias)
    assert (d_bias == 0).all()
    assert jnp.abs(d_logits).max() > 0.01


def test_given_experts_are_weighed_and_not_chosen(drawn):
    logits = jnp.asarray(drawn[0])
    given = jnp.flip(route(logits, 4).experts + 3, axis=-1) % 16
    found = route(logits, 4, experts=given, scores="sigmoid")
    np.testing.assert_array_equal(found.experts, given)
    score = jax.nn.sigmoid(jnp.take_along_axis(logits, given, axis=-1))
    np.testing.assert_allclose(found.weights, score / score.sum(-1, keepdims=True), rtol=EXACT)
    again = route(logits, 4, experts=route(logits, 4).experts)
    np.testing.assert_array_equal(again.weights, route(logits, 4).weights)
    outside = route(logits[:1], 2, experts=jnp.array([[0, 16]])).weights[0]
    assert np.isnan(outside[1])


def test_the_router_is_float32_whatever_the_tokens_are():
    """Logits rounded to bfloat16 send some tokens elsewhere."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (400, 64), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (64, 64)) / 8
    logits = router_logits(x, kernel)
    wanted = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    sets = [np.sort(route(z, 8).experts, axis=-1) for z in (logits, logits.astype(jnp.bfloat16))]
    assert 0.005 < (sets[0] != sets[1]).any(-1).mean() < 0.2
    assert route(logits.astype(jnp.bfloat16), 8).weights.dtype == jnp.float32
    drawn = jax.random.normal(keys[0], (4000, 256))
    sets = [np.sort(route(z, 8).experts, axis=-1) for z in (drawn, drawn.astype(jnp.bfloat16))]
    assert 0.03 < (sets[0] != sets[1]).any(-1).mean() < 0.05


def test_loads_add_up_to_the_pairs(drawn):
    experts = route(jnp.asarray(drawn[0]), 4).experts
    loads = expert_loads(experts, 16)
    np.testing.assert_array_equal(loads, np.bincount(np.ravel(experts), minlength=16))
    assert loads.sum() == experts.size


def test_the_clamp_of_the_gate_is_one_sided():
    gate, up = jnp.array([-9.0, 9.0, 1.0]), jnp.array([1.0, 9.0, -9.0])
    g, u = np.array([-9.0, 7.0, 1.0]), np.array([1.0, 7.0, -7.0])
    wanted = (u + 1) * g / (1 + np.exp(-1.702 * g))
    np.testing.assert_allclose(clamped_gate(gate, up), wanted, rtol=EXACT, atol=1e-6)
    clamped = np.clip(g, -7, 7)
    other = (u + 1) * clamped / (1 + np.exp(-1.702 * clamped))
    assert np.abs(other - wanted).max() > 1e-6


ONES = jnp.ones((2, 8))
W = (jnp.ones((8, 4, 6)), jnp.ones((8, 4, 6)), jnp.ones((8, 6, 4)))
X = jnp.ones((2, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route(ONES, 9), "count must be at most the 8 experts; got 9"),
        (lambda: route(ONES, 0), "count must be at least 1; got 0"),
        (lambda: route(ONES, 2, groups=3), "groups must divide the 8 experts; got 3, and 2 does"),
        (lambda: route(ONES, 2, groups=2, chosen_groups=3), "at most groups 2; got 3"),
        (lambda: route(ONES, 5, groups=2), "at most the 4 experts of 1 chosen groups; got 5"),
        (lambda: route(ONES, 2, groups=8, chosen_groups=2), '"top2" needs two experts in a group'),
        (lambda: route(ONES, 1), "count 1 with normalise gives every token the weight 1"),
        (lambda: route(ONES, 2, choice_bias=jnp.ones(7)), "choice_bias"),
        (lambda: route(ONES, 2, experts=jnp.ones((2, 3), int)), "experts"),
        (lambda: route(ONES, 2, scores="tanh"), "scores must be"),
        (lambda: router_logits(X, jnp.ones((5, 8))), "kernel must have 4 rows"),
        (lambda: mixture(X, route(ONES[:1], 2), *W), "routing must be of tokens"),
        (lambda: mixture(X, route(ONES[:, :4], 2), *W), "and 8 experts; got"),
        (lambda: mixture(X, route(ONES, 2), W[0], W[1], W[1]), "down"),
        (lambda: mixture(jnp.ones((2, 5)), route(ONES, 2), *W), "up must have width 5"),
        (lambda: mixture(X, route(ONES, 2), *W, implementation="fast"), "implementation must be"),
        (lambda: mixture(X, route(ONES, 2), *W, implementation="ragged"), "runs on TPUs and GPUs"),
        (lambda: mixture(X, route(ONES, 2), *W, implementation="pallas"), "runs on TPUs"),
        (lambda: mixture(X, route(ONES, 2), *W, down_bias=jnp.ones((8, 6))), "down_bias"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_mixed_dtypes_are_refused():
    with pytest.raises(TypeError, match="gate must be bfloat16, as x is; got float32"):
        mixture(X.astype(jnp.bfloat16), route(ONES, 2), *W)


def test_logits_that_are_nan_are_refused_while_checking():
    with checking(), pytest.raises(ValueError, match="logits is a number per expert"):
        route(ONES.at[0, 0].set(jnp.nan), 2)
    assert np.isnan(route(ONES.at[0, 0].set(jnp.nan), 2).weights[0]).any()
