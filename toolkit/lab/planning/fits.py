"""Which models fit which numbers of chips, under six schemes."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import IdentityTransform

from toolkit.figures import FAINT, INK
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.planning.memory import CHIP
from toolkit.measure.words import counted
from toolkit.planning import Prediction, what_fits
from toolkit.planning.models import DENSE
from toolkit.planning.search.what_fits import schemes

MODELS = tuple(DENSE)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCHEMES = tuple(schemes(1))
Found = dict[tuple[int, int, str], Prediction | None]


@dataclass(frozen=True)
class FitsView(View):
    """Every model on every number of chips."""

    chip: str
    scheme: str
    sequences: int
    context: int
    found: Found

    def share(self, model: int, count: int) -> float | None:
        """Of a chip's memory that is needed; None where the scheme does not divide the model."""
        prediction = self.found[model, count, self.scheme]
        return None if prediction is None else prediction.memory.total / prediction.limit

    def fewest(self, model: int, scheme: str) -> int | None:
        """The smallest number of chips that a model fits."""
        fitting = (
            chips
            for count, chips in enumerate(COUNTS)
            if (prediction := self.found[model, count, scheme]) is not None and prediction.fits
        )
        return next(fitting, None)

    def data(self) -> Data:
        def in_word(value) -> str:
            return "none" if value is None else str(value)

        shares = {
            f"on {chips} (share)": [self.share(model, count) for model in range(len(MODELS))]
            for count, chips in enumerate(COUNTS)
        }
        fewest = {
            f"fewest chips, {scheme}": [
                in_word(self.fewest(model, scheme)) for model in range(len(MODELS))
            ]
            for scheme in SCHEMES
        }
        return {"model, modelled": [*MODELS], **shares, **fewest}

    def sentence(self) -> str:
        entries = []
        for model, name in enumerate(MODELS):
            fewest = self.fewest(model, self.scheme)
            entries.append(f"{name} {'nowhere' if fewest is None else f'from {fewest}'}")
        return (
            f"{self.scheme} on {self.chip}, {counted(self.sequences, 'sequence')} of "
            f"{self.context:,} tokens per chip; which numbers of chips fit: "
            f"{', '.join(entries)}. Modelled."
        )

    def footnote(self) -> str:
        return (
            "Left: share of a chip's memory that is needed. Blue and bold: fits. "
            f"{self.sequences} x {self.context:,} tokens per chip; tensor is 4 wide. Modelled."
        )


def fits(*, chip: str, scheme: str, sequences: int, context: int) -> FitsView:
    """The map of one kind of chip; `sequences` and `context` are those of one chip's batch."""
    return FitsView(chip, scheme, sequences, context, _found(chip, sequences, context))


@functools.lru_cache(maxsize=16)
def _found(chip: str, sequences: int, context: int) -> Found:
    clusters = [f"{chip}:{count}" for count in COUNTS]
    return what_fits(MODELS, clusters, sequences_per_chip=sequences, sequence_length=context)


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
        words = {None: ("–", False)} | {count: (str(count), True) for count in COUNTS}
        self.draw([[words[cell] for cell in row] for row in rows])


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share < 9.995 else f"{share:.0f}x"


class FitsPanel(Panel):
    """Which models fit how many chips under a scheme, and the fewest chips under each.

    Example:
        >>> panel = FitsPanel(chip="h100", scheme="ZeRO-3, recomputing")
        >>> panel.view.fewest(3, "data parallel") is None  # llama-3-8b
        True
    """

    title = "What fits?"
    figure_size = (9.6, 4.6)

    chip = CHIP
    scheme = Choice("Scheme", "ZeRO-3, recomputing", {name: name for name in SCHEMES})
    # All predictions of a map take longer than a frame: on release.
    sequences = Number(
        "Sequences", 1, low=1, high=32, powers_of_two=True, is_continuous=False,
        explanation="Per chip",
    )  # fmt: skip
    context = Number(
        "Context length", 4096, low=1024, high=131_072, powers_of_two=True, is_continuous=False,
        explanation="Tokens per sequence",
    )  # fmt: skip

    compute = staticmethod(fits)
    places = (
        (MapPlot, (0.123, 0.215, 0.457, 0.685)),
        (FewestPlot, (0.6, 0.215, 0.39, 0.685)),
    )
