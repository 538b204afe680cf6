"""AdaSpa's maps of tiles from step to step of a diffusion: what was kept, and how it ages."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from toolkit.experiments.sparse.video import FRAMES, HEADS, LAYERS
from toolkit.figures import ACCENT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sparsity.stale_view import KINDS, STEPS, TILES, StaleView, stale_view

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

    def compute(self, **state: Any) -> StaleView:
        return stale_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            MapPlot(figure.add_axes((0.065, 0.27, 0.37, 0.64))),
            AgePlot(figure.add_axes((0.52, 0.62, 0.45, 0.29)), "Softmax kept", "mass"),
            AgePlot(figure.add_axes((0.52, 0.27, 0.45, 0.25)), "Error of the output", "error"),
        ]
