"""The plots of `FitsPanel`: memory needed on the map, and the fewest chips by scheme."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.figures import FAINT, INK
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.fits_view import COUNTS, MODELS, SCHEMES, FitsView

_FITS = ListedColormap(["#f3f5f7", "#a8cfe8"])


class Cells(Plot):
    """A grid of short words; a cell that fits is blue and bold."""

    def __init__(self, axes: Axes, columns: Sequence[str], fontsize: float) -> None:
        super().__init__(axes)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        shape = len(MODELS), len(columns)
        self._image = self.image(shape, _FITS, 0, 1)
        axes.set_xticks(range(len(columns)), columns)
        for at in range(1, len(columns)):
            axes.axvline(at - 0.5, color="white", linewidth=2)
        for at in range(1, len(MODELS)):
            axes.axhline(at - 0.5, color="white", linewidth=2)
        look: dict[str, Any] = {"fontsize": fontsize, "ha": "center", "va": "center"}
        self.words = [
            [self.text(column, row, **look) for column in range(len(columns))]
            for row in range(len(MODELS))
        ]

    def draw(self, rows: list[list[tuple[str, bool]]]) -> None:
        """Per model and column, what is said and whether it fits."""
        self._image.set_data([[float(is_fit) for _, is_fit in row] for row in rows])
        for texts, row in zip(self.words, rows, strict=True):
            for text, (said, is_fit) in zip(texts, row, strict=True):
                text.set(
                    text=said, fontweight="bold" if is_fit else "normal",
                    color=INK if is_fit else FAINT,
                )  # fmt: skip


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
            [[(_percent(one), one is not None and one <= 1) for one in row] for row in shares]
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
            [[("–" if one is None else str(one), one is not None) for one in row] for row in rows]
        )


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share < 9.995 else f"{share:.0f}x"
