"""Sparse prefill: exact over what is kept, dense when all is kept, and each selector's own law."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import softmax_attention
from toolkit.attention.sparse.prefill import (
    Pattern,
    Tiles,
    antidiagonal_tiles,
    attend_tiles,
    calibrate_sale,
    flexible_tiles,
    pattern_tiles,
    patterns_by_head,
    sale_tiles,
    search_patterns,
    tile_masses,
    top_tiles,
)
from toolkit.attention.sparse.prefill.adaspa import recall
from toolkit.attention.sparse.prefill.sale import rounded
from toolkit.attention.sparse.prefill.tiles import token_mask

TIME, HEADS, GROUPS, SIZE = 61, 4, 2, 8
CAUSAL = np.tril(np.ones((1, 1, TIME, TIME), bool))
SMALL: dict[str, Any] = {"query_block": 8, "key_block": 4, "sink": 4, "local": 8}
SELECTORS = {
    "sale": lambda q, k: sale_tiles(q, k, threshold=1.0, **SMALL),
    "vertical-slash": lambda q, k: pattern_tiles(
        q, k, Pattern("vertical-slash", 33, 5), block=8, last_queries=16
    ),
    "a-shape": lambda q, k: pattern_tiles(q, k, Pattern("a-shape", 3, 9), block=8),
    "pooled": lambda q, k: pattern_tiles(q, k, Pattern("pooled", 3), block=8),
    "antidiagonal": lambda q, k: antidiagonal_tiles(q, k, 0.8, block=8, stride=4),
    "flexible": lambda q, k: flexible_tiles(q, k, 0.8, threshold=0.2, block=8),
}


def draw(time=TIME, batch=2, key_time=None, sharpness=2.0):
    generator = np.random.default_rng(time)
    shapes = ((time, HEADS), (key_time or time, GROUPS), (key_time or time, GROUPS))
    q, k, v = (jnp.asarray(generator.standard_normal((batch, *s, SIZE)), "float32") for s in shapes)
    return sharpness * q, k, v


def dense(q, k, v, mask: Any = True):
    """Attention and LSE by the equation, over the pairs of a mask [batch, heads, time, time]."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    x = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k) * SIZE**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(x, axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", jnp.exp(x - lse[..., None]), v)
    return out, lse.swapaxes(1, 2)


@pytest.mark.parametrize("name", SELECTORS)
def test_attention_to_tiles_is_attention_under_their_mask(name):
    q, k, v = draw()
    tiles = SELECTORS[name](q, k)
    mask = token_mask(tiles, TIME, TIME, is_causal=True)
    out, lse = attend_tiles(q, k, v, tiles)
    wanted, wanted_lse = dense(q, k, v, mask)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)
    full, full_lse = dense(q, k, v, CAUSAL)
    # I1: what was dropped explains the error; its mass is one minus that of what was kept.
    mass = np.exp(lse - full_lse)[..., None]
    rest: Any = CAUSAL & ~mask
    has_rest = rest.any(-1).swapaxes(1, 2)[..., None]
    dropped = jnp.where(has_rest, dense(q, k, v, rest | ~has_rest.swapaxes(1, 2))[0], out)
    np.testing.assert_allclose(out - full, (1 - mass) * (out - dropped), atol=5e-6)
    assert 0.1 < float(mask.mean() / CAUSAL.mean()) < 0.95


def test_everything_kept_is_dense_and_nothing_later_leaks():
    q, k, v = draw()
    everything = sale_tiles(q, k, threshold=0.0, **SMALL)
    wanted, _ = softmax_attention(q, k, v)
    np.testing.assert_allclose(attend_tiles(q, k, v, everything)[0], wanted, atol=2e-6)
    future = 40
    for select in SELECTORS.values():
        tiles = select(q, k)
        later = [x.at[:, future:].add(3.0) for x in (q, k, v)]
        out = attend_tiles(later[0], later[1], later[2], tiles)[0]
        assert (out[:, :future] == attend_tiles(q, k, v, tiles)[0][:, :future]).all()


def test_nothing_kept_gives_zero_and_another_selection_compiles_nothing():
    q, k, v = draw()
    tiles = SELECTORS["sale"](q, k)
    none = Tiles(jnp.zeros_like(tiles.kept), None, tiles.query_block, tiles.key_block)
    traced: Any = jax.jit(attend_tiles)
    traced(q, k, v, tiles)
    out, lse = traced(q, k, v, none)
    assert traced._cache_size() == 1
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


def test_sale_keeps_sink_and_local_and_less_the_higher_its_threshold():
    q, k, _ = draw(sharpness=4.0)
    maps = [sale_tiles(q, k, threshold=tau, **SMALL).kept for tau in (0.0, 0.5, 2.0, 9.0, 1e9)]
    for more, fewer in itertools.pairwise(maps):
        assert (more >= fewer).all()
        assert more.sum() > fewer.sum()
    row, column = np.indices(maps[0].shape[2:])
    start = np.maximum(8 * row - 8, 0) // 4
    last = np.minimum(8 * row + 7, TIME - 1) // 4
    assert (np.asarray(maps[-1]) == ((column == 0) | ((column >= start) & (column <= last)))).all()


def test_sale_rounds_little_away_and_shifts_of_keys_change_nothing():
    q, k, _ = draw(time=128, sharpness=4.0)
    exact = sale_tiles(q, k, threshold=1.0, is_rounded=False, **SMALL).kept
    estimated = sale_tiles(q, k, threshold=1.0, **SMALL).kept
    assert float((exact == estimated).mean()) > 0.97
    outlier = jnp.zeros((1, 1, 1, SIZE)).at[..., 2].set(30.0)
    moved = sale_tiles(q, k + outlier, threshold=1.0, is_rounded=False, **SMALL).kept
    assert float((exact == moved).mean()) > 0.999
    x = draw()[0][0, :, 0]
    step = jnp.abs(x).max(axis=1, keepdims=True) / 7
    assert (jnp.abs(rounded(x) - x) <= step / 2 + 1e-6).all()
    assert np.unique(np.round(rounded(x) / step)).tolist() == list(range(-7, 8))


def test_calibration_gives_each_head_the_loss_it_bears():
    q, k, v = draw(sharpness=4.0)
    scale = jnp.array([0.2, 1.0, 1.0, 3.0])[None, None, :, None]
    tau = calibrate_sale(scale * q, k, v, error=0.1, **SMALL)
    out = attend_tiles(scale * q, k, v, sale_tiles(scale * q, k, threshold=tau, **SMALL))[0]
    error = jnp.abs(out - softmax_attention(scale * q, k, v)[0]).sum(axis=(0, 1, 3)) / (2 * TIME)
    assert (error <= 0.1).all()
    assert (calibrate_sale(q, k, v, error=1e9, **SMALL) == np.float32(0.008)).all()
    assert (calibrate_sale(q, k, v, error=1e-9, start=0.5, least=0.2, **SMALL) == 0).all()


def test_vertical_slash_finds_the_column_and_the_diagonal_that_are_there():
    time, block, column, distance = 256, 16, 77, 150
    index = np.arange(time)
    # Keys and queries of one hot place each: t looks at t - distance, and all look at a column.
    k = np.zeros((time, time + 1), np.float32)
    k[index, index] = 12
    k[column] = 0
    k[column, -1] = 12
    q = np.zeros_like(k)
    q[index, np.maximum(index - distance, 0)] = 12
    q[:, -1] = 12
    q, k = (jnp.asarray(x)[None, :, None] for x in (q, k))
    tiles = pattern_tiles(q, k, Pattern("vertical-slash", 31, 101), block=block, last_queries=32)
    assert tiles.columns is not None
    assert column in tiles.columns[0, 0]
    crossed = np.zeros(tiles.kept.shape[2:], bool)
    for d in (*range(100), distance):
        t = index[index >= d]
        crossed[t // block, (t - d) // block] = True
    assert (tiles.kept[0, 0] == crossed).all()


def test_the_search_names_the_pattern_that_hurts_least():
    q, k, v = draw(time=64)
    patterns = Pattern("a-shape", 1, 1), Pattern("a-shape", 64, 64), Pattern("pooled", 1)
    best, shares = search_patterns(q, k, v, patterns, block=8)
    assert best.tolist() == [1] * HEADS
    assert (shares[1] == 0).all()
    mixed = patterns_by_head(q, k, patterns, jnp.array([0, 1, 2, 1]), block=8)
    for head, choice in enumerate((0, 1, 2, 1)):
        alone = pattern_tiles(q, k, patterns[choice], block=8)
        one, other = (token_mask(x, 64, 64, is_causal=True)[:, head] for x in (mixed, alone))
        assert (one == other).all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_tile_masses_are_the_sums_of_softmax(is_causal):
    q, k, v = draw(key_time=None if is_causal else 40)
    mask = CAUSAL if is_causal else True
    _, lse = dense(q, k, v, mask)
    masses = tile_masses(q, k, lse, query_block=8, key_block=4, is_causal=is_causal)
    x = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) * SIZE**-0.5
    p = np.where(mask, np.exp(x - lse.swapaxes(1, 2)[..., None]), 0)
    p = np.pad(p, [(0, 0)] * 2 + [(0, -p.shape[2] % 8), (0, -p.shape[3] % 4)])
    wanted = p.reshape(2, HEADS, p.shape[2] // 8, 8, p.shape[3] // 4, 4).sum(axis=(3, 5))
    np.testing.assert_allclose(masses, wanted, atol=1e-5)
    assert masses[:, :, :-1].sum(axis=-1) == pytest.approx(8, abs=1e-4)


def test_a_stale_lse_ranks_tiles_nearly_as_a_fresh_one():
    q, k, v = draw(time=64, sharpness=3.0)
    _, stale = dense(q, k, v)
    generator = np.random.default_rng(0)
    q, k = (
        x * (1 + 0.05 * jnp.asarray(generator.standard_normal(x.shape), "float32")) for x in (q, k)
    )
    how = {"query_block": 8, "key_block": 8, "is_causal": False}
    one, other = (tile_masses(q, k, lse, **how) for lse in (stale, dense(q, k, v)[1]))
    ranks = [np.argsort(np.argsort(np.ravel(x))) for x in (one, other)]
    correlation: Any = np.corrcoef(np.stack(ranks))
    assert correlation[0, 1] > 0.95


def test_top_tiles_are_the_best_there_are():
    masses = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(4), (1, 1, 4)), "float32")
    kept = top_tiles(masses, 0.5)
    assert kept.sum() == 8
    best = max(
        float(np.ravel(masses)[list(choice)].sum())
        for choice in itertools.combinations(range(16), 8)
        if len({place // 4 for place in choice}) == 4
    )
    assert float(np.asarray(masses)[np.asarray(kept)].sum()) == pytest.approx(best, abs=1e-5)


def test_shares_by_head_keep_as_many_tiles_and_global_the_most_mass():
    generator = np.random.default_rng(1)
    peaks = np.array([0.02, 0.05, 0.3, 0.5, 3.0, 10.0])[None, :, None, None]
    masses = jnp.asarray(generator.dirichlet(np.ones(20), (2, 6, 20)) ** (1 / peaks) + 1e-9)
    masses = (masses / masses.sum(axis=-1, keepdims=True)).astype("float32")
    kept = {name: top_tiles(masses, 0.8, name) for name in ("uniform", "levels", "global")}
    assert len({int(x.sum()) for x in kept.values()}) == 1
    assert all((x.sum(axis=-1) >= 1).all() for x in kept.values())
    recalls = {name: np.asarray(recall(masses, x)) for name, x in kept.items()}
    assert recalls["levels"].min() > recalls["uniform"].min()
    assert recalls["global"].mean() >= max(recalls[x].mean() for x in ("uniform", "levels"))
    with_text = top_tiles(masses, 0.8, text_blocks=1)
    assert with_text[:, :, -1].all()
    assert with_text[..., -1].all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: sale_tiles(q, k, threshold=-1.0), "threshold must be at least 0"),
        (lambda q, k, v: sale_tiles(q, k[:, :5]), "q and k must be as long"),
        (lambda q, k, v: sale_tiles(q, k, query_block=0), "query_block must be at least 1"),
        (lambda q, k, v: pattern_tiles(q, k, Pattern("b-shape", 1, 1)), "pattern.kind must be"),
        (lambda q, k, v: search_patterns(q, k, v, ()), "at least one pattern"),
        (lambda q, k, v: top_tiles(jnp.ones((1, 1, 2, 2)), 1.0), "sparsity must be in"),
        (lambda q, k, v: top_tiles(jnp.ones((1, 1, 2, 2)), 0.5, text_blocks=3), "text_blocks"),
        (lambda q, k, v: calibrate_sale(q, k, v, least=0.0), "1e-6 <= least <= start <= 1"),
        (
            lambda q, k, v: attend_tiles(q, k, v, Tiles(jnp.ones((1, 1, 1, 1), bool), None, 8, 8)),
            "tiles.kept",
        ),
    ],
)
def test_wrong_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*draw(time=9))


def of_topics():
    """Runs of eight tokens about one topic, of which the releases below keep tiles of 16."""
    random = np.random.default_rng(34)
    centres = random.standard_normal((10, 16))
    topic = centres[np.repeat(random.integers(10, size=20), 8)][:, None]
    k = 0.9 * topic + 0.6 * random.standard_normal((160, 2, 16))
    q = 2 * (0.9 * topic + 0.6 * random.standard_normal((160, 4, 16)))
    return (jnp.asarray(x[None, :150], jnp.float32) for x in (q, k))


def rows_of(tiles):
    """Every head's map, a row of ten tiles as three hexadecimal digits."""
    bits = 2 ** np.arange(9, -1, -1)
    return ["".join(f"{x:03x}" for x in head @ bits) for head in np.asarray(tiles.kept[0], int)]


OF_XATTENTION = {
    0.5: """200300280240220210208214206301 200300280240220210208214206301
        200300280240220210208214206301 200300280240220210208214206301""",
    0.8: """200300380240260210208234236381 2003003802c0260210208234236381
        200300380240260210208234236381 200300380240260210208234236381""",
    0.95: """2003003802c02603502082742763a5 2003003803c02603502082742763c5
        2003003802c02602302082742763e1 2003003802c02603302082742763e1""",
}
OF_FLEXPREFILL = {
    0.0: """2003003803c036033031831c316397 2003003803c03603b035833c31631f
        2003003802c03602b025823c31629f 2003003803c03603b035833c31639f""",
    0.3: """2003003803c036033031831c316397 2003003803c03603b035833c31631f
        200300280240260270208264226201 200300280240260230208264226201""",
    0.45: """200300280240260270208234266201 2003002802c0260250208264226201
        200300280240260270208264226201 200300280240260230208264226201""",
}


@pytest.mark.parametrize("share", OF_XATTENTION)
def test_antidiagonals_keep_the_tiles_of_xattention(share):
    """Rows as `xattn_estimate` in MInference's repository keeps them from its second chunk on."""
    tiles = antidiagonal_tiles(*of_topics(), share, block=16, stride=4)
    assert rows_of(tiles) == OF_XATTENTION[share].split()


@pytest.mark.parametrize("threshold", OF_FLEXPREFILL)
def test_patterns_and_counts_are_those_of_flexprefill(threshold):
    """Heads as `get_active_blocks` (a24b27b) keeps them, where it counts in blocks of 16."""
    tiles = flexible_tiles(*of_topics(), 0.9, threshold=threshold, block=16)
    assert rows_of(tiles) == OF_FLEXPREFILL[threshold].split()


def test_shares_out_of_range_are_refused():
    q, k, _ = draw()
    for call, what in (
        (lambda: antidiagonal_tiles(q, k, 0.0), "share must be above 0"),
        (lambda: antidiagonal_tiles(q, k, block=8, stride=3), "multiple of stride 3"),
        (lambda: flexible_tiles(q, k, 1.5), "share must be above 0"),
        (lambda: flexible_tiles(q, k, threshold=-1.0), "threshold must be at least 0"),
    ):
        with pytest.raises(ValueError, match=what):
            call()
