"""Sparse prefill: a map of tiles for a whole sequence, chosen without training.

attend_tiles                  exact attention over the tiles that are kept, with its LSE
Tiles                         which tiles each head keeps, and which single keys besides
tile_masses                   the softmax weight in every tile, from an LSE that may be stale
sale_tiles, calibrate_sale    4-bit scores against an exact denominator; its thresholds per head
pattern_tiles, Pattern        vertical-slash, a-shape and pooled blocks (MInference)
search_patterns, patterns_by_head   the offline search for a pattern per head, and its use
antidiagonal_tiles            tiles by sums along their antidiagonals (XAttention)
flexible_tiles                a pattern and a number of tiles per head and prompt (FlexPrefill)
top_tiles                     the tiles with the largest masses (AdaSpa), and how heads share them
"""

from toolkit.attention.sparse.prefill.adaspa import top_tiles
from toolkit.attention.sparse.prefill.flexprefill import flexible_tiles
from toolkit.attention.sparse.prefill.minference import (
    Pattern,
    pattern_tiles,
    patterns_by_head,
    search_patterns,
)
from toolkit.attention.sparse.prefill.sale import calibrate_sale, sale_tiles
from toolkit.attention.sparse.prefill.tiles import Tiles, attend_tiles, tile_masses
from toolkit.attention.sparse.prefill.xattention import antidiagonal_tiles

__all__ = [
    "Pattern", "Tiles", "antidiagonal_tiles", "attend_tiles", "calibrate_sale", "flexible_tiles",
    "pattern_tiles", "patterns_by_head", "sale_tiles", "search_patterns", "tile_masses",
    "top_tiles",
]  # fmt: skip
