"""Axes on which mixers are compared as the context grows."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from toolkit.figures import ACCENT, Look, in_words, log_axes, look
from toolkit.lab.attention.view import SHORT_NAMES, TOKENS, Point

# Nested, so that markers on the same spot all stay visible.
MARKER_SIZES = (12.5, 9.5, 7.5)
_LOOKS = {name: look(name) for name in SHORT_NAMES}
BEHIND_WORDS = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}


class CostCurves:
    """One line a mixer on logarithmic axes, the chosen context marked, its values written above.

    Attributes:
        axes: where it draws.
        unit: of the vertical axis now.
        names: the words beside each line's sample, one a line.
    """

    def __init__(
        self,
        figure: Figure,
        axes: Axes,
        unit: str,
        title: str,
        *,
        columns: int,
        names: Mapping[str, str] = SHORT_NAMES,
        looks: Mapping[str, Look] = _LOOKS,
        name_inches: float = 0.65,
        value_inches: float = 1.9,
        limits: tuple[float, float] | None = None,
    ) -> None:
        self.axes, self.unit = axes, unit
        self.lines: dict[str, Line2D] = {}
        self.dots: dict[str, Line2D] = {}
        self.points: dict[str, Line2D] = {}
        self.names: dict[str, Text] = {}
        self.values: dict[str, Text] = {}
        log_axes(axes, x_unit="tokens", y_unit=unit)
        axes.set_xlim(TOKENS[0], TOKENS[-1])
        self._has_fixed_limits = limits is not None
        if limits is not None:
            axes.set_ylim(*limits)
        axes.set_xlabel("context length (tokens)")
        self.mark = axes.axvline(TOKENS[0], color=ACCENT, linewidth=1, alpha=0.7)
        self.mark_name = axes.text(
            TOKENS[0], 0.02, "", color=ACCENT, fontsize=9, ha="center", bbox=BEHIND_WORDS,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        box = axes.get_position()
        inch = 1 / (box.width * figure.get_figwidth()), 1 / (box.height * figure.get_figheight())
        rows = -(-len(names) // columns)
        axes.set_title(title, y=1 + (0.21 * rows + 0.07) * inch[1])
        for place, name in enumerate(names):
            seen = looks[name]
            (self.lines[name],) = axes.plot(
                TOKENS, np.ones(len(TOKENS)), color=seen.colour, linestyle=seen.dashes
            )
            (self.points[name],) = axes.plot(
                [], [], color=seen.colour, marker=seen.marker, markersize=MARKER_SIZES[place],
                linestyle="none", markeredgecolor="white", markeredgewidth=1.2, zorder=4,
            )  # fmt: skip
            (self.dots[name],) = axes.plot([1], [1], color=ACCENT, marker="o", markersize=5)
            row, column = divmod(place, columns)
            left, height = column / columns, 1 + 0.21 * (rows - row - 0.3) * inch[1]
            above = {"transform": axes.transAxes, "clip_on": False}
            axes.plot(
                [left, left + (name_inches - 0.1) * inch[0]], [height, height],
                color=seen.colour, linestyle=seen.dashes, **above,
            )  # fmt: skip
            self.names[name] = axes.text(
                left + name_inches * inch[0], height, names[name], va="center", **above
            )
            self.values[name] = axes.text(
                left + value_inches * inch[0], height, "", va="center", fontweight="bold", **above
            )

    def artists(self) -> list[Artist]:
        """What `show` moves, lowest first."""
        groups = (self.lines, self.points, self.dots, self.values)
        each = [artist for group in groups for artist in group.values()]
        return [self.mark, *each, self.mark_name]

    def show(
        self,
        chosen: int,
        curves: dict[str, np.ndarray],
        values: dict[str, float],
        unit: str,
        measured: Sequence[Point] = (),
    ) -> bool:
        """Move the lines; say whether the axes changed and the background must be drawn again."""
        self.mark.set_xdata([chosen, chosen])
        self.mark_name.set_x(min(max(chosen, TOKENS[0] * 2), TOKENS[-1] // 2))
        self.mark_name.set_text(f"{chosen:,} tokens")
        for name, line in self.lines.items():
            line.set_ydata(curves[name])
            self.dots[name].set_data([chosen], [values[name]])
            self.values[name].set_text(in_words(values[name], unit))
            own = [point for point in measured if point.mixer == name]
            self.points[name].set_data([p.tokens for p in own], [p.seconds for p in own])
        drawn = [*curves.values(), np.array([point.seconds for point in measured])]
        return self._set_limits(np.concatenate(drawn), unit)

    def _set_limits(self, values: np.ndarray, unit: str) -> bool:
        if self._has_fixed_limits:
            return False
        # Whole steps, so that the axis stands still while a slider moves within one.
        base = 16.0 if unit == "bytes" else 10.0
        low, high = np.log([values.min(), values.max()]) / np.log(base)
        limits = (base ** np.floor(low - 0.1), base ** np.ceil(high + 0.1))
        if unit == self.unit and np.allclose(np.log(self.axes.get_ylim()), np.log(limits)):
            return False
        self.unit = unit
        log_axes(self.axes, x_unit="tokens", y_unit=unit)
        self.axes.set_ylim(*limits)
        return True
