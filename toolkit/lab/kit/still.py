"""A scene as a still picture, for readers without a kernel: what the player shows at one time."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from toolkit.figures import ACCENT, FAINT, INK, new_figure, style
from toolkit.lab.kit.scene import Grid, Scene

MORE, LESS = "#24679f", "#b8501c"  # of cells, as in player.js


def still(scene: Scene, time: float | None = None, width: float = 9.6) -> Figure:
    """The scene as a figure, for readers without a kernel: at `time`, or at its `moment`."""
    at = scene.moment if time is None else time
    lane = scene.lane_pixels / 100  # inches
    is_drawn = bool(scene.nodes or scene.grids)
    heights = (max(scene.tall * width, 1.0) if is_drawn else 0, lane * len(scene.lanes))
    legend = 0.3 if scene.bars or scene.messages else 0.08
    axis = 0.32 if scene.lanes else 0
    height = sum(heights) + legend + axis
    with style():
        figure = new_figure(width, height)
        if scene.nodes:
            box = (0.005, 1 - (legend + heights[0]) / height, 0.99, heights[0] / height)
            _draw_space(figure.add_axes(box), scene, at, heights[0])
        if scene.lanes:
            box = (0.09, axis / height, 0.895, heights[1] / height)
            _draw_lanes(figure.add_axes(box), scene, at, lane)
        for grid in scene.grids:
            above = heights[0] - 0.1
            x, y, wide, high = grid.box
            left, top = 0.06 * any(grid.rows), 0.2 + 0.14 * any(grid.columns)
            box = (0.01 + 0.98 * x + left, 1 - (legend + y * above + high * above) / height,
                   0.98 * wide - left, (high * above - top) / height)  # fmt: skip
            _draw_grid(figure.add_axes(box), grid, at)
        if scene.bars or scene.messages:
            handles = [Patch(facecolor=kind.colour, label=kind.name) for kind in scene.kinds]
            figure.legend(handles=handles, loc="upper left", ncols=len(handles), borderpad=0.1)
    return figure


def _draw_grid(axes: Axes, grid: Grid, time: float) -> None:
    rows, columns = len(grid.rows), len(grid.columns)
    moment = int(np.searchsorted(grid.times, time, "right")) - 1
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_title(grid.name, fontsize=9.5, pad=4 + 10 * any(grid.columns))
    axes.set_xticks(np.arange(columns) + 0.5 if any(grid.columns) else [])
    axes.set_yticks(np.arange(rows) + 0.5 if any(grid.rows) else [])
    if any(grid.columns):
        axes.set_xticklabels(grid.columns, fontsize=7.5)
    if any(grid.rows):
        axes.set_yticklabels(grid.rows, fontsize=7.5)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, pad=2)
    axes.grid(False)
    box = axes.get_window_extent()
    wide, high = box.width / columns, box.height / rows
    for (row, column), value in np.ndenumerate(grid.values[moment] if moment >= 0 else []):
        x, y = column + 0.5, row + 0.5
        label = str(grid.labels[row * columns + column]) if grid.labels else ""
        ink, colour = INK, MORE if value > 0 else LESS
        if np.isinf(value):
            ink = FAINT
        elif np.isnan(value):
            axes.plot([column + 0.1, column + 0.9], [row + 0.5] * 2, color=FAINT, linewidth=0.8)
            ink = FAINT
        elif grid.labels:
            alpha = 0.08 + 0.92 * abs(value)
            axes.add_patch(
                Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, alpha=alpha)
            )
            ink = "white" if abs(value) > 0.7 else INK
        elif value:
            side = 0.92 * float(np.sqrt(abs(value))) * min(wide, high)
            face: dict[str, Any] = (
                {"facecolor": colour} if value > 0 else {"fill": False, "edgecolor": colour}
            )
            across, down = side / wide, side / high
            corner = x - across / 2, y - down / 2
            axes.add_patch(Rectangle(corner, across, down, **face))
        axes.annotate(label, (x, y), ha="center", va="center", fontsize=7.5, color=ink)


def _draw_space(axes: Axes, scene: Scene, time: float, inches: float) -> None:
    margin = min(0.32 / inches, 0.45) / (1 - 2 * min(0.32 / inches, 0.45))
    axes.set(xlim=(-0.04, 1.04), ylim=(1 + margin, -margin), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(False)
    places = np.array([node[1:] for node in scene.nodes], float)
    edges = [places[list(edge)] for edge in scene.edges]
    axes.add_collection(LineCollection(edges, colors=FAINT, linewidths=1.2))
    is_small = len(scene.nodes) > 24
    face = np.ones((len(places), 3))
    for bar in scene.bars if len(scene.lanes) == len(scene.nodes) else ():
        if bar.start <= time < bar.end:
            face[bar.lane] = to_rgb(scene.kinds[bar.kind].colour)
            if not is_small:
                ink = "white" if scene.kinds[bar.kind].is_dark else INK
                axes.annotate(
                    bar.label.split(" ")[0],
                    places[bar.lane],
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=ink,
                )
    for number, (times, values) in enumerate(scene.levels):
        if not scene.lanes:  # a node that does nothing of its own is as blue as it is full
            part = ([0.0, *values])[int(np.searchsorted(times, time, "right"))]
            face[number] = 1 - part * (1 - np.array(to_rgb("#2f7fb8")))
    size = 60 if is_small else 420
    axes.scatter(*places.T, s=size, c=face, marker="s", edgecolors=INK, linewidths=1, zorder=2)
    for node, place in zip(scene.nodes, places, strict=True):
        if not is_small:
            # A node that does nothing of its own has room for its name.
            is_own = len(scene.lanes) == len(scene.nodes)
            below: dict[str, Any] = {
                "xytext": (0, -17 if is_own else 0),
                "textcoords": "offset points",
            }
            axes.annotate(node.name, place, ha="center", va="center", fontsize=8.5, **below)
    for message in scene.messages:
        if message.start <= time < message.end:
            part = (time - message.start) / (message.end - message.start)
            place = places[message.source] * (1 - part) + places[message.target] * part
            colour = scene.kinds[message.kind].colour
            axes.plot(*place, "o", color=colour, markeredgecolor=ACCENT, markersize=7, zorder=3)
            if not is_small:
                above: dict[str, Any] = {
                    "xytext": (0, 9),
                    "textcoords": "offset points",
                    "fontsize": 8,
                }
                axes.annotate(message.label, place, ha="center", va="center", **above)


def _draw_lanes(axes: Axes, scene: Scene, time: float, inches: float) -> None:
    axes.set(xlim=(0, scene.end), ylim=(len(scene.lanes) - 0.5, -0.5))
    every = math.ceil(0.13 / inches)
    axes.set_yticks(range(0, len(scene.lanes), every), scene.lanes[::every])
    axes.tick_params(axis="y", length=0)
    first = f" {scene.unit}".rstrip()  # the unit stands at zero
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}{'' if x else first}")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for number, kind in enumerate(scene.kinds):
        corners = [
            [(start, lane - 0.44), (end, lane - 0.44), (end, lane + 0.44), (start, lane + 0.44)]
            for lane, start, end, _, other in scene.bars
            if other == number
        ]
        edges = "white" if len(scene.bars) < 1500 else "none"
        axes.add_collection(
            PolyCollection(corners, facecolors=kind.colour, edgecolors=edges, linewidths=0.5)
        )
    for bar in scene.bars:
        wide = (bar.end - bar.start) / scene.end * 8.6  # inches
        fits = [
            item for item in (bar.label, bar.label.split(" ")[0]) if wide > 0.03 + 0.075 * len(item)
        ]
        if inches > 0.13 and fits:
            ink = "white" if scene.kinds[bar.kind].is_dark else INK
            axes.text(
                (bar.start + bar.end) / 2, bar.lane, fits[0], ha="center", va="center",
                fontsize=7.5, color=ink,
            )  # fmt: skip
    axes.axvline(time, color=ACCENT, linewidth=1.3)
