"""The plot of `ChipMemoryPanel`: the categories as a cascade, and the chip's limit."""

from matplotlib.axes import Axes

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.memory_view import ChipMemoryView
from toolkit.measure import in_words
from toolkit.planning import Memory

ROWS = (*Memory._fields, "total")


class CascadePlot(Plot):
    """Each category starts where the last one ends; the total beside the limit."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Bytes on the chip that holds most (modelled)", pad=24)
        axes.grid(False)
        self.name_rows(ROWS)
        # Shares of the longer of total and limit: limits that stay make a redraw cheap.
        axes.set(xticks=[], xlim=(0, 1.1), ylim=(len(ROWS) - 0.5, -0.5))
        axes.spines["bottom"].set_visible(False)
        bars = axes.barh(range(len(ROWS)), 0, 0.62, color=look("full").colour, linewidth=0)
        self.bars = [self.moving(bar) for bar in bars]
        self._limit = self.line(color=ACCENT, linewidth=2, linestyle="--")
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the limit does not cross
        self._words = [
            self.text(0, row, fontsize=9.5, va="center", bbox=behind) for row in range(len(ROWS))
        ]
        self._limit_words = self.text(
            0, -0.6, va="bottom", fontsize=9.5, color=ACCENT, fontweight="bold"
        )

    def show(self, view: ChipMemoryView) -> None:
        found = view.prediction
        total, limit = found.memory.total, found.limit
        longest, start = max(total, limit), 0
        for bar, words, size in zip(
            self.bars, self._words, [*view.categories.values(), total], strict=True
        ):
            is_total = words is self._words[-1]
            left = 0 if is_total else start
            bar.set(x=left / longest, width=size / longest)
            if is_total:
                bar.set(hatch="" if found.fits else "//", edgecolor="white")
            words.set(
                x=(left + size) / longest + 0.01, text=in_words(size, "bytes"),
                fontweight="bold" if is_total else "normal", color=INK if size else FAINT,
            )  # fmt: skip
            start += size
        self._limit.set_data([limit / longest] * 2, [-0.5, len(ROWS) - 0.5])
        verdict = "fits" if found.fits else "does not fit"
        has = f"the {in_words(limit, 'bytes')} of {found.cluster.chip.name}"
        self._limit_words.set(
            x=limit / longest, text=f"{verdict} {has}",
            ha="right" if limit > longest / 2 else "left",
        )  # fmt: skip
