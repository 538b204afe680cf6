"""Tactic's fit, hash bits, rounded keys and SALE's tiles: drawn as the library has them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention.sparse import MassTarget, build, decode_step, update
from toolkit.attention.sparse.prefill.sale import sale_tiles
from toolkit.experiments.sparse.quality import at_small_budgets
from toolkit.lab.sparsity.codes import codes_of, codes_view
from toolkit.lab.sparsity.fit import fit_view
from toolkit.lab.sparsity.reading import ask, index_of, params, read_text, scores_of
from toolkit.lab.sparsity.sale import queries_and_keys, sale_view

# They read a text of a thousand tokens, and compile the systems.
pytestmark = pytest.mark.slow
CONTEXT = 1024


@pytest.mark.parametrize("target", [0.7, 0.95])
def test_tactic_stops_where_a_step_stops(target):
    text, selector = read_text(CONTEXT), at_small_budgets("tactic")
    selector = replace(selector, stops_by="fit")
    q, k, v = ask(params(), 0, text.first)
    room = ((0, 0), (0, 8), (0, 0))
    held = (jnp.pad(rows[0], room)[None] for rows in (text.keys, text.values))
    cache = build(selector, *held, jnp.full(1, CONTEXT, jnp.int32))
    for row in (0, 4):
        now = update(selector, cache, k[row : row + 1], v[row : row + 1])
        step = decode_step(now, q[row : row + 1], selector, MassTarget(target))
        for head in range(2):
            view = fit_view(target=target, context=CONTEXT, head=head + 1, question=row + 1)
            always = CONTEXT + 1 - len(view.exact)
            assert view.count + always == int(step.tokens[0, head])
            assert view.fewest <= view.needed
            assert view.mass[-1] == pytest.approx(1)


def test_codes_are_those_of_the_systems():
    q = np.asarray(ask(params(), 0, read_text(CONTEXT).first).q)
    found, keys = codes_of(CONTEXT, 128, 2), read_text(CONTEXT).keys[0]
    for name, drawn in (("hata", found.scores), ("pqcache", found.estimates)):
        wanted = scores_of(index_of(name, CONTEXT), 0, keys, q)
        np.testing.assert_allclose(
            drawn[..., :CONTEXT], wanted[..., :CONTEXT], rtol=2e-3, atol=2e-3
        )
    more = {bits: codes_view(bits=bits, parts=2, context=CONTEXT, head=1, question=1, rank=1)
            for bits in (32, 512)}  # fmt: skip
    assert more[32].recall["HATA"] < more[512].recall["HATA"]
    off = [np.abs(np.sin(np.pi / 2 * v.alike) - v.cosines).mean() for v in more.values()]
    assert off[1] < 0.06 < off[0] / 2  # fewer bits scatter more about the law


def test_tiles_are_those_of_sale():
    q, k = (jnp.asarray(rows.swapaxes(0, 1))[None] for rows in queries_and_keys())
    for threshold in (1.0, 10.0):
        for is_rounded in (True, False):
            tiles = sale_tiles(q, k, threshold=threshold, is_rounded=is_rounded).kept[0]
            for head in range(2):
                view = sale_view(threshold=threshold, head=head + 1, row=3)
                kept = view.kept if is_rounded else view.by_exact
                np.testing.assert_array_equal(kept & view.causal, tiles[head])
        assert 0.5 < view.mass < 1
    np.testing.assert_allclose(view.tiles.masses.sum(axis=1), 1, rtol=1e-4)
    for head in (1, 2):  # without sinks, as the notebook says
        view = sale_view(threshold=0.008, head=head, row=3)
        assert view.kept[view.causal].all()
