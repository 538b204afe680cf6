"""Tokens sent early to their experts: no number changes, and fewer pairs travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.experts import mixture, route, router_logits
from toolkit.parallel import make_mesh
from toolkit.parallel.experts import (
    gather_unshuffled,
    group_experts,
    scatter_shuffled,
    sharded_mixture,
    sharded_route,
    shuffled_order,
)

DEVICES, TOPICS, EXPERTS, CHOSEN, VOCABULARY, TOKENS = 8, 16, 64, 4, 256, 8192
TOLERANCE = 2e-6


def choices(seed):
    """Tokens of a vocabulary with topics; a topic likes eight experts of its own choice best."""
    draw = np.random.default_rng(0)
    liked = np.stack([draw.permutation(EXPERTS)[:8] for _ in range(TOPICS)])
    taste = np.zeros((VOCABULARY, EXPERTS))
    for token in range(VOCABULARY):
        taste[token, liked[token % TOPICS]] = 4.0
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, VOCABULARY, TOKENS)
    scores = taste[ids] + draw.gumbel(size=(TOKENS, EXPERTS))
    return ids, np.argsort(-scores, axis=1)[:, :CHOSEN]


def table_of(ids, experts):
    table = np.zeros((VOCABULARY, EXPERTS), int)
    np.add.at(table, (ids[:, None], experts), 1)
    return table


def local_share(order, places, experts):
    device_of_token = np.empty(TOKENS, int)
    device_of_token[order] = np.arange(TOKENS) // (TOKENS // DEVICES)
    device_of_expert = places // (EXPERTS // DEVICES)
    return (device_of_expert[experts] == device_of_token[:, None]).mean()


def test_both_halves_are_needed():
    """Learnt on one text and judged on another: of eight devices one is right by chance."""
    groups = group_experts(table_of(*choices(1)), DEVICES)
    ids, experts = choices(2)
    preferences = jnp.asarray(groups.preferences[ids])
    order = np.asarray(shuffled_order(preferences))
    np.testing.assert_array_equal(np.sort(order), np.arange(TOKENS))
    as_it_was = np.arange(EXPERTS)
    neither = local_share(np.arange(TOKENS), as_it_was, experts)
    experts_alone = local_share(np.arange(TOKENS), groups.places, experts)
    unknown_experts = np.random.default_rng(3).permutation(EXPERTS)
    tokens_alone = local_share(order, unknown_experts, experts)
    both = local_share(order, groups.places, experts)
    for share in (neither, experts_alone, tokens_alone):
        assert abs(share - 1 / DEVICES) < 0.04
    assert both > 3 / DEVICES


def test_any_order_changes_no_bit():
    mesh, draw = make_mesh({"e": DEVICES}), np.random.default_rng(0)
    parts = jnp.asarray(draw.normal(size=(DEVICES, 64, 8)), jnp.float32)
    kernel = jnp.asarray(draw.normal(size=(8, 16)), jnp.float32)
    shapes = (16, 8, 6), (16, 8, 6), (16, 6, 8)
    weights = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]

    @jax.jit
    def layer(order):
        over = {"mesh": mesh, "check_vma": False}
        scatter = lambda parts, order: scatter_shuffled(parts[0], order, "e")  # noqa: E731
        gather = lambda own, order: gather_unshuffled(own, order, "e")  # noqa: E731
        x = jax.shard_map(scatter, in_specs=(P("e"), P()), out_specs=P("e"), **over)(parts, order)
        routing = sharded_route(x, kernel, 3, mesh, tokens=P("e"))
        y = sharded_mixture(x, routing, *weights, mesh, axes="e", tokens=P("e")).outputs
        return jax.shard_map(gather, in_specs=(P("e"), P()), out_specs=P(), **over)(y, order)

    wanted = layer(jnp.arange(64))
    x = parts.sum(0)
    plain = mixture(x, route(router_logits(x, kernel), 3), *weights)
    np.testing.assert_allclose(wanted, plain, atol=TOLERANCE * np.abs(plain).max())
    for _ in range(3):
        np.testing.assert_array_equal(layer(draw.permutation(64)), wanted)
    wrong = jnp.asarray(draw.normal(size=(64, DEVICES)))
    np.testing.assert_array_equal(layer(shuffled_order(wrong)), wanted)


def test_groups_are_found_where_they_are():
    """Two kinds of tokens and of experts, mixed up: all pairs stay."""
    table = np.zeros((20, 8), int)
    table[::2, [1, 2, 5, 6]] = 3
    table[1::2, [0, 3, 4, 7]] = 3
    groups = group_experts(table, 2)
    assert {*groups.order[:4]} in ({1, 2, 5, 6}, {0, 3, 4, 7})
    np.testing.assert_array_equal(groups.order[groups.places], np.arange(8))
    np.testing.assert_array_equal(groups.preferences.max(1), 1)
    again = group_experts(table, 2)
    np.testing.assert_array_equal(groups.order, again.order)


def test_hopeless_preferences_still_make_an_order():
    for fill in (np.nan, np.inf, -np.inf, 0.0):
        order = shuffled_order(jnp.full((12, 3), fill))
        np.testing.assert_array_equal(np.sort(order), np.arange(12))


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10 tokens are no multiple of 4 devices; 12 are"):
        shuffled_order(jnp.zeros((10, 4)))
    with pytest.raises(ValueError, match="devices must divide the 64 experts; got 5"):
        group_experts(np.ones((4, 64), int), 5)
    with pytest.raises(ValueError, match="at least 0; got -1"):
        group_experts(-np.ones((4, 64), int), 4)
