"""An index grown from any prompt, none at all, keeps what one built of all the tokens keeps."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_laws
from jax import lax
from tiers import by_night

from toolkit._pytrees import register_dataclass
from toolkit.attention import sparse
from toolkit.attention.sparse.decode.hata import HATA
from toolkit.attention.sparse.decode.kmeans import k_means
from toolkit.attention.sparse.decode.pqcache import PQCache

PROMPTS, GROWN, GROUP, SIZE = (0, 1, 33), 383, 4, 32
CAPACITY = PROMPTS[-1] + GROWN
BUDGET = sparse.FixedTokens(96)
LEAST = 0.95  # of the mass of an index built
LEAST_OF_TACTIC = 0.85  # which clusters new tokens among themselves, as published
SETTINGS = {"pqcache": {"sinks": 4, "bits": 4}}


@cache
def law():
    return sparse_laws.topics(
        3, GROUP, key_heads=2, tokens=CAPACITY, queries=16, size=SIZE, sharpness=2.0
    )


@jax.jit
def grown(selector):
    """One row for every prompt, all grown by as many tokens."""
    keys, values = (jnp.broadcast_to(x, (len(PROMPTS), *x.shape)) for x in law()[1:])
    rows = jnp.arange(len(PROMPTS))

    def append(held, _):
        k, v = (x[rows, :, held.length] for x in (keys, values))
        return sparse.update(selector, held, k, v), None

    prompts = sparse.build(selector, keys, values, jnp.array(PROMPTS))
    return lax.scan(append, prompts, None, GROWN)[0]


def built(selector):
    keys, values = (jnp.broadcast_to(x, (len(PROMPTS), *x.shape)) for x in law()[1:])
    return sparse.build(selector, keys, values, jnp.array(PROMPTS) + GROWN)


def masses(selector, held):
    def lse(q, budget_is_all):
        q = jnp.broadcast_to(q, (len(PROMPTS), *q.shape))
        budget = sparse.FixedTokens(CAPACITY) if budget_is_all else BUDGET
        return sparse.decode_step(held, q, selector, budget).lse

    lse = jax.jit(lse, static_argnums=1)
    parts = [[np.asarray(lse(q, whole)) for q in law().q] for whole in (False, True)]
    return np.exp(np.stack(parts[0]) - np.stack(parts[1])).mean(axis=(0, 2))


@pytest.mark.parametrize(
    "name", ["pqcache", *by_night({"hata", "quest", "tactic"}, ["hata", "quest", "tactic"])]
)
def test_an_index_grown_keeps_the_mass_of_one_built(name):
    own = sparse.SELECTORS[name](**SETTINGS.get(name, {}))
    cache = grown(own)
    assert cache.length.tolist() == [prompt + GROWN for prompt in PROMPTS]
    least = LEAST_OF_TACTIC if name == "tactic" else LEAST
    assert (masses(own, cache) >= least * masses(own, built(own))).all()


def test_centroids_that_stay_those_of_a_short_prompt_lose_mass():
    stays = PQCache(sinks=4, bits=4, growth=1e9)
    assert (masses(stays, grown(stays))[:2] < LEAST * masses(stays, built(stays))[:2]).all()


LONG, SMALL = (
    2048,
    {
        "tactic": {"cluster_size": 8},
        "pqcache": {"sinks": 4, "bits": 4, "iterations": 3},
        "infllm": {"block_size": 8, "kernel": 4, "stride": 2, "sinks": 4},
    },
)


@pytest.mark.parametrize("name", by_night({*sparse.SELECTORS} - {"infllm"}, sparse.SELECTORS))
@pytest.mark.parametrize("group", by_night({1, 8}, [1, 4, 8]))
@pytest.mark.slow
def test_a_system_grows_from_any_prompt_and_goes_back(name, group):
    """Ragged rows grown by 2,048 tokens read all of them as dense attention does. Tokens of NaN,
    appended and taken back, leave nothing; before they are, they show."""
    own = sparse.SELECTORS[name](**{"recent": 8} | SMALL.get(name, {}))
    random, rows = np.random.default_rng(0), len(PROMPTS)
    capacity = PROMPTS[-1] + LONG + 2
    shapes = (rows, 1, capacity, 8), (rows, 1, capacity, 8), (rows, group, capacity, 8)
    keys, values, queries = (jnp.asarray(random.standard_normal(x), jnp.float32) for x in shapes)
    prompts = jnp.array(PROMPTS)

    def append(held, _):
        k, v = (x[jnp.arange(rows), :, held.length] for x in (keys, values))
        return sparse.update(own, held, k, v), None

    start = sparse.build(own, keys, values, prompts, queries=queries)
    cache = jax.jit(lambda x: lax.scan(append, x, None, LONG)[0])(start)
    nothing = jnp.full((rows, 1, 8), jnp.nan)
    wrong = sparse.update(own, cache, nothing, nothing)
    back = wrong.restore([cache], jnp.zeros(rows, jnp.int32))

    def step(held, tokens):
        return sparse.decode_step(held, queries[:, :, 0], own, sparse.FixedTokens(tokens))

    for tokens in (96, capacity):
        before, after = step(cache, tokens), step(back, tokens)
        np.testing.assert_array_equal(before.out, after.out)
        assert (before.tokens <= tokens).all()
        assert np.isfinite(before.out).all()
        assert np.isnan(step(wrong, tokens).out).all()
    scores = jnp.einsum("rgd,rsd->rgs", queries[:, :, 0], keys[:, 0]) * 8**-0.5
    is_token = jnp.arange(capacity)[None, None] < (prompts + LONG)[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_token, scores, -jnp.inf), axis=-1)
    np.testing.assert_allclose(before.out, weights @ values[:, 0], atol=1e-5)


@pytest.mark.parametrize("name", by_night({"hata", "tactic"}, ["hata", "pqcache", "tactic"]))
@pytest.mark.slow
def test_tokens_of_nan_that_were_taken_back_leave_no_trace_in_an_index_found_again(name):
    """They stay in the slots behind a row's end, which a refresh of the index passes over."""
    own = sparse.SELECTORS[name](**{"recent": 8} | SMALL.get(name, {}))
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 160, 8)), jnp.float32)
    nothing = jnp.full((1, 1, 8), jnp.nan)

    @partial(jax.jit, static_argnums=1)
    def grown(cache, tokens, is_nan):
        def append(held, _):
            k = jnp.where(is_nan, nothing, keys[:, :, held.length[0]])
            return sparse.update(own, held, k, k), None

        return lax.scan(append, cache, None, tokens)[0]

    before = sparse.build(own, keys, keys, jnp.array([64]))
    wrong = grown(before, 90, True)
    after = grown(wrong.restore([before], jnp.zeros(1, jnp.int32)), 40, False)
    wanted = grown(before, 40, False)
    q, budget = keys[:, :, 0], sparse.FixedTokens(96)
    assert np.isnan(sparse.decode_step(wrong, q, own, budget).out).all()
    found, other = (sparse.decode_step(x, q, own, budget) for x in (after, wanted))
    np.testing.assert_array_equal(found.out, other.out)
    assert np.isfinite(found.out).all()


@register_dataclass
@dataclass(frozen=True)
class ByToken(PQCache):
    """Finds a group's votes token by token, as other systems do."""

    def together(self, *arguments):
        return None


@pytest.mark.parametrize("group", ["sum", "max"])
def test_votes_per_number_are_those_of_every_token(group):
    """Also after growth; the control: with other counts the heads' shares are others."""
    few = {"sinks": 4, "bits": 3}
    cache = grown(PQCache(**few))
    sizes = np.asarray(cache.index.counts).sum(axis=(2, 3))
    np.testing.assert_array_equal(sizes, np.repeat([[x + GROWN - 4] for x in PROMPTS], 2, axis=1))
    q = jnp.broadcast_to(law().q[0], (len(PROMPTS), *law().q[0].shape))

    def read(selector, cache):
        return sparse.decode_step(cache, q, selector, BUDGET, group=group)

    ours, by_token = read(PQCache(**few), cache), read(ByToken(**few), cache)
    np.testing.assert_allclose(ours.lse, by_token.lse, atol=1e-5)
    np.testing.assert_allclose(ours.out, by_token.out, atol=1e-5)
    assert (ours.bytes_read == by_token.bytes_read).all()
    alike = jnp.ones_like(cache.index.counts)
    wrong = read(PQCache(**few), replace(cache, index=cache.index._replace(counts=alike)))
    assert np.abs(wrong.lse - by_token.lse).max() > 1e-3


@pytest.mark.parametrize("name", by_night({"hata", "tactic"}, ["hata", "pqcache", "tactic"]))
def test_a_step_asks_for_no_memory_of_a_whole_index(name):
    """Each step would wait for the pages of that memory: half of the keys' 4 MiB at most."""
    selector = sparse.SELECTORS[name]()
    rows = jax.ShapeDtypeStruct((1, 1, 2**15, 32), jnp.float32)
    cache = jax.eval_shape(lambda x: sparse.build(selector, x, x, jnp.zeros(1, jnp.int32)), rows)
    token = jax.ShapeDtypeStruct((1, 1, 32), jnp.float32)
    step = jax.jit(lambda cache, x: sparse.update(selector, cache, x, x), donate_argnums=0)
    memory = step.lower(cache, token).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**21


@pytest.mark.slow
def test_blocks_of_rows_give_what_all_rows_give():
    """2,500 rows, three blocks that overlap: k-means by hand, and hashes by hand."""
    rows = np.random.default_rng(0).standard_normal((2500, 8)).astype(np.float32)
    is_row = (np.arange(2500) >= 30) & (np.arange(2500) < 2400)
    centroids, own = k_means(jnp.asarray(rows), 30, jnp.int32(2400), 5, 2, 5, parts=2)
    for part, x in enumerate((rows[:, :4], rows[:, 4:])):
        real = np.flatnonzero(is_row)
        wanted = x[real[np.floor((2 * np.arange(5) + 1) / 10 * len(real)).astype(int)]]
        for _ in range(2):
            nearest = np.square(x[:, None] - wanted[None]).sum(axis=2).argmin(axis=1)
            wanted = np.stack([x[is_row & (nearest == i)].mean(axis=0) for i in range(5)])
        np.testing.assert_allclose(centroids[part], wanted, atol=1e-5)
        nearest = np.square(x[:, None] - wanted[None]).sum(axis=2).argmin(axis=1)
        assert (np.asarray(own[part]) == nearest).mean() > 0.999
    hata, x = HATA(bits=32), jnp.asarray(rows)[None, None]
    index = sparse.build(hata, x, x, jnp.array([2400])).index
    np.testing.assert_allclose(index.centre[0, 0], rows[:2400].mean(axis=0), atol=1e-5)
    centred = rows[:2400] - np.asarray(index.centre[0, 0])
    assert (index.words[0, 0][:, :2400] == hata.hashes(jnp.asarray(centred))).all()
    norms = np.asarray(index.norms[0, 0].view(jnp.bfloat16).astype(np.float32))[:2400]
    np.testing.assert_allclose(norms, np.linalg.norm(centred, axis=1), rtol=2**-8)
