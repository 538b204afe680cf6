r"""AdaSpa: tiles chosen by their measured mass, for video diffusion (non-causal).

Attention of a video transformer hardly changes from one denoising step to the next. So a few steps
search: they compute the mass of every tile (`tile_masses`), the first step with the LSE that dense
attention returns, the later ones with that same LSE, which changes even less. The steps in between
attend to the tiles with the largest masses.

How many tiles a head keeps may differ:

* "uniform": all heads keep the same share of every row of tiles;
* "levels": of the heads that keep more than 0.8 of their mass so, up to half keep fewer, and as
  many of the worst keep more: sparsities (1 + s) / 2 and (3 s - 1) / 2 (the paper's);
* "global": the tiles with the largest masses of all heads. No choice of as many tiles keeps more
  mass, so this bounds the other two.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._kinds import check_rank
from toolkit.attention._checks import check_count
from toolkit.attention.sparse.prefill.tiles import TileMap, TileMasses
from toolkit.attention.sparse.selection import top_mask

_GOOD = 0.8  # recall above which a head can spare tiles


@checked
def top_tiles(
    masses: TileMasses, sparsity: float, policy: Literal["uniform", "levels", "global"] = "global",
    *,
    text_blocks: int = 0,
) -> TileMap:  # fmt: skip
    """The tiles with the largest masses, a share 1 - sparsity of them all.

        argmax over sets of (1 - s) heads rows columns tiles of the mass inside, "global"

    Args:
        masses: of every tile, from `tile_masses` [batch, heads, query_blocks, key_blocks].
        sparsity: share of the tiles that are dropped.
        policy: how the heads share: "uniform", "levels" or "global" (see the module). A row of
            tiles keeps at least its largest.
        text_blocks: last blocks of queries and of keys that are kept besides, as those of a
            prompt's text are.

    Returns:
        Which tiles are kept [batch, heads, query_blocks, key_blocks].

    Source: Xia et al. (2025), arXiv:2502.21079; "global" is ours.

    Example:
        >>> masses = jnp.array([[[[3.0, 1.0], [2.0, 2.0]], [[4.0, 0.0], [4.0, 0.0]]]])
        >>> top_tiles(masses, 0.5).astype(int).tolist()
        [[[[1, 0], [1, 0]], [[1, 0], [1, 0]]]]
    """
    check_rank("masses", masses, "batch heads query_blocks key_blocks")
    if 0 in masses.shape:
        raise ValueError(f"masses must hold a tile; got shape {tuple(masses.shape)}.")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity}.")
    check_count("text_blocks", text_blocks, 0)
    if text_blocks > min(masses.shape[2:]):
        raise ValueError(f"text_blocks must be at most {min(masses.shape[2:])}; got {text_blocks}.")
    return _top(masses, float(sparsity), policy, text_blocks)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _top(masses, sparsity, policy, text_blocks):
    batch, heads, rows, columns = masses.shape
    count = max(1, round((1 - sparsity) * columns))
    kept = top_mask(masses, jnp.ones_like(masses, bool), count)
    if policy == "levels":
        kept = _by_level(masses, kept, count)
    if policy == "global":
        best = top_mask(masses, jnp.ones_like(masses, bool), 1)
        flat = jnp.where(best, jnp.inf, masses).reshape(batch, -1)
        kept = top_mask(flat, jnp.ones_like(flat, bool), count * heads * rows).reshape(kept.shape)
    row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None]
    is_text = (row >= rows - text_blocks) | (column >= columns - text_blocks)
    return kept | is_text[None, None]


def _by_level(masses, kept, same):
    heads, columns = masses.shape[1], masses.shape[3]
    recalled = recall(masses, kept)
    spare = jnp.minimum((recalled > _GOOD).sum(axis=1, dtype=jnp.int32), heads // 2)[:, None]
    place = _ranks(recalled)
    level = jnp.where(place < spare, -1, jnp.where(place >= heads - spare, 1, 0))
    # The needy heads get what the spare heads give up: half of what each of those keeps.
    given = min(same // 2, columns - same)
    return _ranks(masses) < (same + given * level)[..., None, None]


def _ranks(x: Float[Array, "... size"]) -> Array:
    """The place of each number in descending order along the last axis."""
    order = jnp.argsort(-x, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def recall(masses: TileMasses, kept: TileMap) -> Float[Array, "batch heads"]:
    """The share of each head's mass that lies in the tiles it keeps."""
    return jnp.where(kept, masses, 0).sum(axis=(2, 3)) / masses.sum(axis=(2, 3))
