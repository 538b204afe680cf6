"""Systems that evict keep the tokens that their public code keeps, for good, and NaN with the rest.

The sets of tokens below are what kvpress (8bb29b9: SnapKVPress, TOVAPress, KnormPress, AdaKVPress,
StreamingLLMPress) and H2O's release (ac75c2a: H2OKVCache_LayerWise) keep of the same arrays.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tiers import by_night

from toolkit import checking
from toolkit.attention import sparse

EVICTORS = ("snapkv", "h2o", "tova", "knorm", "kvzip")
HEADS, KEY_HEADS, TIME, SIZE, KEPT = 8, 2, 96, 16, 24
SETTINGS = {"snapkv": {"recent": 8}, "knorm": {"sinks": 0, "recent": 1}}


def tokens(words):
    return [int(word) for word in words.split()]


PUBLISHED = {
    "snapkv": (
        [2, 5, 16, 17, 28, 29, 30, 58, 60, *range(71, 78), *range(88, 96)],
        [41, 42, 43, 50, 52, 53, 54, *range(62, 66), *range(75, 80), *range(88, 96)],
    ),
    "tova": (tokens("0 2 3 8 12 16 18 24 29 30 41 44 45 46 58 65 72 73 76 81 84 91 93 95"),) * 2,
    # The newest token is always read here; the press drops it, and keeps 63, and 9.
    "knorm": (
        tokens("5 10 18 25 27 31 33 35 36 41 49 51 54 57 61 68 69 81 87 88 90 92 94 95"),
        tokens("6 15 28 29 31 38 42 44 53 57 58 59 66 68 69 72 75 76 84 86 88 92 93 95"),
    ),
    "window": ([0, 1, 2, 3, *range(76, 96)],) * 2,
}
SHARED_OUT = (
    [2, 5, 28, 29, 30, 58, 60, *range(71, 78), *range(88, 96)],
    [4, 41, 42, 43, *range(50, 55), *range(62, 66), *range(75, 80), *range(88, 96)],
)
OF_H2O = (
    [0, 1, 2, 4, 6, 11, 15, 26, *range(72, 80)],
    [0, 1, 2, 3, 4, 5, 8, 14, *range(72, 80)],
)
EXACT = 1e-5


@cache
def prompt():
    random = np.random.default_rng(32)
    q = random.standard_normal((HEADS, TIME, SIZE)).astype(np.float32) * 2
    return q, random.standard_normal((KEY_HEADS, TIME, SIZE)).astype(np.float32)


def kept(selector, budget, q=None, keys=None):
    """The tokens of every key head: with one-hot values an output is its weights."""
    q, keys = prompt() if q is None else (q, keys)
    one_hot = jnp.broadcast_to(jnp.eye(keys.shape[1]), (1, *keys.shape[:2], keys.shape[1]))
    length, queries = jnp.array([keys.shape[1]]), jnp.asarray(q)[None]
    cache = sparse.build(selector, jnp.asarray(keys)[None], one_hot, length, queries=queries)
    out = sparse.decode_step(cache, jnp.zeros((1, q.shape[0], SIZE)), selector, budget).out[0]
    return [
        np.flatnonzero(weights[0]).tolist()
        for weights in np.asarray(out).reshape(keys.shape[0], -1, keys.shape[1])
    ]


def weights_of(q, keys):
    """The causal softmax of every query head [heads, time, time]."""
    keys = np.repeat(keys, q.shape[0] // keys.shape[0], axis=0)
    x = q @ keys.swapaxes(1, 2) * SIZE**-0.5
    x = np.where(np.tril(np.ones(x.shape[1:], bool)), x, -np.inf)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_keeps_the_published_tokens(name):
    own = sparse.SELECTORS[name](**SETTINGS.get(name, {}))
    assert kept(own, sparse.FixedTokens(KEPT)) == list(PUBLISHED[name])


def test_heads_share_out_a_budget_as_published():
    own = sparse.SELECTORS["snapkv"](recent=8)
    assert kept(own, sparse.AdaKV(KEPT, KEY_HEADS, floor=0.0)) == list(SHARED_OUT)
    wider = [len(tokens) for tokens in kept(own, sparse.AdaKV(KEPT, KEY_HEADS, floor=0.5))]
    assert sum(wider) <= KEY_HEADS * KEPT
    assert min(wider) > len(SHARED_OUT[0])
    assert [len(x) for x in kept(own, sparse.AdaKV(KEPT, KEY_HEADS, floor=1.0))] == [KEPT, KEPT]


def test_a_repetition_keeps_what_some_query_looks_at():
    q, keys = prompt()
    x = np.einsum("hgqd,hkd->hgqk", q.reshape(KEY_HEADS, -1, TIME, SIZE), keys) * SIZE**-0.5
    most = np.asarray(jax.nn.softmax(x, axis=-1)).max(axis=(1, 2))
    most[:, :4] = most[:, -16:] = np.inf
    own = sparse.SELECTORS["kvzip"]()
    wanted = np.sort(np.argsort(-most, axis=1, kind="stable")[:, :KEPT], axis=1)
    assert kept(own, sparse.FixedTokens(KEPT)) == wanted.tolist()


def test_a_streaming_head_reads_a_window_and_a_retrieving_one_everything():
    gates = np.array([[0.9, 0.2], [0.1, 0.8]])
    split = sparse.split_heads(gates, 0.5, streaming_tokens=20, capacity=TIME)
    assert [budget.tokens for budget in split] == [(TIME, 20), (20, TIME)]
    window = sparse.SELECTORS["window"]()
    assert kept(window, split[0]) == [[*range(TIME)], [0, 1, 2, 3, *range(80, TIME)]]
    exact, streamed = jnp.ones((3, 3, 4)), jnp.ones((3, 3, 4))
    gates = sparse.head_gates(exact, streamed.at[:, 1].set(0.9).at[:, 2].set(-1.0), penalty=0.02)
    np.testing.assert_allclose(gates, [0, 0, 1 - 0.02 / 8], atol=EXACT)  # argmin of the loss
    best = min(np.linspace(0, 1, 1001), key=lambda a: (1 - a) ** 2 * 4 + 0.02 * a)
    np.testing.assert_allclose(gates[2], best, atol=1e-3)


def decoded(own, q, keys, first, budget, *, observes=True):
    """What each step after a prompt read, and the last cache."""
    q, keys = (jnp.asarray(x)[None] for x in (q, keys))
    cache = sparse.build(own, keys, keys, jnp.array([first]), queries=q)

    def step(cache, token):
        k, v, own_q = (x[:, :, token] for x in (keys, keys, q))
        cache = sparse.update(own, cache, k, v)
        read = sparse.decode_step(cache, own_q, own, budget)
        return sparse.observe(own, cache, read) if observes else cache, read.log_weights[0]

    cache, weights = lax.scan(step, cache, jnp.arange(first, keys.shape[2]))
    return np.asarray(weights), cache


@cache
def long_prompt():
    random = np.random.default_rng(33)
    q = 2 * random.standard_normal((2, 80, SIZE))
    return q.astype(np.float32), random.standard_normal((2, 80, SIZE)).astype(np.float32)


def test_heavy_hitters_are_those_of_the_release_after_many_steps():
    own, budget = sparse.SELECTORS["h2o"](recent=1), sparse.FixedTokens(16)
    weights, _ = decoded(own, *long_prompt(), 64, budget)
    assert [np.flatnonzero(x > -np.inf).tolist() for x in weights[-1]] == list(OF_H2O)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_a_cache_that_shrinks_holds_what_is_read(name):
    """Rows are deleted for real, and scores are sums or the last weights of the rows that stay."""
    (q, keys), first, budget = long_prompt(), 64, 16
    q = np.stack([q[0], q[1], -q[0], q[1, ::-1]])  # two query heads per key head
    own = sparse.SELECTORS[name](recent=1)
    found, _ = decoded(own, q, keys, first, sparse.FixedTokens(budget))
    p = weights_of(q[:, :first], keys[:, :first]).reshape(2, 2, first, first)
    scores = p.sum(axis=(1, 2)) if name == "h2o" else np.stack([p[:, :, -1].mean(axis=(0, 1))] * 2)
    rows = [np.arange(first)] * 2
    scores = list(scores)
    for step, token in enumerate(range(first, keys.shape[1])):
        shares = []
        for head in range(2):
            recent = budget // 2 if name == "h2o" else 1
            is_old = rows[head] <= token - recent
            best = np.argsort(-scores[head][is_old], kind="stable")[: budget - recent]
            stay = np.sort(np.r_[best, np.flatnonzero(~is_old)])
            rows[head] = np.r_[rows[head][stay], token]
            scores[head] = np.r_[scores[head][stay], 0]
            x = q[2 * head : 2 * head + 2, token] @ keys[head, rows[head]].T * SIZE**-0.5
            shares.append(np.asarray(jax.nn.softmax(x, axis=-1)))
            own_weights = found[step, 2 * head : 2 * head + 2]
            read = np.flatnonzero(own_weights[0] > -np.inf)
            assert read.tolist() == rows[head].tolist(), (name, token, head)
            np.testing.assert_allclose(np.exp(own_weights[:, read]), shares[-1], atol=EXACT)
        for head in range(2):
            if name == "h2o":
                scores[head] = scores[head] + shares[head].sum(axis=0)
            else:  # all heads of the layer keep the same rows
                scores[head] = np.concatenate(shares).mean(axis=0)
    if name == "tova":  # the control: without the weights of the steps others are read
        blind, _ = decoded(own, q, keys, first, sparse.FixedTokens(budget), observes=False)
        assert ((blind[-1] > -np.inf) != (found[-1] > -np.inf)).any()


@pytest.mark.parametrize("name", by_night({"snapkv", "knorm", "kvzip"}, EVICTORS))
@pytest.mark.parametrize("length", [0, 1, 33])
def test_short_prompts_grow_and_what_was_dropped_may_be_nan(name, length):
    (q, keys), own = long_prompt(), sparse.SELECTORS[name](sinks=1, recent=3)
    keys, q = jnp.asarray(keys)[None], jnp.asarray(q)[None]
    lengths, budget = jnp.array([length, 40]), sparse.FixedTokens(12)
    rows, queries = (jnp.concatenate([x, x[:, :, ::-1]]) for x in (keys, q))
    cache = sparse.build(own, rows, rows, lengths, queries=queries)
    for _ in range(8):
        here = jnp.arange(2), slice(None), cache.length
        cache = sparse.update(own, cache, rows[here], rows[here])
        step = sparse.decode_step(cache, queries[here], own, budget)
        before, cache = cache, sparse.observe(own, cache, step)
    assert step.tokens.tolist() == [[min(12, length + 8)] * 2, [12] * 2]
    marked = jnp.broadcast_to(jnp.eye(80), (2, 2, 80, 80))
    seen = sparse.decode_step(
        sparse.SparseCache(cache.keys, marked, cache.key_sum, marked.sum(2), cache.index,
                           cache.length), queries[here], own, budget
    )  # fmt: skip
    is_read = (seen.out.reshape(2, 2, -1, 80) > 0).any(axis=2)[..., None]
    spoiled = [jnp.where(is_read, x, jnp.nan) for x in (cache.keys, cache.values)]
    again = sparse.decode_step(
        sparse.SparseCache(*spoiled, cache.key_sum, cache.value_sum, cache.index, cache.length),
        queries[here], own, budget,
    )  # fmt: skip
    assert jnp.isfinite(again.out).all()
    back = cache.restore([before], jnp.zeros(2, jnp.int32))  # as if the step had not been observed
    np.testing.assert_array_equal(
        sparse.decode_step(back, queries[here], own, budget).out, step.out
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVICTORS, "infllm"])
@pytest.mark.parametrize("group", by_night({4, 8}, [1, 4, 8]))
def test_two_thousand_tokens_more_read_no_more_than_the_budget(name, group):
    """From prompts of 0, 1 and 33 tokens; what is read is a softmax, and nothing is NaN."""
    random, prompts, grown = np.random.default_rng(36), (0, 1, 33), 2048
    shape = (3, 2, prompts[-1] + grown, SIZE)
    keys = jnp.asarray(random.standard_normal(shape), jnp.float32)
    queries = jnp.repeat(keys[:, :, ::-1], group, axis=1)
    small = {"infllm": {"sinks": 8, "block_size": 8, "kernel": 8, "stride": 4}}.get(name, {})
    own, budget = sparse.SELECTORS[name](**({"recent": 8} | small)), sparse.FixedTokens(48)
    cache = sparse.build(own, keys, keys, jnp.array(prompts), queries=queries)

    def step(cache, _):
        here = jnp.arange(3), slice(None), cache.length
        cache = sparse.update(own, cache, keys[here], keys[here])
        read = sparse.decode_step(cache, queries[here], own, budget)
        cache = sparse.observe(own, cache, read)
        sums = 1.0 if read.log_weights is None else jnp.exp(read.log_weights).sum(axis=-1)
        return cache, (read.tokens, jnp.isfinite(read.out).all(), jnp.max(jnp.abs(sums - 1)))

    cache, (tokens, is_finite, off) = lax.scan(step, cache, None, grown)
    assert cache.length.tolist() == [prompt + grown for prompt in prompts]
    wanted = np.minimum(np.array(prompts)[None] + np.arange(1, grown + 1)[:, None], 48)
    np.testing.assert_array_equal(tokens, np.repeat(wanted[:, :, None], 2, axis=2))
    assert is_finite.all()
    assert (off < EXACT).all()


def test_what_only_evicting_needs_is_refused():
    keys = jnp.ones((1, 2, 8, 4))
    with pytest.raises(ValueError, match=r"queries must be those of the prompt, by which SnapKV"):
        sparse.build(sparse.SELECTORS["snapkv"](), keys, keys, jnp.array([8]))
    with pytest.raises(ValueError, match="kernel must be odd; got 4"):
        sparse.SELECTORS["snapkv"](kernel=4)
    with pytest.raises(ValueError, match="streaming_share must be from 0 to 1"):
        sparse.split_heads(np.ones((1, 2)), 1.5, streaming_tokens=8, capacity=16)
    with checking(), pytest.raises(ValueError, match="floor must be from 0 to 1"):
        sparse.AdaKV(8, 2, floor=2.0)
