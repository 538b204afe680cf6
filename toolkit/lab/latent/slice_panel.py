"""The latents of a trained layer in slices: softmaxes, errors, and the effect of the norm."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK, Look, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.latent.slice_view import BASES, NORMS, SliceView, slice_view
from toolkit.lab.latent.small_layers import TEXT

_MOST_SLICES = 4
_LOOKS: list[Look] = [look(name) for name in ("full", "window", "gdn", "fourth")]


class SoftmaxPlot(Plot):
    """The true weights as bars, those of every slice as marks, letter by letter."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(
            axes, title="Weights of the chosen query: true (bars) and of each slice", grid=""
        )
        axes.set(xlim=(-0.7, len(TEXT) - 0.3), ylim=(0, 1))
        axes.set_xticks(range(len(TEXT)), TEXT.replace(" ", "·"), fontsize=9)
        axes.tick_params(axis="x", length=0)
        self.bars = list(map(self.moving, axes.bar(range(len(TEXT)), 0, color="#cfd6dc")))
        self._query = self.line(color=ACCENT, linewidth=1.2)
        self.marks_of = [
            self.line(
                label=f"slice {n + 1}",
                marker=look.marker,
                markersize=4.5,
                linewidth=1.1,
                **look.line,
            )
            for n, look in enumerate(_LOOKS)
        ]
        axes.legend(loc="upper left", ncols=_MOST_SLICES, fontsize=9)

    def show(self, view: SliceView) -> None:
        weights = [*view.true, *[0.0] * (len(TEXT) - len(view.true))]
        for bar, weight in zip(self.bars, weights, strict=True):
            bar.set_height(weight)
        for number, line in enumerate(self.marks_of):
            own = view.own[number] if number < view.slices else []
            line.set_data(range(len(own)), own)
        self._query.set_data([view.token] * 2, [0, 1])


class ErrorPlot(Plot):
    """Error of the layer's output by basis and norm; the chosen one is framed."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Error of what the layer adds to the stream", grid="")
        axes.set(xlim=(0, 1.15), ylim=(len(BASES) - 0.5, -0.5), xticks=[])
        self.name_rows(BASES)
        axes.spines["bottom"].set_visible(False)
        self.bars, self._words = {}, {}
        styles: tuple[dict[str, Any], ...] = (
            {"color": "white", "hatch": "//"}, {"color": "#a8cfe8"},
        )  # fmt: skip
        for norm, offset, style in zip(NORMS, (-0.2, 0.2), styles, strict=True):
            places = [row + offset for row in range(len(BASES))]
            bars = axes.barh(places, 0, 0.34, edgecolor=FAINT, label=f"{norm} norm", **style)
            for basis, place, bar in zip(BASES, places, bars, strict=True):
                self.bars[basis, norm] = self.moving(bar)
                self._words[basis, norm] = self.text(0, place, fontsize=9, va="center", color=INK)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    def show(self, view: SliceView) -> None:
        for which, bar in self.bars.items():
            error, is_chosen = view.errors[which], which == (view.basis, view.norm)
            bar.set_width(min(error, 1))
            bar.set(edgecolor=ACCENT if is_chosen else FAINT, linewidth=2 if is_chosen else 0.8)
            self._words[which].set(text=f"{error:.1%}", x=min(error, 1) + 0.015)


class SlicePanel(Panel):
    """The softmaxes of a trained latent's slices, the true one, and the error.

    Example:
        >>> panel = SlicePanel(basis="principal", norm="exact")
        >>> panel.view.own.shape == (2, panel.token + 1)
        True
    """

    title = "A latent cut in slices: what does each softmax see?"
    figure_size = (9.6, 5.2)
    has_palette = True

    layer = Number("Layer", 2, low=1, high=2)
    basis = Choice("Basis", "hadamard", {name: name for name in BASES})
    slices = Choice("Slices", 2, {f"g = {n}": n for n in (2, _MOST_SLICES)})
    norm = Choice(
        "Norm", "sliced", {name: name for name in NORMS},
        explanation="Of each slice from its own features, or of the whole latent",
    )  # fmt: skip
    head = Number("Head", 1, low=1, high=4)
    token = Number("Query", len(TEXT) - 8, low=0, high=len(TEXT) - 1, explanation="Its byte")

    def compute(self, **state: Any) -> SliceView:
        return slice_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            SoftmaxPlot(figure.add_axes((0.05, 0.55, 0.93, 0.37))),
            ErrorPlot(figure.add_axes((0.1, 0.1, 0.6, 0.31))),
        ]
