"""Softmax over blocks of keys: the maximum rises, and what was summed is scaled down to it.

    m' = max(m, max_j s_j),   l' = e^(m - m') l + sum_j e^(s_j - m'),
    o' = e^(m - m') o + sum_j e^(s_j - m') v_j,   and in the end o / l

Keys are those of `word_key`, and a word asks for its like.

Source: Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022 (FlashAttention), section 3.1.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from toolkit.figures import look
from toolkit.figures.axes import set_limits
from toolkit.lab.attention.reading import MAX_TOKENS, SENTENCE, SHARPNESS, VALUE_SIZE, word_keys
from toolkit.lab.kit.controls import Number, Words
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Grid, Scene
from toolkit.lab.kit.text import TextView, looked_at
from toolkit.lab.kit.view import Data

ACROSS = 6  # words of a line


@dataclass(frozen=True)
class OnlineView(TextView):
    """The softmax of one word over all words up to it, block by block."""

    block: int  # keys of a block
    scores: Float[np.ndarray, "time"]  # of all keys up to the word [time]
    # maxima, sums, outputs: after each block; the first is before any [blocks + 1, ...]
    maxima: Float[np.ndarray, "moments"]
    sums: Float[np.ndarray, "moments"]
    outputs: Float[np.ndarray, "moments value"]

    @property
    def blocks(self) -> int:
        """Blocks that are read."""
        return len(self.maxima) - 1

    @property
    def factors(self) -> Float[np.ndarray, "blocks"]:
        """What each block multiplies the sums before it by."""
        return np.exp(self.maxima[:-1] - self.maxima[1:])

    def data(self) -> Data:
        return {
            "block": [*range(1, self.blocks + 1)],
            "largest score so far": [*map(float, self.maxima[1:])],
            "old sums times": [*map(float, self.factors)],
            "sum of exponentials": [*map(float, self.sums[1:])],
        }

    def sentence(self) -> str:
        rises = int((self.factors[1:] < 1).sum())
        weight = float(np.exp(self.scores.max() - self.maxima[-1]) / self.sums[-1])
        return (
            f"{self.place_in_words} softmax attention reads {len(self.scores)} keys in "
            f"{self.blocks} blocks of {self.block}. After the first the maximum rises {rises} "
            f"times, and each time all that was summed is scaled down; in the end the largest "
            f"weight is {weight:.0%}, as if all scores had been known at once."
            f"{self.left_out_in_words}"
        )

    def footnote(self) -> str:
        return "Computed here; keys and values are fixed and random, nothing is trained."


def online_view(text: str, *, token: int, block: int, sharpness: float) -> OnlineView:
    """The sums after each block."""
    given = looked_at(text.split(), token, MAX_TOKENS)
    count = given["token"] + 1
    keys = word_keys(given["words"], MAX_TOKENS)[:count].astype(float)
    values = np.random.default_rng(3).standard_normal((MAX_TOKENS, VALUE_SIZE))[:count]
    scores = sharpness * keys @ keys[-1]
    most, total, out = -np.inf, 0.0, np.zeros(VALUE_SIZE)
    found = [(most, total, out)]
    for first in range(0, count, block):
        own, seen = scores[first : first + block], values[first : first + block]
        new = max(most, own.max())
        kept, parts = np.exp(most - new), np.exp(own - new)
        most, total, out = new, kept * total + parts.sum(), kept * out + parts @ seen
        found.append((most, total, out))
    maxima, sums, outputs = (np.array(x) for x in zip(*found, strict=True))
    return OnlineView(
        **given, block=block, scores=scores, maxima=maxima, sums=sums, outputs=outputs
    )


class MaximumPlot(Plot):
    """The scores, and the maximum that rises over the blocks above."""

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Scores, and the largest so far", grid="y", xticks=[])
        self.scores = self.marks(look("window").colour, "o", markersize=4.5)
        self.most = self.line(drawstyle="steps-post", **look("full").line)

    def show(self, view: OnlineView) -> None:
        places = (np.arange(len(view.scores)) + 0.5) / view.block
        self.scores.set_data(places, view.scores)
        self.most.set_data(range(view.blocks + 1), [*view.maxima[1:], view.maxima[-1]])
        low = float(np.floor(view.scores.min() - 0.5))
        set_limits(self.axes, x=(0, view.blocks), y=(low, float(np.ceil(view.maxima[-1] + 0.5))))


def online_scene(view: OnlineView) -> Scene:
    """Weights as far as they are known, twice per block: what is known is scaled, then more is
    read; and the output so far beside the one in the end."""
    count = len(view.scores)
    rows = -(-count // ACROSS)
    times, weights, outs, notes = [], [], [], list[tuple[float, str]]()
    for at in range(view.blocks):
        new, first = view.maxima[at + 1], at * view.block
        for half, seen in enumerate((first, min(first + view.block, count))):
            times.append(at + half / 2)
            cells = np.full(rows * ACROSS, np.inf)
            cells[:seen] = np.exp(view.scores[:seen] - new)
            weights.append(cells.reshape(rows, ACROSS))
            out = view.outputs[at + 1] if half else view.outputs[at] * view.factors[at]
            total = view.sums[at + 1] if half else view.sums[at] * view.factors[at]
            outs.append([out / max(total, 1e-30), view.outputs[-1] / view.sums[-1]])
        number = f"Block {at + 1} of {view.blocks}"
        factor = view.factors[at]
        notes += [
            (float(at), f"{number}: its largest score makes the maximum {new:.2f}; what was summed "
             f"is multiplied by {factor:.2g}." if at else f"{number}: the maximum is {new:.2f}."),
            (at + 0.5, f"{number} is added: the sum is {view.sums[at + 1]:.3g}."),
        ]  # fmt: skip
    outputs, labels = np.array(outs), [*view.words[:count], *[""] * (rows * ACROSS - count)]
    grids = (
        Grid("e to the score minus the largest so far", (0, 0, 0.55, 1), [""] * rows,
             [""] * ACROSS, times, np.array(weights), labels),
        Grid("Output so far, and in the end", (0.57, 0.1, 0.43, 0.75), ["so far", "in the end"],
             [""] * VALUE_SIZE, times, outputs / max(float(np.abs(outputs).max()), 1e-9)),
    )  # fmt: skip
    return Scene(
        end=float(view.blocks), words=view.sentence(), unit="blocks", tall=0.2, grids=grids,
        notes=tuple(notes),
    )  # fmt: skip


class OnlinePanel(PlayedPanel):
    """Online softmax that plays: blocks of keys, a maximum that rises, sums that are rescaled.

    Example:
        >>> panel = OnlinePanel(block=4)
        >>> bool(panel.view.factors.max() <= 1)
        True
    """

    title = "Softmax in blocks: what is known before all scores are?"
    figure_size = (9.6, 2.1)

    text = Words("Sentence", SENTENCE, "Up to 24 words; press Enter")
    token = Number(
        "Token", 12, low=1, high=MAX_TOKENS, explanation="That asks",
        maximum=lambda view: len(view.words),
    )  # fmt: skip
    block = Number("Block", 3, low=1, high=12, explanation="Keys that are read together")
    sharpness = Number(
        "Sharpness", SHARPNESS, low=0.5, high=12.0, step=0.5, explanation="Length of the query"
    )

    def compute(self, *, text: str, token: int, block: int, sharpness: float) -> OnlineView:
        return online_view(text, token=token, block=block, sharpness=sharpness)

    scene = staticmethod(online_scene)
    places = ((MaximumPlot, (0.05, 0.2, 0.93, 0.62)),)
