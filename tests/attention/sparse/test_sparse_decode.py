"""What every system of sparse decoding promises, and what they share: parts, budgets, groups."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import by_night

from toolkit import checking
from toolkit.attention import sparse

BATCH, HEADS, GROUP, CAPACITY, SIZE = 2, 2, 2, 64, 8
LENGTH = (64, 41)
SMALL = {
    "quest": {"page_size": 4},
    "tactic": {"cluster_size": 4, "segment": 16, "refresh_every": 8, "iterations": 3},
    "hata": {"bits": 32},
    "pqcache": {"bits": 3, "iterations": 3},
    "infllm": {"block_size": 8, "kernel": 4, "stride": 2},
}
# In the first tier, H2O stands for the others that evict.
OTHERS = {"infllm", "snapkv", "tova", "knorm", "kvzip"}
EACH = pytest.mark.parametrize("name", by_night(OTHERS, sparse.SELECTORS))
# An index of pages, of clusters, of tokens.
OF_EACH_KIND = pytest.mark.parametrize(
    "name", by_night({*sparse.SELECTORS} - {"quest", "tactic", "hata", "h2o"}, sparse.SELECTORS)
)
MASSES = [name for name, kind in sparse.SELECTORS.items() if kind.estimates_mass]
EXACT = 1e-5


@cache
def arrays(capacity=CAPACITY):
    random = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, capacity, SIZE)] * 2 + [(BATCH, HEADS * GROUP, SIZE)]
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


@cache
def prompt():
    shape = (BATCH, HEADS * GROUP, CAPACITY, SIZE)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


@cache
def selector(name):
    return sparse.SELECTORS[name](sinks=3, recent=5, **SMALL.get(name, {}))


@cache
def built(name, length=LENGTH):
    keys, values, _ = arrays()
    return sparse.build(selector(name), keys, values, jnp.array(length), queries=prompt())


def decode(name, budget, length=LENGTH, **how):
    return sparse.decode_step(built(name, length), arrays()[2], selector(name), budget, **how)


def dense(length=LENGTH, keep=None):
    """Outputs, residuals and weights over all tokens, or over those to keep."""
    keys, values, q = arrays()
    q = q.reshape(BATCH, HEADS, GROUP, SIZE)
    scores = jnp.einsum("bkgd,bksd->bkgs", q, keys) * SIZE**-0.5
    mask = jnp.arange(CAPACITY)[None] < jnp.array(length)[:, None]
    mask = mask[:, None, None] if keep is None else mask[:, None, None] & keep
    scores = jnp.where(mask, scores, -jnp.inf)
    out = jnp.einsum("bkgs,bksd->bkgd", jax.nn.softmax(scores), values)
    shape = BATCH, HEADS * GROUP
    lse = jax.nn.logsumexp(scores, axis=-1)
    return out.reshape(*shape, SIZE), lse.reshape(shape), jax.nn.softmax(scores)


@EACH
def test_all_tokens_give_dense_attention(name):
    step = decode(name, sparse.FixedTokens(CAPACITY), corrects_tail=True)
    out, lse, _ = dense()
    np.testing.assert_allclose(step.out, out, atol=EXACT)
    np.testing.assert_allclose(step.lse, lse, atol=EXACT)


@EACH
def test_a_fixed_budget_is_kept_and_reported(name):
    step = decode(name, sparse.FixedTokens(20), group="sum")
    assert (step.tokens <= 20).all()
    assert (step.bytes_read >= 2 * SIZE * 4 * step.tokens).all()
    assert step.out.shape == (BATCH, HEADS * GROUP, SIZE)


@OF_EACH_KIND
def test_rows_of_unequal_length_do_not_meet(name):
    """A row decodes as it would alone, and what lies beyond its length never shows."""
    keys, values, q = arrays()
    is_token = jnp.arange(CAPACITY)[None, None, :, None] < LENGTH[1]
    keys, values = (jnp.where(is_token, x, jnp.nan)[1:] for x in (keys, values))
    own = jnp.where(is_token, prompt(), jnp.nan)[1:]
    alone = sparse.build(selector(name), keys, values, jnp.array(LENGTH[1:]), queries=own)
    one = sparse.decode_step(alone, q[1:], selector(name), sparse.FixedTokens(20))
    both = decode(name, sparse.FixedTokens(20))
    np.testing.assert_allclose(both.out[1:], one.out, atol=EXACT)
    np.testing.assert_array_equal(both.tokens[1:], one.tokens)


@EACH
def test_tokens_appended_are_as_tokens_built(name):
    """All tokens read again, whatever the index made of the new ones; nothing compiles twice."""
    keys, values, q = arrays()
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(cache, k, v):
        traces.append(None)
        cache = sparse.update(selector(name), cache, k, v)
        return cache, sparse.decode_step(
            cache, q, selector(name), sparse.FixedTokens(CAPACITY), corrects_tail=True
        )

    cache = jax.tree.map(jnp.copy, built(name, (40, 17)))
    rows = jnp.arange(BATCH)
    for _ in range(24):
        cache, decoded = step(cache, keys[rows, :, cache.length], values[rows, :, cache.length])
    assert len(traces) == 1
    out, lse, _ = dense((64, 41))
    np.testing.assert_allclose(decoded.out, out, atol=EXACT)
    np.testing.assert_allclose(decoded.lse, lse, atol=EXACT)


@OF_EACH_KIND
def test_a_row_can_be_freed_and_filled_again(name):
    keys, values, q = arrays()
    cache = built(name).free(jnp.array([1]))
    for token in range(20):
        k, v = keys[:, :, token], values[:, :, token]
        cache = sparse.update(selector(name), jax.tree.map(lambda x: x[1:], cache), k[1:], v[1:])
        cache = jax.tree.map(lambda x: jnp.concatenate([x, x]), cache)
    step = sparse.decode_step(cache, q, selector(name), sparse.FixedTokens(CAPACITY))
    np.testing.assert_allclose(step.out[1], dense((20, 20))[0][1], atol=EXACT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MASSES)
def test_mass_grows_with_every_budget(name):
    for budgets in (
        [sparse.FixedTokens(count) for count in (selector(name).least, CAPACITY)],
        [sparse.MassTarget(share) for share in (0.5, 0.9)],
        [sparse.Threshold(share) for share in (0.1, 0.01)],
    ):
        steps = [decode(name, budget, group="each") for budget in budgets]
        mass = np.array([sparse.recovered_mass(step.lse, dense()[1]) for step in steps])
        assert (np.diff(mass, axis=0) >= -EXACT).all(), budgets
        assert (mass <= 1 + EXACT).all()


def test_what_is_dropped_is_never_touched_and_what_is_read_shows():
    """In values and gradients; a row without tokens gives 0, whatever lies in its slots."""
    random, window = np.random.default_rng(0), sparse.SELECTORS["window"]()
    keys, values, q = (random.standard_normal(shape).astype(np.float32)
                       for shape in ((3, 1, 64, 8), (3, 1, 64, 8), (3, 2, 8)))  # fmt: skip
    keys[:, :, 10:30], values[:, :, 10:30] = np.nan, np.inf
    keys[1, 0, 63, 0] = -np.inf  # of the newest token
    length = jnp.array([64, 64, 0])

    def out(q):
        cache = sparse.build(window, jnp.asarray(keys), jnp.asarray(values), length)
        return sparse.decode_step(cache, q, window, sparse.FixedTokens(24)).out

    found, back = jax.vjp(out, jnp.asarray(q))
    (gradient,) = back(jnp.ones_like(found))
    for x in (found, gradient):
        assert jnp.isfinite(x).all(axis=(1, 2)).tolist() == [True, False, True]
    assert bool(jnp.isnan(found[1]).all())
    assert not found[2].any()


@pytest.mark.parametrize("group", ["each", "union", "sum", "max"])
def test_exact_shares_reach_their_target(group):
    """Of every head, also where heads select together, with no token too many in their order."""
    fewer = jnp.zeros(())
    for share in (0.5, 0.8, 0.95):
        step = decode("oracle", sparse.MassTarget(share), group=group)
        mass = sparse.recovered_mass(step.lse, dense()[1])
        assert (mass >= jnp.maximum(share, fewer) - EXACT).all()
        fewer = mass
        for row, head in np.ndindex(BATCH, HEADS) if group in ("sum", "max") else ():
            p, (start, end) = np.asarray(dense()[2][row, head]), (3, LENGTH[row] - 5)
            ranked = p[:, start:end][:, np.argsort(-getattr(p[:, start:end], group)(axis=0))]
            before = 1 - p[:, start:end].sum(1, keepdims=True) + ranked.cumsum(1) - ranked
            assert step.tokens[row, head] == 8 + (before.min(axis=0) < share).sum()


@pytest.mark.parametrize("group", ["sum", "max"])
def test_groups_select_as_by_brute_force(group):
    budget = 20
    weights = np.asarray(dense()[2])
    keep = np.zeros(weights.shape, bool)
    for row, head in np.ndindex(BATCH, HEADS):
        length = LENGTH[row]
        keep[row, head, :, :3] = keep[row, head, :, length - 5 : length] = True
        p = weights[row, head].copy()
        p[:, :3] = p[:, length - 5 :] = -1
        best = np.argsort(-(p.sum(0) if group == "sum" else p.max(0)), kind="stable")
        keep[row, head, :, best[: budget - 8]] = True
    step = decode("oracle", sparse.FixedTokens(budget), group=group)
    out, lse, _ = dense(keep=jnp.asarray(keep))
    np.testing.assert_allclose(step.out, out, atol=EXACT)
    np.testing.assert_allclose(step.lse, lse, atol=EXACT)


def test_identities_of_a_selection():
    out, lse, p = dense()
    keep = jnp.asarray(np.random.default_rng(1).random((BATCH, HEADS, GROUP, CAPACITY)) < 0.4)
    chosen, chosen_lse, restricted = dense(keep=keep)
    other, other_lse, _ = dense(keep=~keep)
    mass = sparse.recovered_mass(chosen_lse, lse)
    np.testing.assert_allclose(chosen - out, (1 - mass)[..., None] * (chosen - other), atol=EXACT)
    largest = jnp.linalg.norm(arrays()[1], axis=-1).max()
    assert (jnp.linalg.norm(chosen - out, axis=-1) <= 2 * (1 - mass) * largest).all()
    divergence = jnp.where(restricted > 0, restricted * jnp.log(restricted / p), 0).sum(axis=-1)
    np.testing.assert_allclose(divergence.reshape(mass.shape), -jnp.log(mass), atol=EXACT)
    variation = jnp.abs(restricted - p).sum(axis=-1).reshape(mass.shape) / 2
    np.testing.assert_allclose(variation, 1 - mass, atol=EXACT)
    parts = [(chosen, chosen_lse), (other, other_lse)]
    for order in (parts, parts[::-1]):
        whole = sparse.combine(*order)
        np.testing.assert_allclose(whole[0], out, atol=EXACT)
        np.testing.assert_allclose(whole[1], lse, atol=EXACT)


def test_a_system_and_its_budget_in_one_word():
    assert sparse.choose("oracle:mass=0.9") == (
        sparse.SELECTORS["oracle"](),
        sparse.MassTarget(0.9),
    )
    assert sparse.choose("window:10%").budget == sparse.Ratio(0.1)
    for wrong, what in (
        ("nothing:3", "must be one of"),
        ("oracle", "need a budget"),
        ("oracle:0", "at least 1"),
        ("oracle:110%", "at most 1"),
        ("window:mass=0.9", "estimates no mass"),
        ("oracle:0.9", "mass=0.9"),
        ("oracle:1.0", "mass=0.9"),
    ):
        with pytest.raises(ValueError, match=what):
            sparse.choose(wrong)


def test_wrong_calls_are_refused():
    keys, values, q = arrays()
    cache, budget = built("oracle"), sparse.FixedTokens(9)
    for call, what in (
        (lambda: sparse.build(selector("oracle"), keys, values[:1], jnp.array(LENGTH)), "values"),
        (lambda: sparse.decode_step(cache, q[:, :3], selector("oracle"), budget), "multiple"),
        (lambda: sparse.decode_step(cache, q[..., :3], selector("oracle"), budget), "q_t .* shape"),
        (lambda: decode("window", sparse.MassTarget(0.5)), "does not estimate"),
        (lambda: sparse.update(selector("oracle"), cache, keys[:, :, 0], values[:, :, 0]), "take"),
        (lambda: sparse.build(selector("h2o"), keys, values, jnp.array(LENGTH)), "queries must be"),
        (lambda: decode("quest", sparse.AdaKV(20, 2)), "Quest does not give"),
        (lambda: decode("h2o", sparse.AdaKV(20, 3)), "2 key-value heads"),
        (lambda: decode("h2o", sparse.AdaKV(20, 2), group="each"), 'group must be "sum"'),
        (lambda: sparse.PerHead(()), "one number per head"),
        (lambda: sparse.SELECTORS["oracle"](recent=0), "newest"),
    ):
        with checking(), pytest.raises(ValueError, match=what):
            call()


def test_rows_that_int32_cannot_number_are_refused():
    selector, room = sparse.SELECTORS["window"](), 2**29
    rows = jax.ShapeDtypeStruct((2, 2, room, 8), jnp.float32)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    q = jax.ShapeDtypeStruct((2, 2, 8), jnp.float32)

    def step(k, v, length, q):
        return sparse.decode_step(
            sparse.build(selector, k, v, length), q, selector, sparse.FixedTokens(64)
        ).out

    with pytest.raises(ValueError, match=r"room for 2\^31 rows; got 4 x 536870912"):
        jax.eval_shape(step, rows, rows, length, q)
