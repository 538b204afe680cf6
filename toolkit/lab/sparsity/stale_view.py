"""AdaSpa's maps from one denoising step to the next: how fast they age. Pure functions.

    W_ij(s; c) = sum of exp(x_ts - lse_t of step c) over the pairs in a tile, at step s

A fresh search uses the residual of its own step (c = s); the cached one that of an earlier step,
which saves half of an attention; and a map may be used again without any search. What each keeps is
judged by the softmax of the step shown.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from toolkit.attention.sparse.prefill import top_tiles
from toolkit.experiments.sparse import model, video
from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.kit.view import Data, View
from toolkit.measure.words import in_words

BLOCK = 16
TILES = video.TOKENS // BLOCK
STEPS = video.DENOISING
KINDS = {"fresh": "searched anew", "lse": "searched with the old LSE", "map": "old map"}


class Head(NamedTuple):
    """One head in every step.

    Attributes:
        shares: softmax weight of each block of keys [steps, tokens, tiles].
        parts: contribution of each to the output [steps, tokens, tiles, size].
        lse: residuals [steps, tokens].
    """

    shares: Float[np.ndarray, "steps tokens tiles"]
    parts: Float[np.ndarray, "steps tokens tiles size"]
    lse: Float[np.ndarray, "steps tokens"]


@functools.cache
def _trajectory() -> video.Trajectory:
    params = model.load(stored_folder("models") / "video.safetensors")
    return jax.device_get(video.trajectory(params, jax.random.key(1)))


@functools.lru_cache(maxsize=2 * video.HEADS)
def head_of(layer: int, head: int) -> Head:
    """A head of a layer, both from 0; remembered."""
    q, k, v = (rows[:, layer, :, head] for rows in _trajectory().seen)
    x = q @ k.swapaxes(1, 2) * np.float32(q.shape[-1] ** -0.5)
    most = x.max(axis=2, keepdims=True)
    lse = most + np.log(np.exp(x - most).sum(axis=2, keepdims=True))
    weights = np.exp(x - lse).reshape(STEPS, video.TOKENS, TILES, BLOCK)
    values = v.reshape(STEPS, TILES, BLOCK, -1)
    # One product per block of keys.
    parts = np.moveaxis(weights, 2, 1) @ values
    return Head(weights.sum(axis=3), np.moveaxis(parts, 1, 2), lse[..., 0])


def masses_of(layer: int, step: int, cached: int | None) -> Float[np.ndarray, "heads rows columns"]:
    """Masses of all tiles of a layer at a step, with the LSE of a step; None for its own."""
    found = []
    for head in range(video.HEADS):
        of = head_of(layer, head)
        shares = of.shares[step]
        if cached is not None:
            shares = np.exp(of.lse[step] - of.lse[cached])[:, None] * shares
        found.append(shares.reshape(TILES, BLOCK, TILES).sum(axis=1))
    return np.stack(found)


class Aged(NamedTuple):
    """What the three kinds of map do at every step from the one that searched.

    Attributes:
        maps: kind -> tiles kept [steps, rows, columns] of one head.
        mass: kind -> share of its softmax in them [steps].
        error: kind -> relative error of its output [steps].
    """

    maps: dict[str, Bool[np.ndarray, "steps rows columns"]]
    mass: dict[str, Float[np.ndarray, "steps"]]
    error: dict[str, Float[np.ndarray, "steps"]]


@functools.lru_cache(maxsize=256)
def aged(layer: int, head: int, searched: int, sparsity: float, policy: str) -> Aged:
    """One head's maps at all steps, from a search at `searched`; all counted from 0; remembered."""
    fresh = [masses_of(layer, step, None) for step in range(STEPS)]
    stale = [masses_of(layer, step, searched) for step in range(STEPS)]
    masses = np.stack([*fresh, *stale])
    kept = np.asarray(top_tiles(masses, sparsity, policy))[:, head]  # pyright: ignore[reportArgumentType]
    maps = {"fresh": kept[:STEPS], "lse": kept[STEPS:], "map": kept[[searched] * STEPS]}
    judged = {kind: _judge(head_of(layer, head), kept) for kind, kept in maps.items()}
    return Aged(
        maps,
        {kind: mass for kind, (mass, _) in judged.items()},
        {kind: error for kind, (_, error) in judged.items()},
    )


def _judge(of: Head, maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mass, error = np.empty(STEPS), np.empty(STEPS)
    for step, kept in enumerate(maps):
        rows = np.repeat(kept, BLOCK, axis=0)
        shares = np.where(rows, of.shares[step], 0).sum(axis=1)
        exact = of.parts[step].sum(axis=1)
        out = (rows[:, None].astype(np.float32) @ of.parts[step])[:, 0] / shares[:, None]
        mass[step] = shares.mean()
        error[step] = np.sqrt(np.square(out - exact).sum() / np.square(exact).sum())
    return mass, error


@dataclass(frozen=True)
class StaleView(View):
    """One head's map at a step, and how maps age; everything counts from 0."""

    layer: int
    head: int
    searched: int
    shown: int
    kind: str
    sparsity: float
    of: Aged

    @property
    def age(self) -> int:
        """Steps since the search."""
        return self.shown - self.searched

    def data(self) -> Data:
        later = np.arange(self.searched, STEPS)
        columns: Data = {"step": [str(step + 1) for step in later]}
        for kind, words in KINDS.items():
            columns[f"{words}: kept (share)"] = self.of.mass[kind][later]
            columns[f"{words}: error (share)"] = self.of.error[kind][later]
        return columns

    def sentence(self) -> str:
        mass, error = (
            {k: of[k][self.shown] for k in KINDS} for of in (self.of.mass, self.of.error)
        )
        new, old = (self.of.maps[kind][self.shown] for kind in ("fresh", self.kind))
        how = {kind: words.replace("old map", "by the old map") for kind, words in KINDS.items()}
        says = ", ".join(
            f"{in_words(mass[kind], 'share')} {words} (error {in_words(error[kind], 'share')})"
            for kind, words in how.items()
        )
        other = {"lse": "the map that was searched with the old LSE", "map": "the old map"}
        return (
            f"Layer {self.layer + 1}, head {self.head + 1} at denoising step {self.shown + 1}, "
            f"{self.age} after the search at step {self.searched + 1}; "
            f"{in_words(self.sparsity, 'share')} of all tiles are dropped. Of its softmax it keeps "
            f"{says}. {int((new & ~old).sum())} of the {int(new.sum())} tiles of a fresh search "
            f"are not on {other[self.kind]}."
        )

    def footnote(self) -> str:
        return (
            "Measured here: a diffusion transformer trained on moving digits, "
            f"{video.FRAMES} frames, {video.TOKENS} tokens, tiles of {BLOCK} x {BLOCK}."
        )


def stale_view(
    *, layer: int, head: int, searched: int, shown: int, kind: str, sparsity: float, policy: str
) -> StaleView:
    """A head's map at a step, not before the search; layer, head and steps count from 1."""
    of = aged(layer - 1, head - 1, searched - 1, sparsity, policy)
    shown = max(shown, searched) - 1
    return StaleView(layer - 1, head - 1, searched - 1, shown, kind, sparsity, of)
