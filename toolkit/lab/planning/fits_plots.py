"""The plots of `FitsPanel`: memory needed on the map, and the fewest chips by scheme."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import IdentityTransform

from toolkit.figures import FAINT, INK
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.fits_view import COUNTS, MODELS, SCHEMES, FitsView

_FITS, _DOES_NOT = "#a8cfe8", "#f3f5f7"
_CELL = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)])
_CELL_CODES = np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY])


class Cells(Plot):
    """A grid of short words; a cell that fits is blue and bold.

    Colours and words of all cells are three shapes: a hundred texts would take a tenth of a second.
    """

    def __init__(self, axes: Axes, columns: Sequence[str], fontsize: float) -> None:
        super().__init__(axes, grid="")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(MODELS) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_facecolor(_DOES_NOT)
        for at in range(1, len(columns)):
            axes.axvline(at - 0.5, color="white", linewidth=2)
        for at in range(1, len(MODELS)):
            axes.axhline(at - 0.5, color="white", linewidth=2)
        self._fontsize = fontsize
        self._fitting = self._shape(facecolor=_FITS, edgecolor="white", linewidth=2)
        # Letters are never moved to whole pixels, or thin strokes would vanish.
        look: dict[str, Any] = {"linewidth": 0, "snap": False, "transform": IdentityTransform()}
        self._words = {
            True: self._shape(facecolor=INK, **look), False: self._shape(facecolor=FAINT, **look)
        }  # fmt: skip

    def _shape(self, **look: Any) -> PathPatch:
        return self.moving(self.axes.add_artist(PathPatch(Path(np.zeros((0, 2))), **look)))

    def draw(self, rows: list[list[tuple[str, bool]]]) -> None:
        """Per model and column, the word and whether it fits."""
        self.rows = rows
        cells = [
            (column, row, *cell)
            for row, across in enumerate(rows)
            for column, cell in enumerate(across)
        ]
        self._fitting.set_path(
            _joined((_CELL + np.array([x, y]), _CELL_CODES) for x, y, _, is_fit in cells if is_fit)
        )
        # Whole pixels, so that equal words look alike.
        places = np.round(self.axes.transData.transform([cell[:2] for cell in cells]))
        scale = self.axes.figure.dpi / 72  # pixels per point
        for is_fit, shape in self._words.items():
            words = (
                (place + scale * vertices, codes)
                for place, (_, _, word, fits) in zip(places, cells, strict=True)
                if fits == is_fit
                for vertices, codes in _letters(word, self._fontsize, is_fit)
            )
            shape.set_path(_joined(words))


def _joined(shapes: Iterable[tuple[np.ndarray, np.ndarray]]) -> Path:
    pairs = list(shapes)
    if not pairs:
        return Path(np.zeros((0, 2)))
    vertices, codes = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return Path(vertices, codes)


@functools.lru_cache(maxsize=2048)
def _letters(word: str, size: float, is_bold: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outlines of a word's letters in points, about its middle."""
    glyphs = [_glyph(letter, size, is_bold) for letter in word]
    starts = np.cumsum([0.0, *(advance for _, advance in glyphs)])
    height = _glyph("0", size, is_bold)[0].get_extents().y1
    return [
        (path.vertices + np.array([start - starts[-1] / 2, -height / 2]), path.codes)
        for (path, _), start in zip(glyphs, starts, strict=False)
    ]


@functools.cache
def _glyph(letter: str, size: float, is_bold: bool) -> tuple[Any, float]:
    """A letter's outline, and where the next one begins."""
    font = FontProperties(weight="bold" if is_bold else "normal")
    alone, after = (TextPath((0, 0), text, size, font) for text in ("|", letter + "|"))
    advance = after.get_extents().x1 - alone.get_extents().x1
    return TextPath((0, 0), letter, size, font), advance


class MapPlot(Cells):
    """Share of a chip's memory under the chosen scheme."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, [*map(str, COUNTS)], 8.5)
        axes.set_yticks(range(len(MODELS)), MODELS)
        axes.set_xlabel("chips")
        self._title = self.text(0, -0.75, va="bottom", fontweight="bold", fontsize=11)

    def show(self, view: FitsView) -> None:
        shares = [[view.share(row, at) for at in range(len(COUNTS))] for row in range(len(MODELS))]
        self.draw(
            [
                [(_percent(share), share is not None and share <= 1) for share in row]
                for row in shares
            ]
        )
        self._title.set(text=f"{view.scheme} on {view.chip}", x=-0.5)


class FewestPlot(Cells):
    """Fewest chips that a model fits, under each scheme."""

    def __init__(self, axes: Axes) -> None:
        names = [name.replace(", ", ",\n").replace(" x ", "\nx ") for name in SCHEMES]
        super().__init__(
            axes, [name.replace("data parallel", "data\nparallel") for name in names], 9
        )
        axes.set_yticks([])
        axes.tick_params(axis="x", labelsize=7)
        self.moving(
            axes.text(
                -0.5, -0.75, "fewest chips that fit", va="bottom", fontweight="bold", fontsize=11
            )
        )

    def show(self, view: FitsView) -> None:
        rows = [[view.fewest(row, scheme) for scheme in SCHEMES] for row in range(len(MODELS))]
        self.draw(
            [
                [("–" if cell is None else str(cell), cell is not None) for cell in row]
                for row in rows
            ]
        )


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share < 9.995 else f"{share:.0f}x"
