"""The plots of `DecodePanel`: a row per scheme, and how much faster each is than `replicate`."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from toolkit.figures import ACCENT, FAINT, INK, Look, log_axes, look
from toolkit.lab.kit.plot import Plot
from toolkit.lab.latent.decode_view import (
    CONTEXTS,
    PUBLISHED,
    PUBLISHED_CONTEXTS,
    SCHEMES,
    TITLES,
    DecodeView,
)
from toolkit.lab.latent.holding import ARRAYS, Held
from toolkit.measure import in_words

HELD, WHOLE = "#2f7fb8", "#eef1f4"
_LOOKS: dict[str, Look] = dict(
    zip(SCHEMES, map(look, ("full", "window", "gdn", "fourth", "fifth")), strict=True)
)
_LEAST, _MOST = 0.4, 12  # times as fast


class HoldingPlot(Plot):
    """One array under every scheme: its whole, and in it the part of the chosen chip."""

    def __init__(self, axes: Axes, array: str, title: str) -> None:
        super().__init__(axes)
        self._at = ARRAYS.index(array)
        axes.set_title(title, fontsize=9.5, loc="center")
        axes.set(xlim=(0, 1), ylim=(len(SCHEMES), 0), xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        self.parts = []
        for row in range(len(SCHEMES)):
            axes.add_patch(_box(row, WHOLE, FAINT))
            self.parts.append(self.moving(axes.add_patch(_box(row, HELD, INK))))

    def show(self, view: DecodeView) -> None:
        for row, (scheme, part) in enumerate(zip(SCHEMES, self.parts, strict=True)):
            part.set_bounds(*bounds_of(view.shards[scheme][ARRAYS[self._at]], row))


def bounds_of(array: Held, row: int) -> tuple[float, float, float, float]:
    """Left, top, width and height of a part in the row of its scheme, which is 0.72 high."""
    (left, width), (top, height) = array.across, array.along
    return left, row + 0.14 + 0.72 * top, width, 0.72 * height


def _box(row: int, colour: str, edge: str) -> Rectangle:
    return Rectangle(
        (0, row + 0.14), 1, 0.72, facecolor=colour, edgecolor=edge, linewidth=0.8, clip_on=False
    )


class StepPlot(Plot):
    """Predicted step times as bars, with memory per chip and collectives in words."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Step, sent (hatched); attention's memory", fontsize=9.5)
        axes.grid(False)
        axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(len(SCHEMES), 0))
        axes.spines["bottom"].set_visible(False)
        rows = range(len(SCHEMES))
        look: dict[str, Any] = {"height": 0.3, "edgecolor": INK, "linewidth": 0.6}
        places = [row + 0.29 for row in rows]
        self.bars = list(map(self.moving, axes.barh(places, 0, color="#a8cfe8", **look)))
        sent = axes.barh(places, 0, color="white", hatch="////", **look)
        self._sent = list(map(self.moving, sent))
        self._words = [self.text(0.01, row + 0.29, fontsize=8.5, va="center") for row in rows]
        # These do not change: the kinds depend only on the scheme.
        self.below = [axes.text(0.01, row + 0.68, "", fontsize=8, va="center") for row in rows]

    def show(self, view: DecodeView) -> None:
        most = max(cost.seconds for cost in view.costs) / 0.52  # the words need the rest
        rows = zip(view.costs, self.bars, self._sent, self._words, self.below, strict=True)
        for cost, bar, sent, words, below in rows:
            bar.set_width(cost.seconds / most)
            sent.set_width(cost.collective_seconds / most)
            memory = in_words(cost.memory_bytes, "bytes") + ("" if cost.fits else ": too much")
            label = f"{in_words(view.step_seconds(cost), 'seconds')}; {memory}"
            words.set(text=label, x=cost.seconds / most + 0.01)
            kinds = ", ".join(kind for kind, _ in cost.collectives) or "none"
            sends = f"sends: {kinds}" + ("" if cost.is_exact else " (approximate)")
            if sends != below.get_text():
                below.set_text(sends)


class FasterPlot(Plot):
    """Step time of `replicate` over each scheme's, along the context; published points beside."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Times as fast as replicate")
        log_axes(axes, x_unit="tokens", y_unit="")
        axes.set(xlim=(CONTEXTS[0] / 1.1, CONTEXTS[-1] * 1.1), ylim=(_LEAST, _MOST))
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.set_xlabel("context, tokens per row", fontsize=9.5, labelpad=1)
        self._break_even = self.line(
            color=FAINT, linestyle=":", linewidth=1.8, label="from here tpla reads less"
        )
        self._now = self.line(color=ACCENT, linewidth=1.2, label="chosen context")
        self.lines = {
            scheme: self.line(label=f"{scheme}, modelled", **_LOOKS[scheme].line)
            for scheme in SCHEMES
        }
        for (model, ratios), marker in zip(PUBLISHED.items(), "sD", strict=True):
            axes.plot(
                PUBLISHED_CONTEXTS, ratios, color=INK, marker=marker, linestyle="none",
                markersize=4.5, fillstyle="none", label=f"tpla, {TITLES[model]}, recorded",
            )  # fmt: skip
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.03, 1.04), fontsize=9.5, labelspacing=0.3,
            handlelength=2.8, borderpad=0,
        )  # fmt: skip

    def show(self, view: DecodeView) -> None:
        for scheme, line in self.lines.items():
            line.set_data(CONTEXTS, view.faster[scheme])
        self._break_even.set_data([view.break_even] * 2, [_LEAST, _MOST])
        self._now.set_data([view.context] * 2, [_LEAST, _MOST])
