"""The latents of a trained layer in slices: softmaxes, errors, and the effect of the norm."""

import functools
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes

from toolkit.attention import latent
from toolkit.attention.latent.tpla import Norm, slice_scores
from toolkit.figures import ACCENT, FAINT, INK, Look, look
from toolkit.figures.axes import round_up, set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.view import Data, View
from toolkit.looped import load_model
from toolkit.looped.mixing.latent import MLALayer
from toolkit.measure.stored import stored_folder

TEXT = "the statement raises an exception if the statement "
CALIBRATION = (
    "A function call always assigns values to all parameters mentioned in the parameter list, "
    "either from positional arguments, from keyword arguments, or from default values. When a "
    "class is called, a new instance of it is created and passed to its initialiser. The name is "
    "looked up in the module, and an error is raised if it is not found there. An object that is "
    "not hashable cannot be a key of a dictionary, and comparing two objects of different types "
    "returns false unless one of them knows better. If the expression is true the suite is "
    "executed, and otherwise the loop ends and the rest of the block is run as it stands. "
)


class SmallLayer(NamedTuple):
    """One layer: sizes, weights, and its normalised input for the two texts."""

    config: latent.LatentConfig
    weights: latent.LatentWeights
    x: Float[Array, "1 time width"]
    calibration: Float[Array, "1 time width"]


@functools.cache
def small_layers() -> tuple[SmallLayer, ...]:
    """The layers of the stored model, first one first."""
    model = load_model(stored_folder("latent") / "mla-mla.safetensors")

    @jax.jit
    def inputs_of(tokens):
        stream, read = model.embedding(tokens), []
        for block in model.blocks:
            read.append(block.mixer_norm(stream))
            stream = block(stream)[0]
        return read

    # Both texts in one program: what pads the shorter one is after it, and not seen.
    longest = len(CALIBRATION.encode())
    padded = [text.encode().ljust(longest) for text in (TEXT, CALIBRATION)]
    read = inputs_of(jnp.asarray(np.array([[*text] for text in padded], np.int32)))
    layers = []
    for block, x in zip(model.blocks, read, strict=True):
        assert isinstance(block.mixer, MLALayer)
        sizes, weights = block.mixer.sizes, block.mixer.weights()
        layers.append(SmallLayer(sizes, weights, x[:1, : len(TEXT.encode())], x[1:]))
    return tuple(layers)


def record() -> dict[str, Any]:
    """The record of the model's training."""
    return json.loads((stored_folder("latent") / "mla-mla.json").read_text())


BASES = ("none", "hadamard", "principal")
NORMS: tuple[Norm, ...] = ("sliced", "exact")


class Sliced(NamedTuple):
    """The effect of slicing a layer on the text."""

    weights: latent.LatentSlices  # the layer's, cut
    shares: np.ndarray  # shares of the latents' energy on the calibration text [slices]
    report: latent.SlicingReport  # errors on the text


@functools.cache
def sliced_layer(layer: int, basis: str, slices: int, norm: Norm) -> Sliced:
    """One layer of the stored model with its latents in another basis and sliced; cached."""
    config, weights, x, calibration = small_layers()[layer]
    latents = latent.calibration_latents(calibration, weights, config)
    bases = {
        "none": lambda: None,
        "hadamard": lambda: latent.hadamard_basis(config.latent_size, jax.random.key(0)),
        "principal": lambda: latent.principal_basis(latents),
    }
    folded = latent.fold(weights, bases[basis]())
    shares = latent.energy_shares(latent.calibration_latents(calibration, folded, config), slices)
    cut = latent.slice_latents(folded, slices, shares=shares)
    return Sliced(cut, shares, latent.slicing_report(x, cut, config, norm=norm))


@functools.cache
def softmaxes(layer: int, basis: str, slices: int, norm: Norm) -> tuple[np.ndarray, np.ndarray]:
    """Of the whole latent [heads, queries, keys], and of every slice [slices, heads, ...]."""
    config, _, x, _ = small_layers()[layer]
    cut = sliced_layer(layer, basis, slices, norm).weights
    scores = jax.jit(slice_scores, static_argnames=("config", "norm"))(
        x, cut, config=config, norm=norm
    )
    visible = np.tri(x.shape[1], dtype=bool)

    def softmax(found):
        masked = np.where(visible, np.asarray(found, np.float64), -np.inf)
        made = np.exp(masked - masked.max(axis=-1, keepdims=True))
        return made / made.sum(axis=-1, keepdims=True)

    return softmax(scores.true[0, 0]), softmax(scores.slices[:, 0])


@dataclass(frozen=True)
class SliceView(View):
    """The softmaxes of one query, and the errors under every basis and norm."""

    layer: int
    basis: str
    slices: int
    norm: Norm
    head: int
    token: int
    true: np.ndarray  # weights on the tokens up to the query
    own: np.ndarray  # weights of every slice [slices, keys]
    shares: np.ndarray
    report: latent.SlicingReport
    errors: dict[tuple[str, str], float]  # (basis, norm) -> relative error of the layer's output

    def data(self) -> Data:
        letters = ["space" if letter == " " else letter for letter in TEXT[: self.token + 1]]
        slices = {f"slice {n + 1}": [*map(float, row)] for n, row in enumerate(self.own)}
        return {"token": letters, "true weight": [*map(float, self.true)], **slices}

    def sentence(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        apart = ", ".join(f"{float(divergence):.2f}" for divergence in self.report.divergence)
        bought = self.errors[self.basis, "sliced"] - self.errors[self.basis, "exact"]
        return (
            f"Layer {self.layer}, basis {self.basis}, {self.slices} slices with {shares} of the "
            f"energy, norm {self.norm}: the layer's output is off by {self.report.output_error:.1%}"
            f", the slices' softmaxes are {apart} nats from the true one. The exact norm takes "
            f"{100 * bought:.1f} points off the error. Drawn: head {self.head}, the query at byte "
            f"{self.token + 1} of “{TEXT}”."
        )

    def footnote(self) -> str:
        loss = record()["result"]["held_out_loss"]
        return (
            f"Measured here on a small trained model (recorded: {loss:.2f} nats per byte); "
            "bases and shares of energy from another text."
        )


def slice_view(
    *, layer: int, basis: str, slices: int, norm: Norm, head: int, token: int
) -> SliceView:
    """The effect of slicing on one query of the text; `layer` and `head` count from 1."""
    chosen = layer - 1, basis, slices, norm
    found, (true, own) = sliced_layer(*chosen), softmaxes(*chosen)
    errors = {
        (basis, other): sliced_layer(layer - 1, basis, slices, other).report.output_error
        for basis in BASES
        for other in NORMS
    }
    token = min(token, len(TEXT) - 1)
    seen = slice(0, token + 1)
    return SliceView(
        layer, basis, slices, norm, head, token, true[head - 1, token, seen],
        own[:, head - 1, token, seen], found.shares, found.report, errors,
    )  # fmt: skip


_MOST_SLICES = 4
_LOOKS: list[Look] = [look(name) for name in ("full", "window", "gdn", "fourth")]


class SoftmaxPlot(Plot):
    """The true weights as bars, those of every slice as marks, letter by letter."""

    drag = Drag("token", "x")

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Weights of the chosen query", grid="")
        axes.set(xlim=(-0.7, len(TEXT) - 0.3), ylim=(0, 1))
        axes.set_xticks(range(len(TEXT)), TEXT.replace(" ", "·"), fontsize=9)
        axes.tick_params(axis="x", length=0)
        self.bars = self.bars_at(range(len(TEXT)), 0.8, color="#cfd6dc")
        self._query = self.line(color=ACCENT, linewidth=1.2)
        # Weights are apart, so no line joins them; a slice that is not there has no name either.
        self.marks_of = [self.marks(look.colour, look.marker, markersize=6) for look in _LOOKS]
        self._labels = [
            self.text(0.47 + 0.11 * n, 1.04, transform=axes.transAxes, color=look.colour,
                      fontsize=9.5, fontweight="bold", clip_on=False)
            for n, look in enumerate(_LOOKS)
        ]  # fmt: skip
        axes.text(0.41, 1.04, "bars: true", transform=axes.transAxes, fontsize=9.5, ha="center")

    def show(self, view: SliceView) -> None:
        weights = [*view.true, *[0.0] * (len(TEXT) - len(view.true))]
        for bar, weight in zip(self.bars, weights, strict=True):
            bar.set_height(weight)
        offsets = np.linspace(-0.25, 0.25, view.slices)
        symbols = {"o": "●", "s": "■", "^": "▲", "D": "◆"}
        for number, (marks, seen) in enumerate(zip(self.marks_of, _LOOKS, strict=True)):
            is_there = number < view.slices
            own = view.own[number] if is_there else []
            marks.set_data(np.arange(len(own)) + (offsets[number] if is_there else 0), own)
            name = f"{symbols[seen.marker]} slice {number + 1}" if is_there else ""
            self._labels[number].set_text(name)
        top = max(view.true.max(), view.own.max())
        set_limits(self.axes, y=(0, round_up(1.05 * float(top))))
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
        set_limits(self.axes, x=(0, 1.25 * round_up(max(view.errors.values()))))
        for which, bar in self.bars.items():
            error, is_chosen = view.errors[which], which == (view.basis, view.norm)
            bar.set_width(min(error, 1))
            bar.set(edgecolor=ACCENT if is_chosen else FAINT, linewidth=2 if is_chosen else 0.8)
            self._words[which].set(text=f"{error:.1%}", x=min(error, 1) * 1.02 + 0.003)


class SlicePanel(Panel):
    """The softmaxes of a trained latent's slices, the true one, and the error.

    Example:
        >>> panel = SlicePanel(basis="principal", norm="exact")
        >>> panel.view.own.shape == (2, panel.token + 1)
        True
    """

    title = "A latent cut in slices: what does each softmax see?"
    figure_size = (9.6, 5.2)
    opening_seconds = 8
    has_palette = True

    layer = Number("Layer", 2, low=1, high=2)
    basis = Choice("Basis", "hadamard", {name: name for name in BASES})
    slices = Choice("Slices", 2, {f"g = {n}": n for n in (2, _MOST_SLICES)})
    norm = Choice(
        "Norm", "sliced", {name: name for name in NORMS},
        explanation="Of each slice from its own features, or of the whole latent",
    )  # fmt: skip
    head = Number("Head", 2, low=1, high=4)
    token = Number("Query", 26, low=0, high=len(TEXT) - 1, explanation="Its byte")

    compute = staticmethod(slice_view)
    places = (
        (SoftmaxPlot, (0.05, 0.55, 0.93, 0.37)),
        (ErrorPlot, (0.1, 0.1, 0.6, 0.31)),
    )
