"""Several query heads per key head: what they read together, and that a budget is what is read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_laws
from tiers import by_night

from toolkit.attention import sparse

HEADS = pytest.mark.parametrize("group_size", [1, 4, 8])
# In the first tier, H2O stands for the others that evict.
OTHERS = {"infllm", "snapkv", "tova", "knorm", "kvzip"}
EACH = pytest.mark.parametrize("name", by_night(OTHERS, sparse.SELECTORS))
CAPACITY, SIZE, LENGTH = 160, 16, (160, 33)
SMALL = {
    "quest": {"page_size": 8},
    "tactic": {"cluster_size": 4, "segment": 32, "refresh_every": 8, "iterations": 3},
    "hata": {"bits": 32},
    "pqcache": {"bits": 3, "iterations": 3, "sinks": 4},
    "infllm": {"block_size": 8, "kernel": 4, "stride": 2, "sinks": 4},
}
EXACT = 1e-5
OF_BEST, OF_MIDPOINTS = 0.93, 0.9  # the share of the best pages' mass that Quest keeps, and theirs


@cache
def drawn(group_size):
    rows = [sparse_laws.topics(seed, group_size, key_heads=2, tokens=CAPACITY, queries=1, size=SIZE)
            for seed in range(2)]  # fmt: skip
    q, keys, values = (jnp.stack([getattr(x, name) for x in rows]) for name in rows[0]._fields)
    return q[:, 0], keys, values


@cache
def selector(name):
    return sparse.SELECTORS[name](**({"recent": 8} | SMALL.get(name, {})))


@cache
def built(name, group_size=1):
    q, keys, values = drawn(group_size)
    queries = jnp.repeat(q[:, :, None], CAPACITY, axis=2) + 0.1 * jnp.repeat(keys, group_size, 1)
    return sparse.build(selector(name), keys, values, jnp.array(LENGTH), queries=queries)


def decode(name, group_size, budget, **how):
    q = drawn(group_size)[0]
    return sparse.decode_step(built(name, group_size), q, selector(name), budget, **how)


@EACH
@pytest.mark.parametrize("group", by_night({"union"}, ["union", "sum", "max"]))
def test_copies_of_a_query_select_what_it_selects(name, group):
    q, *_ = drawn(1)
    alone = decode(name, 1, sparse.FixedTokens(56))
    copies = jnp.repeat(q, 4, axis=1)
    step = sparse.decode_step(
        built(name), copies, selector(name), sparse.FixedTokens(56), group=group
    )
    np.testing.assert_array_equal(step.tokens, alone.tokens)
    np.testing.assert_allclose(step.lse, jnp.repeat(alone.lse, 4, axis=1), atol=EXACT)
    np.testing.assert_allclose(step.out, jnp.repeat(alone.out, 4, axis=1), atol=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_night({"hata", "pqcache", "random"}, sparse.SELECTORS))
@pytest.mark.parametrize("group_size", by_night({1, 8}, [1, 4, 8]))
@pytest.mark.parametrize(
    "group", by_night([None, "sum", "max"], [None, "union", "each", "sum", "max"])
)
def test_a_budget_is_what_is_read(name, group_size, group):
    least = selector(name).least
    for tokens in (least, 61):
        step = decode(name, group_size, sparse.FixedTokens(tokens), group=group)
        assert (step.tokens <= tokens).all(), tokens
        assert (step.tokens[1] <= LENGTH[1] * (group_size if group == "each" else 1)).all()
        assert jnp.isfinite(step.out).all()
    if selector(name).estimates_mass:
        budget = sparse.MassTarget(0.99, most_tokens=61)
        assert (decode(name, group_size, budget, group=group).tokens <= 61).all()


@EACH
def test_a_budget_below_what_is_always_read_is_refused(name):
    """With the least that works, which does; a default system names its own."""
    own = selector(name)
    for budget in (
        sparse.FixedTokens(own.least - 1),
        sparse.Ratio((own.least - 1) / CAPACITY),
        sparse.PerHead((CAPACITY, own.least - 1)),
        sparse.MassTarget(0.9, most_tokens=own.least - 1),
    ):
        if budget.needs_mass and not own.estimates_mass:
            continue
        with pytest.raises(
            ValueError, match=f"at least {own.least} tokens for {type(own).__name__}"
        ):
            decode(name, 4, budget)
    assert (decode(name, 4, sparse.FixedTokens(own.least)).tokens <= own.least).all()
    with pytest.raises(ValueError, match="must be for 2 key-value heads"):
        decode(name, 4, sparse.PerHead((CAPACITY,)))


@pytest.mark.parametrize("group", ["union", "each"])
@HEADS
def test_heads_share_a_budget_as_by_brute_force(group, group_size):
    """In turn, each its best that no other had; or a part of the budget for each of them."""
    q, keys, _ = drawn(group_size)
    budget, own = 61, selector("oracle")
    scores = np.einsum("bhgd,bhsd->bhgs", q.reshape(2, 2, group_size, SIZE), keys) * SIZE**-0.5
    keep = np.zeros(scores.shape, bool)
    for row, head in np.ndindex(2, 2):
        length = LENGTH[row]
        forced = np.r_[: own.sinks, length - own.recent : length]
        ranked = scores[row, head].copy()
        ranked[:, forced] = ranked[:, length:] = -np.inf
        order = np.argsort(-ranked, axis=1, kind="stable")[:, : length - forced.size]
        room = budget - forced.size
        if group == "each":
            for one, best in enumerate(order):
                keep[row, head, one, best[: room // group_size]] = True
        else:
            in_turn = list(dict.fromkeys(order.T.ravel().tolist()))
            keep[row, head, :, in_turn[:room]] = True
        keep[row, head][:, forced] = True
    step = decode("oracle", group_size, sparse.FixedTokens(budget), group=group)
    lse = np.asarray(jax.nn.logsumexp(jnp.where(keep, scores, -jnp.inf), axis=-1))
    np.testing.assert_allclose(step.lse, lse.reshape(2, -1), atol=EXACT)
    read = keep.any(axis=2).sum(axis=2) if group == "union" else step.tokens
    np.testing.assert_array_equal(step.tokens, read)


def test_heads_with_little_to_read_leave_their_room_to_others():
    """One head needs a token, the other many: together no more than the budget."""
    keys = jnp.zeros((1, 1, 64, 4)).at[0, 0, 30, 0].set(60.0)
    q, own = jnp.array([[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]), sparse.SELECTORS["oracle"](recent=4)
    cache = sparse.build(own, keys, jnp.ones((1, 1, 64, 4)), jnp.array([64]))
    full = jax.nn.logsumexp(keys[:, 0] @ q[0].T * 0.5, axis=1)
    for most, wanted in ((64, 0.9), (48, (48 - 1) / 64)):
        budget = sparse.MassTarget(0.9, most_tokens=most)
        step = sparse.decode_step(cache, q, own, budget, group="each")
        assert int(step.tokens[0, 0]) <= most
        assert float(jnp.exp(step.lse - full)[0, 1]) >= wanted - EXACT


@HEADS
def test_quest_keeps_what_the_best_shared_pages_keep(group_size):
    """By its bounds; by the midpoints of the bounds, the control, several heads do not."""
    law = sparse_laws.topics(5, group_size, key_heads=2, queries=6)
    quest, budget, p = sparse.SELECTORS["quest"](), 512, sparse_laws.shares(law)
    keys, values = (jnp.asarray(x)[None] for x in law[1:])
    length = keys.shape[2]
    cache = sparse.build(quest, keys, values, jnp.array([length]))
    full = jax.nn.logsumexp(_scores(law), axis=-1).reshape(len(law.q), -1)
    steps = [sparse.decode_step(cache, q[None], quest, sparse.FixedTokens(budget)) for q in law.q]
    mass = np.exp(np.stack([step.lse[0] for step in steps]) - full)
    room = (budget - quest.least + 15) // 16
    is_open = np.arange(length // 16) < (length - quest.recent) // 16
    pages = p.reshape(*p.shape[:3], -1, 16).sum(axis=-1)
    best = _kept(np.where(is_open, pages.sum(axis=2), -1), pages, room)
    middles = (cache.index.largest + cache.index.smallest)[0] / 2
    q = law.q.reshape(len(law.q), 2, group_size, -1) * law.q.shape[-1] ** -0.5
    middles = jax.nn.softmax(np.einsum("qhgd,hdp->qhgp", q, middles), axis=-1).max(axis=2)
    control = _kept(np.where(is_open, middles, -1), pages, room)
    assert mass.mean() > OF_BEST * best.mean()
    if group_size > 1:
        assert control.mean() < OF_MIDPOINTS * best.mean()


def _scores(law):
    q = law.q.reshape(len(law.q), law.keys.shape[0], -1, law.q.shape[-1])
    return np.einsum("qhgd,hsd->qhgs", q, law.keys) * law.q.shape[-1] ** -0.5


def _kept(votes, pages, room):
    best = np.argsort(-votes, axis=-1)[..., :room]
    return np.take_along_axis(pages, best[:, :, None], axis=-1).sum(axis=-1)
