"""What is true of one system: its bound, its law, its codes, its fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from toolkit.attention import sparse
from toolkit.attention.sparse.decode import tactic

TOKENS, SIZE = 96, 16


def rows(count=TOKENS, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, SIZE)), jnp.float32)


def system(name, **settings):
    return sparse.SELECTORS[name](sinks=0, recent=4, **settings)


def test_a_page_bounds_the_scores_of_its_keys():
    quest, keys, q = system("quest", page_size=8), rows(), rows(5, 1)
    bound = quest.scores(quest.build(keys, keys, TOKENS), keys, q, TOKENS)
    exact = (q @ keys.T).reshape(5, -1, 8)
    assert (np.asarray(bound)[..., None] >= np.asarray(exact) - 1e-5).all()
    order = np.random.default_rng(2).permuted(np.arange(TOKENS).reshape(-1, 8), axis=1).ravel()
    moved = quest.scores(quest.build(keys[order], keys, TOKENS), keys, q, TOKENS)
    np.testing.assert_array_equal(moved, bound)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quest", {"page_size": 8}),
        ("hata", {"bits": 32, "is_centred": False}),
        ("infllm", {"block_size": 8, "kernel": 4, "stride": 2}),
        ("knorm", {}),
        ("tactic", {"cluster_size": 4, "segment": 16, "refresh_every": 16, "iterations": 4}),
    ],
)
def test_an_index_grown_is_an_index_built(name, settings):
    own, keys = system(name, **settings), rows()
    build, step = jax.jit(own.build), jax.jit(own.update)
    grown = build(keys, keys, jnp.int32(64))
    for token in range(64, TOKENS):
        grown = step(grown, keys[token], keys[token], token)
        if own.is_due(grown, token + 1) is not None and own.is_due(grown, token + 1):
            grown = own.refresh(grown, keys, keys, jnp.int32(token + 1))
    built = build(keys, keys, jnp.int32(TOKENS))
    for one, other in zip(jax.tree.leaves(grown), jax.tree.leaves(built), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_hashes_follow_the_law_of_random_projections():
    bits, q, keys = 1024, rows(1, 1), rows()
    hata = system("hata", bits=bits, is_centred=False, uses_norms=False)
    alike = hata.scores(hata.build(keys, keys, TOKENS), keys, q, TOKENS)[0]
    cosine = keys @ q[0] / jnp.linalg.norm(keys, axis=1) / jnp.linalg.norm(q[0])
    off = np.asarray(alike - (1 - 2 * jnp.arccos(cosine) / jnp.pi))
    assert np.abs(off).max() < 5 / np.sqrt(bits)
    assert np.sqrt((off**2).mean()) < 1 / np.sqrt(bits)
    signs = np.sign(np.asarray(keys @ jax.random.normal(jax.random.key(0), (SIZE, bits))))
    of_q = np.sign(np.asarray(q @ jax.random.normal(jax.random.key(0), (SIZE, bits))))
    np.testing.assert_allclose(alike, (signs * of_q).mean(axis=1), atol=1e-6)


def test_means_of_windows_vote_for_the_blocks_that_they_overlap():
    own, keys, q, length = (
        system("infllm", block_size=8, kernel=4, stride=2),
        rows(),
        rows(3, 1),
        61,
    )
    found = own.scores(own.build(keys, keys, length), keys, q, length)
    first = np.arange(0, length - 3, 2)  # of the windows that are complete
    means = np.stack([keys[i : i + 4].mean(axis=0) for i in first])
    votes = np.asarray(jax.nn.softmax(q @ means.T, axis=-1)).sum(axis=0)
    for block in range(8):
        overlap = (first + 4 > 8 * block) & (first < 8 * block + 8)
        np.testing.assert_allclose(found[:, block], votes[overlap].max(initial=0), rtol=1e-5)


@pytest.mark.nightly
def test_quantised_scores_are_those_of_the_centroids():
    pq, keys, q = system("pqcache", bits=4, parts=4, iterations=5), rows(), rows(3, 1)
    index = pq.build(keys, keys, jnp.int32(64))
    for token in (64, 65):
        index = pq.update(index, keys[token], keys[token], token)
    codes = np.asarray(index.codes)
    parts = np.stack([codes[0] >> 4, codes[0] & 15, codes[1] >> 4, codes[1] & 15])
    centroids, held = np.asarray(index.centroids), np.asarray(keys).reshape(TOKENS, 4, -1)
    nearest = [
        ((held[:66, part, None] - centroids[part]) ** 2).sum(-1).argmin(1) for part in range(4)
    ]
    np.testing.assert_array_equal(parts[:, :66], nearest)
    rebuilt = np.concatenate([centroids[part][parts[part]] for part in range(4)], axis=1)
    np.testing.assert_allclose(pq.scores(index, keys, q, 66), np.asarray(q) @ rebuilt.T, atol=1e-5)
    error = [
        np.square(keys - reconstruct(system("pqcache", bits=bits), keys)).mean()
        for bits in (1, 3, 5)
    ]
    assert error[0] > error[1] > error[2]


def reconstruct(pq, keys):
    index = pq.build(keys, keys, TOKENS)
    one = pq.scores(index, keys, jnp.eye(SIZE), TOKENS)
    return one.T


def test_the_fit_finds_what_is_so():
    for a, b in ((3.0, 0.5), (40.0, 0.0)):
        found = tactic.fit(*map(jnp.float32, (12, a / 12 + b, 70, a / 70 + b)))
        np.testing.assert_allclose(found, (a, b), rtol=1e-4, atol=1e-5)
    n = np.arange(1, 2001)
    np.testing.assert_allclose(tactic.harmonic(jnp.float32(2000)), (1 / n).sum(), rtol=1e-6)
    assert float(tactic.harmonic(jnp.float32(0))) == 0


def attention(selector, budget, keys, values, q, **how):
    length = jnp.array([keys.shape[0]])
    cache = sparse.build(selector, keys[None, None], values[None, None], length)
    return sparse.decode_step(cache, q[None], selector, budget, **how)


def exact(keys, values, q):
    scores = q @ keys.T * SIZE**-0.5
    return jax.nn.softmax(scores) @ values, jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.nightly
def test_with_all_of_the_list_exact_the_mass_is_reached():
    keys, q = rows(), 3 * rows(2, 1)
    settings = {"cluster_size": 2, "segment": 32, "refresh_every": 8, "exact_head": 1.0}
    lse = exact(keys, keys, q)[1]
    for share in (0.5, 0.8, 0.95):
        step = attention(
            system("tactic", **settings), sparse.MassTarget(share), keys, keys, q, group="each"
        )
        assert (sparse.recovered_mass(step.lse[0], lse) >= share - 1e-5).all()


def test_clusters_of_one_token_rank_as_the_oracle_and_their_tail_is_exact():
    keys, values, q = rows(), rows(seed=3), rows(2, 1)
    single = system("tactic", cluster_size=1, segment=32, refresh_every=8, iterations=2)
    budget = sparse.FixedTokens(24)
    ours = attention(single, budget, keys, values, q, group="each", corrects_tail=True)
    np.testing.assert_allclose(ours.out[0], exact(keys, values, q)[0], atol=1e-5)
    plain = attention(single, budget, keys, values, q, group="each")
    best = attention(system("oracle"), budget, keys, values, q, group="each")
    # The oracle ranks the few tokens that are too new for a cluster, too.
    assert (sparse.recovered_mass(plain.lse, best.lse) <= 1 + 1e-5).all()
    assert (sparse.recovered_mass(plain.lse, best.lse) > 0.85).all()


def test_learned_hashes_find_more_of_the_heaviest_keys_than_random_ones():
    """Where keys differ most in channels that queries hardly read."""
    prompts, time, heads, size, bits = 4, 128, 2, 32, 64

    def drawn(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        q = 3 * jax.random.normal(keys[0], (prompts, time, heads, size))
        k = jax.random.normal(keys[1], (prompts, time, 1, size))
        return q.at[..., 8:].multiply(0.05), k.at[..., 8:].multiply(3.0)

    learned, random = sparse.train_hash(*drawn(0), bits=bits)[0], None
    q, k = (x[:, :, 0] for x in drawn(1))

    def found(weights):
        own = system("hata", bits=bits, uses_norms=False, weights=weights)

        def of_prompt(q, k):
            alike = own.scores(own.build(k, k, jnp.int32(time)), k, q[::4], time)
            heaviest = lax.top_k(q[::4] @ k.T, 12)[1]
            nearest = lax.top_k(alike, 12)[1]
            return (heaviest[:, :, None] == nearest[:, None]).any(axis=2).mean()

        return float(jax.vmap(of_prompt)(q, k).mean())

    assert found(learned) > 1.05 * found(random)
