"""Decoding with latent attention on several chips: shards, communication and time.

Chips of the tpla schemes are a grid: `slices` along the latents, the others along the heads, and
chip 0 and 1 are neighbours along the heads.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from toolkit.attention.latent import PRESETS
from toolkit.figures import ACCENT, FAINT, INK, Look, log_axes, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.planning import DecodeCost, break_even_tokens, decode_cost, plan_decode

ARRAYS = ("heads", "down", "up", "cache")

Part = tuple[float, float]  # start and length along one side, as shares of the whole
WHOLE: Part = (0.0, 1.0)


class Held(NamedTuple):
    """One chip's shard of an array: a rectangle, as shares of its two sides."""

    across: Part  # start and length along heads ("heads", "up") or latents ("down", "cache")
    # Start and length along latents ("up") or tokens of all rows ("cache"); else everything
    along: Part

    @property
    def share(self) -> float:
        """The share of the whole array."""
        return self.across[1] * self.along[1]


def holding(scheme: str, chips: int, slices: int, chip: int) -> dict[str, Held]:
    """A chip's shard of every array of `ARRAYS` under a scheme of `toolkit.planning`.

    heads  what makes queries, and the output projection, cut by heads
    down   what makes latents
    up     keys and values of every head out of a latent
    cache  latents; the rotary keys beside them are cut by tokens or rows alone
    """

    def one_of(parts: int, number: int) -> Part:
        return number / parts, 1 / parts

    own = one_of(chips, chip)
    if scheme in ("replicate", "data"):
        is_cut = scheme == "replicate"
        heads = own if is_cut else WHOLE
        cache = Held(WHOLE, WHOLE if is_cut else own)
        return dict(zip(ARRAYS, (Held(heads, WHOLE), _ALL, Held(heads, WHOLE), cache), strict=True))
    if scheme == "dcp":
        return {"heads": Held(own, WHOLE), "down": _ALL, "up": _ALL, "cache": Held(WHOLE, own)}
    row, column = divmod(chip, chips // slices)
    latents, heads = one_of(slices, row), one_of(chips // slices, column)
    return {
        "heads": Held(own if scheme == "tpla-lean" else heads, WHOLE),
        "down": Held(latents, WHOLE),
        "up": Held(heads, latents),
        "cache": Held(latents, WHOLE),
    }


_ALL = Held(WHOLE, WHOLE)
ATTENTION_ALONE = 0  # parameters beside it: experts are removed, as in what is published
SCHEMES = ("replicate", "data", "dcp", "tpla", "tpla-lean")
CONTEXTS = tuple(2**power for power in range(10, 21))
TITLES = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite", "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi-K2",
}  # fmt: skip

PUBLISHED_CONTEXTS = tuple(2**power for power in range(10, 16))
PUBLISHED = {
    "deepseek_v3": (1.33, 1.38, 1.45, 1.57, 1.65, 1.79),
    "kimi_k2": (1.28, 1.35, 1.51, 1.55, 1.76, 1.93),
}
"""Decode throughput of TPLA over MLA by context: two H800, experts removed, largest batch that fits
(not listed). Source: Tang et al. (2025), arXiv:2508.15881, figure 3."""


@dataclass(frozen=True)
class DecodeView(View):
    """Every scheme at one setting, and how much faster than `replicate` along the context."""

    model: str
    chips: str
    degree: int
    chip: int
    slices: int
    batch: int
    context: int
    costs: tuple[DecodeCost, ...]
    shards: dict[str, dict[str, Held]]  # scheme -> the chosen chip's shards
    # Scheme -> speed relative to `replicate` at every context of `CONTEXTS`
    faster: dict[str, list[float]]
    break_even: float  # context from which TPLA reads less than `replicate`, at this batch
    reason: str  # the planner's reason

    def step_seconds(self, cost: DecodeCost) -> float:
        """Seconds of attention in all layers."""
        return PRESETS[self.model].layers * cost.seconds

    def data(self) -> Data:
        costs = self.costs
        return {
            "scheme": [cost.name for cost in costs],
            "": ["exact" if cost.is_exact else "approximate" for cost in costs],
            "step (seconds)": [self.step_seconds(cost) for cost in costs],
            "per layer (seconds)": [cost.seconds for cost in costs],
            "of it sent (seconds)": [cost.collective_seconds for cost in costs],
            "weights per layer (bytes)": [cost.weight_bytes for cost in costs],
            "cache per layer (bytes)": [cost.cache_bytes for cost in costs],
            "all layers (bytes)": [cost.memory_bytes for cost in costs],
            "fits": ["yes" if cost.fits else "no" for cost in costs],
            "collectives in a layer": [collectives_of(cost) for cost in costs],
        }

    def sentence(self) -> str:
        start = in_words(max(round(self.break_even), 1), "tokens")
        return (
            f"{TITLES[self.model]} on {self.chips}, batch {self.batch:,}, context "
            f"{in_words(self.context, 'tokens')} (modelled). {self.reason} tpla with g = "
            f"{self.slices} reads less than replicate from {start} per row on. Coloured: what chip "
            f"{self.chip} holds."
        )

    def footnote(self) -> str:
        return (
            "Modelled: attention alone, no experts, from published rates of chips and links. "
            "Recorded: Tang et al. (2025), figure 3, 2 x H800, largest batch."
        )


def collectives_of(cost: DecodeCost) -> str:
    """The collectives of a layer in words, with the bytes of each."""
    words = [f"{kind} {in_words(size, 'bytes')}" for kind, size in cost.collectives]
    return ", ".join(words) or "none"


def decode_view(
    *, model: str, kind: str, degree: int, slices: int, batch: int, context: int, chip: int
) -> DecodeView:
    """All schemes on `degree` chips of a kind; `slices` is limited to the chips."""
    chips, slices, chip = f"{kind}:{degree}", min(slices, degree), min(chip, degree - 1)

    cut = {scheme: slices if scheme.startswith("tpla") else 1 for scheme in SCHEMES}

    def costs_at(tokens: int) -> tuple[DecodeCost, ...]:
        how: Any = {"other_parameters": ATTENTION_ALONE}
        return tuple(
            decode_cost(model, batch, tokens, chips, scheme=scheme, slices=own, **how)
            for scheme, own in cut.items()
        )

    costs, along = costs_at(context), [costs_at(tokens) for tokens in CONTEXTS]
    shards = {scheme: holding(scheme, degree, own, chip) for scheme, own in cut.items()}
    faster = {
        scheme: [row[0].seconds / row[at].seconds for row in along]
        for at, scheme in enumerate(SCHEMES)
    }
    break_even = break_even_tokens(model, degree, slices) / batch
    reason = _reason(model, batch, context, chips, costs)
    return DecodeView(
        model, chips, degree, chip, slices, batch, context, costs, shards, faster, break_even,
        reason,
    )  # fmt: skip


def _reason(model: str, batch: int, context: int, chips: str, costs: Any) -> str:
    if not any(cost.fits and cost.is_exact for cost in costs):
        return "No exact scheme fits these chips."
    return plan_decode(model, batch, context, chips, other_parameters=ATTENTION_ALONE).reason


_LOOKS: dict[str, Look] = dict(
    zip(SCHEMES, map(look, ("full", "window", "gdn", "fourth", "fifth")), strict=True)
)
_LEAST, _MOST = 0.4, 12  # times as fast


class HoldingPlot(Plot):
    """One array under every scheme: its whole, and in it the part of the chosen chip."""

    def __init__(self, axes: Axes, array: str, title: str) -> None:
        super().__init__(axes, grid="", xlim=(0, 1), ylim=(len(SCHEMES), 0), xticks=[], yticks=[])
        self._array = array
        axes.set_title(title, fontsize=9.5, loc="center")
        axes.spines[:].set_visible(False)
        self.parts = []
        for row in range(len(SCHEMES)):
            whole, part = (
                axes.add_patch(Rectangle((0, row + 0.14), 1, 0.72, linewidth=0.8, clip_on=False))
                for _ in range(2)
            )
            whole.set(facecolor="#eef1f4", edgecolor=FAINT)
            part.set(facecolor="#2f7fb8", edgecolor=INK)
            self.parts.append(self.moving(part))

    def show(self, view: DecodeView) -> None:
        for row, (scheme, part) in enumerate(zip(SCHEMES, self.parts, strict=True)):
            (left, width), (top, height) = view.shards[scheme][self._array]
            part.set_bounds(left, row + 0.14 + 0.72 * top, width, 0.72 * height)


class StepPlot(Plot):
    """Predicted step times as bars, with memory per chip and collectives in words."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="", xlim=(0, 1), ylim=(len(SCHEMES), 0), xticks=[], yticks=[])
        axes.set_title("Step, sent (hatched); attention's memory", fontsize=9.5)
        axes.spines["bottom"].set_visible(False)
        rows = range(len(SCHEMES))
        look: dict[str, Any] = {"is_flat": True, "edgecolor": INK, "linewidth": 0.6}
        places = [row + 0.29 for row in rows]
        self.bars = self.bars_at(places, 0.3, color="#a8cfe8", **look)
        self._sent = self.bars_at(places, 0.3, color="white", hatch="////", **look)
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


_KINDS = {
    "H100": "h100", "H200": "h200", "H800": "h800",
    "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e",
}  # fmt: skip
# Where each array is drawn: left and width as shares of the figure, and its title.
_COLUMNS = {
    "heads": (0.125, 0.1, "queries,\noutput: heads"),
    "down": (0.25, 0.07, "down:\nlatents"),
    "up": (0.345, 0.08, "up: heads\nx latents"),
    "cache": (0.45, 0.12, "cache: latents\nx tokens"),
}
_BOTTOM, _HEIGHT = 0.475, 0.44


class DecodePanel(Panel):
    """The shards of latent attention when several chips decode, and the time of a step.

    Example:
        >>> panel = DecodePanel(model="deepseek_v3", degree=2, slices=2)
        >>> [cost.name for cost in panel.view.costs if not cost.is_exact]
        ['tpla, g = 2', 'tpla-lean, g = 2']
    """

    title = "Latent attention on several chips: who holds what, and what does a step take?"
    figure_size = (9.6, 6.8)
    has_palette = True

    model = Choice("Model", "deepseek_v3", {title: name for name, title in TITLES.items()})
    kind = Choice("Chips", "h100", _KINDS)
    degree = Choice("How many", 8, {str(n): n for n in (2, 4, 8)})
    slices = Choice(
        "Slices", 2, {f"g = {n}": n for n in (2, 4, 8)},
        explanation="Of the latents, in the tpla schemes; at most one per chip",
    )  # fmt: skip
    batch = Number("Batch", 16, low=1, high=1024, powers_of_two=True, explanation="Rows")
    context = Number(
        "Context", 32768, low=CONTEXTS[0], high=CONTEXTS[-1], powers_of_two=True,
        explanation="Tokens in the cache of every row",
    )  # fmt: skip
    chip = Number(
        "Chip", 1, low=0, high=7, explanation="Whose parts are coloured",
        maximum=lambda view: view.degree - 1,
    )  # fmt: skip

    compute = staticmethod(decode_view)

    def plots(self, figure: Figure) -> list[Plot]:
        for row, scheme in enumerate(SCHEMES):
            figure.text(
                0.112, _BOTTOM + _HEIGHT * (1 - (row + 0.5) / len(SCHEMES)), scheme,
                ha="right", va="center", fontweight="bold", fontsize=9.5,
            )  # fmt: skip
        return [
            *(
                HoldingPlot(figure.add_axes((left, _BOTTOM, width, _HEIGHT)), array, title)
                for array, (left, width, title) in _COLUMNS.items()
            ),
            StepPlot(figure.add_axes((0.6, _BOTTOM, 0.39, _HEIGHT))),
            FasterPlot(figure.add_axes((0.06, 0.115, 0.555, 0.29))),
        ]
