"""AdaSpa's maps of tiles from step to step of a diffusion: what was kept, and how it ages.

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
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.attention.sparse.prefill import top_tiles
from toolkit.experiments.sparse import model, video
from toolkit.experiments.sparse.video import FRAMES, HEADS, LAYERS
from toolkit.figures import ACCENT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure.stored import stored_folder
from toolkit.measure.words import in_words

BLOCK = 16
TILES = video.TOKENS // BLOCK
STEPS = video.DENOISING
KINDS = {"fresh": "searched anew", "lse": "searched with the old LSE", "map": "old map"}


class Head(NamedTuple):
    """One head in every step."""

    # Softmax weight of each block of keys [steps, tokens, tiles]
    shares: Float[np.ndarray, "steps tokens tiles"]
    # Contribution of each to the output [steps, tokens, tiles, size]
    parts: Float[np.ndarray, "steps tokens tiles size"]
    lse: Float[np.ndarray, "steps tokens"]  # residuals [steps, tokens]


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
    """What the three kinds of map do at every step from the one that searched."""

    # Kind -> tiles kept [steps, rows, columns] of one head
    maps: dict[str, Bool[np.ndarray, "steps rows columns"]]
    mass: dict[str, Float[np.ndarray, "steps"]]  # kind -> share of its softmax in them [steps]
    error: dict[str, Float[np.ndarray, "steps"]]  # kind -> relative error of its output [steps]


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


_COLOURS = ListedColormap(["#eef1f4", "#2f7fb8", "#d8b365", "#b3245b"])
_LOOKS = {"fresh": look("full"), "lse": look("gdn"), "map": look("kda")}
_FRAMES = np.linspace(-0.5, TILES - 0.5, FRAMES + 1)


class MapPlot(Plot):
    """Tiles on both maps, on the fresh one only, and on the other only."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Tiles: a fresh search against the other", fontsize=10.5)
        axes.set(xlabel="frame of the keys", ylabel="frame of the queries")
        axes.grid(False)
        names = ["", *map(str, range(1, FRAMES + 1))]
        for ticks in (axes.set_xticks, axes.set_yticks):
            ticks(_FRAMES - (_FRAMES[1] - _FRAMES[0]) / 2, names)
        axes.tick_params(labelsize=8, length=0)
        self.image_of = self.image((TILES, TILES), _COLOURS, 0, 3)
        axes.set(xlim=(-0.5, TILES - 0.5), ylim=(TILES - 0.5, -0.5))
        words = ("dropped", "on both", "fresh only", "other only")
        for number, name in enumerate(words):
            axes.plot([], [], "s", color=_COLOURS(number), markeredgecolor="#8a949e", label=name)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, fontsize=8,
                    columnspacing=0.9, handletextpad=0.2)  # fmt: skip

    def show(self, view: StaleView) -> None:
        fresh, other = (view.of.maps[kind][view.shown] for kind in ("fresh", view.kind))
        self.image_of.set_data(np.where(fresh, np.where(other, 1, 2), np.where(other, 3, 0)))


class AgePlot(Plot):
    """A share at every step since the search, for each kind of map."""

    def __init__(self, axes: Axes, title: str, of: str) -> None:
        super().__init__(axes)
        self._of = of
        axes.set_title(title, fontsize=10.5)
        # Outputs of few tiles are off by up to twice their size.
        self._top = 1.02 if of == "mass" else 2.2
        axes.set(xlim=(0.5, STEPS + 0.5), ylim=(0, self._top))
        axes.set_xticks(range(1, STEPS + 1))
        ticks = np.array([0, 0.5, 1]) if of == "mass" else np.arange(3)
        axes.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
        axes.tick_params(labelsize=8)
        self.cached = self.line(color="#8a949e", linewidth=1.2, linestyle=":")
        self.now = self.line(color=ACCENT, linewidth=1.2)
        self.lines = {
            kind: self.line(
                color=own.colour, linestyle=own.dashes, marker=own.marker, markersize=5,
                label=KINDS[kind],
            )
            for kind, own in _LOOKS.items()
        }  # fmt: skip
        if of == "error":
            axes.set_xlabel("denoising step", fontsize=9)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), ncols=3, fontsize=8,
                        columnspacing=0.9)  # fmt: skip

    def show(self, view: StaleView) -> None:
        later = np.arange(view.searched, STEPS)
        for kind, line in self.lines.items():
            line.set_data(later + 1, getattr(view.of, self._of)[kind][later])
        self.cached.set_data([view.searched + 1] * 2, [0, self._top])
        self.now.set_data([view.shown + 1] * 2, [0, self._top])


class StalePanel(Panel):
    """How long AdaSpa's map of tiles stays good while a video is drawn from noise.

    Example:
        >>> panel = StalePanel(searched=2, shown=6)
        >>> panel.view.age
        4
    """

    title = "AdaSpa: how old may a search be?"
    figure_size = (9.6, 5.2)
    opening_seconds = 3
    has_palette = True

    searched = Number("Search", 3, low=1, high=STEPS, explanation="Step whose LSE and map are kept")
    shown = Number("Step", 8, low=1, high=STEPS, explanation="Shown, not before the search")
    kind = Choice(
        "Against", "lse", {"the old LSE": "lse", "the old map": "map"},
        explanation="What a fresh search is held against",
    )  # fmt: skip
    sparsity = Choice("Dropped", 0.8, {f"{share:.0%}": share for share in (0.5, 0.8, 0.9)})
    policy = Choice(
        "Shares", "uniform", {name: name for name in ("uniform", "levels", "global")},
        explanation="How the heads of a layer share the tiles",
    )  # fmt: skip
    layer = Number("Layer", 2, low=1, high=LAYERS)
    head = Number("Head", 1, low=1, high=HEADS)

    compute = staticmethod(stale_view)
    places = (
        (MapPlot, (0.065, 0.27, 0.37, 0.64)),
        (AgePlot, (0.52, 0.62, 0.45, 0.29), "Softmax kept", "mass"),
        (AgePlot, (0.52, 0.27, 0.45, 0.25), "Error of the output", "error"),
    )
