"""AdaSpa's maps on a video transformer, as they age: drawn as the library has them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import softmax_attention
from toolkit.attention.sparse.prefill import Tiles, attend_tiles, tile_masses, top_tiles
from toolkit.attention.sparse.prefill.adaspa import recall
from toolkit.experiments.sparse import video
from toolkit.lab.sparsity.stale import BLOCK, _trajectory, masses_of, stale_view

slow = pytest.mark.slow
HOW = {"query_block": BLOCK, "key_block": BLOCK, "is_causal": False}


def rows_of(layer, step):
    return (jnp.asarray(x[step, layer])[None] for x in _trajectory().seen)


@slow
def test_maps_are_those_of_the_library():
    layer, searched, shown = 1, 2, 7
    how = {"is_causal": False, "return_residual": True}
    residual = {
        step: softmax_attention(*rows_of(layer, step), **how)[2] for step in (searched, shown)
    }
    q, k, v = rows_of(layer, shown)
    masses = tile_masses(q, k, residual[searched], **HOW)
    np.testing.assert_allclose(masses_of(layer, shown, searched), masses[0], rtol=1e-3, atol=1e-4)
    setting = {"layer": layer + 1, "searched": searched + 1, "shown": shown + 1, "sparsity": 0.8,
               "policy": "uniform", "kind": "lse"}  # fmt: skip
    for head in range(2):
        of = stale_view(**setting, head=head + 1).of
        tiles = Tiles(jnp.asarray(of.maps["lse"][shown])[None, None], None, BLOCK, BLOCK)
        own = (x[:, :, head : head + 1] for x in (q, k, v))
        out, lse = attend_tiles(*own, tiles, is_causal=False)
        exact = softmax_attention(*(x[:, :, head : head + 1] for x in (q, k, v)), is_causal=False)
        error = jnp.sqrt(jnp.square(out - exact[0]).sum() / jnp.square(exact[0]).sum())
        mass = jnp.exp(lse - residual[shown][..., head : head + 1]).mean()
        assert of.error["lse"][shown] == pytest.approx(float(error), rel=1e-2)
        assert of.mass["lse"][shown] == pytest.approx(float(mass), rel=1e-3)


@slow
def test_adaspa_on_attention_of_a_trained_video_transformer():
    kept, held = {}, {}
    for layer in range(video.LAYERS):
        masses = jnp.asarray(np.stack([masses_of(layer, step, None) for step in (3, 8)]))
        for policy in ("uniform", "levels", "global"):
            tiles = top_tiles(masses, 0.8, policy)
            kept.setdefault(layer, set()).add(int(tiles.sum()))
            held[layer, policy] = np.asarray(recall(masses, tiles))
        assert len(kept[layer]) == 1
        best = held[layer, "global"].mean()
        assert best >= held[layer, "uniform"].mean() - 1e-6
        assert best >= held[layer, "levels"].mean() - 1e-6
        assert held[layer, "levels"].min() >= held[layer, "uniform"].min() - 1e-6
    # A fifth of the tiles would hold a fifth of even attention; of this model's, 0.30.
    assert np.mean([held[layer, "uniform"].mean() for layer in range(video.LAYERS)]) > 0.25
    # The residual hardly ages, the map does: the paper's reason to cache the one and search anew.
    view = stale_view(layer=2, head=1, searched=3, shown=12, kind="lse", sparsity=0.8,
                      policy="uniform")  # fmt: skip
    fresh, lse, old = (view.of.mass[kind][view.shown] for kind in ("fresh", "lse", "map"))
    assert fresh + 1e-6 >= lse >= old
    assert "80% of all tiles are dropped" in view.sentence()
    assert view.sentence().endswith("are not on the map that was searched with the old LSE.")
    assert replace(view, kind="map").sentence().endswith("are not on the old map.")


def test_moving_digits_move_and_come_back_from_patches():
    drawn = video.videos(jax.random.key(0), 4)
    assert drawn.shape == (4, video.FRAMES, video.SIDE, video.SIDE)
    assert set(np.unique(drawn)) == {-1.0, 1.0}
    lit = (np.asarray(drawn) == 1).sum(axis=(2, 3))
    assert (lit == lit[:, :1]).all()
    assert (np.asarray(drawn)[:, 0] != np.asarray(drawn)[:, -1]).any()
    np.testing.assert_array_equal(video.unpatched(video.patches(drawn)), drawn)
