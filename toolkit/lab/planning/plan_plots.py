"""The plots of `PlanPanel`: strategies as a table, and predictions against compiled programs."""

import textwrap
from typing import Any

from matplotlib.axes import Axes

from toolkit.figures import FAINT, INK, look
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.plan_view import PlanView
from toolkit.measure import in_words
from toolkit.planning.grade.by_compiler import summary
from toolkit.planning.search.weigh import RUNNERS_UP

_COLUMNS = {"strategy": (0.0, 52), "step": (0.585, 0), "per chip": (0.69, 0), "reason": (0.8, 20)}
GIB = 2**30


class TablePlot(Plot):
    """One strategy per row, the best first and bold."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(RUNNERS_UP + 1, -0.5))
        style: dict[str, Any] = {"va": "top", "fontsize": 8}
        for name, (left, _) in [*_COLUMNS.items()][1:]:
            axes.text(left, -0.45, name, fontweight="bold", va="top", fontsize=9)
        self._heading = self.text(0, -0.45, fontweight="bold", va="top", fontsize=9)
        for row in range(RUNNERS_UP + 1):
            axes.axhline(row - 0.1, color=FAINT, linewidth=0.6)
        self.rows = [
            [self.text(left, row, **style) for left, _ in _COLUMNS.values()]
            for row in range(RUNNERS_UP + 1)
        ]

    def show(self, view: PlanView) -> None:
        # Letters are what a redraw takes; what all strategies share is said once.
        chunks = {row.strategy.head_chunks for row in view.rows}
        shared = f"head in {max(chunks)} chunks" if len(chunks) == 1 and max(chunks) > 1 else ""
        self._heading.set_text(f"strategy (all: {shared})" if shared else "strategy")
        for at, texts in enumerate(self.rows):
            cells = ("", "", "", "")
            if at < len(view.rows):
                row = view.rows[at]
                cells = (
                    str(row.strategy).removesuffix(f", {shared}"),
                    in_words(row.step_seconds, "seconds"),
                    in_words(row.memory.total, "bytes"),
                    view.remark(row),
                )
            for text, cell, (_, letters) in zip(texts, cells, _COLUMNS.values(), strict=True):
                text.set_text(textwrap.fill(cell, letters) if letters else cell)
                text.set_fontweight("normal" if at else "bold")


class GradePlot(Plot):
    """Predicted memory over compiled memory; on the line, a prediction is exact."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("How far off was it?", fontsize=10.5)
        axes.set_xlabel("compiled (recorded), GiB", fontsize=8.5)
        axes.set_ylabel("predicted (modelled), GiB", fontsize=8.5)
        axes.tick_params(labelsize=8)
        self._errors = self.text(0.02, 0.98, va="top", fontsize=8, transform=axes.transAxes)
        self._exact = self.line(color=INK, linewidth=1, linestyle="--")
        self.dots = self.marks(look("full").colour, "o", markersize=4, alpha=0.7)

    def show(self, view: PlanView) -> None:
        self._errors.set_text(
            summary(view.graded).splitlines()[1].replace(": ", "\n").replace(", ", "\n")
        )
        compiled = [row["memory"] / GIB for row in view.graded]
        predicted = [row["memory"] * (1 + row["memory_error"]) / GIB for row in view.graded]
        self.dots.set_data(compiled, predicted)
        most = 1.05 * max(*compiled, *predicted)
        self._exact.set_data([0, most], [0, most])
        if self.axes.get_xlim()[1] != most:  # the record does not change
            self.axes.set(xlim=(0, most), ylim=(0, most))
