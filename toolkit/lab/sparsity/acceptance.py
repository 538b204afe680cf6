"""Lossless decoding of a batch, round by round: drafted, accepted, corrected.

In a round every row drafts n tokens, one dense pass reads them all, k <= n are kept, and one token
of the dense pass follows: k + 1 tokens per pass. Rows keep different numbers, so they drift apart.
The numbers are stored, because compiling takes a minute;
`python -m toolkit.lab.sparsity.acceptance` writes them anew.
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.figures import ACCENT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure.stored import stored_folder
from toolkit.measure.words import in_words

FILE = "acceptance.json"
SYSTEMS = {"HATA": "hata:48", "Quest": "quest:48", "a window": "window:48"}
PROMPTS = (64, 80, 96, 112, 128, 144)  # tokens of the rows' prompts
LENGTH, DRAFTS = 48, 4


@functools.cache
def stored() -> dict[str, Any]:
    """The whole record."""
    return json.loads((stored_folder("sparsity") / FILE).read_text(encoding="utf-8"))


def kept_by_round(system: str) -> Int[np.ndarray, "rounds rows"]:
    """Drafts that each row kept, -1 in rounds after its end."""
    return np.array(stored()["kept"][system])


def main() -> None:
    """Write with every system's drafts, and check the text against dense decoding's."""
    import jax.numpy as jnp

    from toolkit.language import load_language_model
    from toolkit.looped import generate, generate_speculatively
    from toolkit.measure import environment
    from toolkit.training import load_corpus

    model = load_language_model(stored_folder("models") / "full-full.safetensors")
    _, held_out = load_corpus("prose").split()
    rows = [held_out[1000 * n : 1000 * n + PROMPTS[-1]] for n in range(len(PROMPTS))]
    prompts, lengths = jnp.asarray(np.stack(rows), jnp.int32), jnp.asarray(PROMPTS, jnp.int32)
    dense = np.asarray(generate(model, prompts, LENGTH, lengths=lengths))
    kept = {}
    for name, words in SYSTEMS.items():
        how = {"drafts": DRAFTS, "lengths": lengths, "sparse": words}
        found = generate_speculatively(model, model, prompts, LENGTH, **how)
        if (np.asarray(found.tokens) != dense).any():
            raise RuntimeError(f"drafts of {name} changed the text")
        kept[name] = found.by_round.tolist()
    record = {**environment(), "command": "python -m toolkit.lab.sparsity.stored_acceptance"}
    path = stored_folder("sparsity") / FILE
    path.write_text(json.dumps({"environment": record, "kept": kept}) + "\n", encoding="utf-8")


ROWS = len(PROMPTS)
ROUNDS = LENGTH - 1  # at most: the prompt's pass writes the first token, every round one or more
OPEN, DRAFTED, OWN, REFUSED = range(4)


@dataclass(frozen=True)
class AcceptanceView(View):
    """A batch after some rounds."""

    system: str  # the system that drafts
    round: int  # number of finished rounds
    # Accepted drafts per round and row, -1 after the row's end [rounds, rows]
    kept: Int[np.ndarray, "rounds rows"]

    @property
    def running(self) -> Int[np.ndarray, "rounds rows"]:
        """Whether a row still wrote in a round, of those done."""
        return self.kept[: self.round] >= 0

    @property
    def written(self) -> Int[np.ndarray, "rows"]:
        """Tokens of every row."""
        new = np.where(self.running, self.kept[: self.round] + 1, 0)
        return np.minimum(1 + new.sum(axis=0), LENGTH)

    @property
    def per_pass(self) -> np.ndarray:
        """Tokens that a row wrote per dense pass over it."""
        return (self.written - 1) / np.maximum(self.running.sum(axis=0), 1)

    @property
    def share(self) -> float:
        """Of all drafts, those kept."""
        return float(self.kept[: self.round][self.running].mean() / DRAFTS)

    def tiles(self) -> Int[np.ndarray, "rows places"]:
        """Where each token of each row came from; drafts refused in this round stand after it."""
        kinds = np.full((ROWS, LENGTH + DRAFTS), OPEN)
        for row, of_row in enumerate(self.kept[: self.round].T):
            place, kinds[row, 0] = 1, OWN
            for done, kept in enumerate(of_row[of_row >= 0]):
                kinds[row, place : place + kept] = DRAFTED
                kinds[row, place + kept] = OWN
                place += kept + 1
                if done == self.round - 1:
                    kinds[row, place : place + DRAFTS - kept] = REFUSED
        kinds[:, LENGTH:] = np.where(kinds[:, LENGTH:] == REFUSED, REFUSED, OPEN)
        return kinds

    def data(self) -> Data:
        now = self.kept[self.round - 1]
        runs = now >= 0
        return {
            "row": [f"{row + 1}, prompt of {size}" for row, size in enumerate(PROMPTS)],
            "drafted": [str(DRAFTS) if on else "has its text" for on in runs],
            "accepted": [str(k) if on else "–" for k, on in zip(now, runs, strict=True)],
            "from the dense pass": ["1" if on else "–" for on in runs],
            "written so far": [str(n) for n in self.written],
            "tokens per pass": [f"{rate:.2f}" for rate in self.per_pass],
        }

    def sentence(self) -> str:
        now = self.kept[self.round - 1]
        runs = now[now >= 0]
        least, most = self.written.min(), self.written.max()
        counts = ", ".join(str(k) if k >= 0 else "done" for k in now)
        return (
            f"Drafts by {self.system}, round {self.round} of {len(self.kept)}: of {DRAFTS} drafts "
            f"the rows keep {counts}, and each that runs gets one token of the dense pass. So far "
            f"{in_words(self.share, 'share')} of all drafts were kept: {self.per_pass.mean():.2f} "
            f"tokens per dense pass. The rows have written {least} to {most} of {LENGTH} tokens"
            + (f"; {ROWS - len(runs)} wait for the others." if len(runs) < ROWS else ".")
        )

    def footnote(self) -> str:
        return (
            "Recorded with data/models/full-full, which drafts for itself with 48 tokens read per "
            "head; every text is that of dense decoding."
        )


def acceptance_view(*, system: str, round: int) -> AcceptanceView:
    """A batch after a round, or after the last one there was."""
    kept = kept_by_round(system)
    return AcceptanceView(system, min(round, len(kept)), kept)


_COLOURS = ListedColormap(["#ffffff", "#6aaed6", "#e6b84c", "#f0d3dd"])
_WORDS = {DRAFTED: "draft kept", OWN: "from the dense pass", REFUSED: "refused this round"}


class TokensPlot(Plot):
    """A row per sequence, a tile per token; marks tell the kinds apart without colour."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Tokens of every row so far", fontsize=10.5)
        axes.set_xlabel("token after the prompt", fontsize=9)
        axes.grid(False)
        axes.set_xticks([0, *range(7, LENGTH, 8)], ["1", *map(str, range(8, LENGTH + 1, 8))])
        axes.set_yticks(range(ROWS), [f"{n + 1}: prompt {size}" for n, size in enumerate(PROMPTS)])
        axes.tick_params(labelsize=8, length=0)
        self.image_of = self.image((ROWS, LENGTH + DRAFTS), _COLOURS, 0, 3)
        axes.axvline(LENGTH - 0.5, color="#8a949e", linewidth=1.0, linestyle=":")
        self.between = self.line(color="white", linewidth=2.5)
        edges = np.repeat(np.arange(1, ROWS) - 0.5, 3)
        self.between.set_data(np.tile([-0.5, LENGTH + DRAFTS, np.nan], ROWS - 1), edges)
        self.own = self.marks("#5b4300", "o", markersize=3)
        self.refused = self.marks(ACCENT, "x", markersize=5, markeredgewidth=1.2)
        for kind, name in _WORDS.items():
            mark = {OWN: "o", REFUSED: "x"}.get(kind, "s")
            colour = {OWN: "#5b4300", REFUSED: ACCENT}.get(kind, _COLOURS(kind))
            axes.plot([], [], mark, color=colour, label=name)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8.5)
        axes.set(xlim=(-0.5, LENGTH + DRAFTS - 0.5), ylim=(ROWS - 0.5, -0.5))

    def show(self, view: AcceptanceView) -> None:
        tiles = view.tiles()
        self.image_of.set_data(tiles)
        for kind, line in ((OWN, self.own), (REFUSED, self.refused)):
            rows, columns = np.nonzero(tiles == kind)
            line.set_data(columns, rows)


class RatePlot(Plot):
    """Tokens per dense pass of every row, up to this round; the dotted line: without drafts."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Tokens per dense pass", fontsize=10.5)
        axes.set(xlim=(0, DRAFTS + 1.35), ylim=(ROWS - 0.5, -0.5))
        axes.set_xticks(range(DRAFTS + 2))
        axes.set_xlabel("tokens", fontsize=9)
        axes.set_yticks(range(ROWS), [""] * ROWS)
        axes.tick_params(labelsize=8, length=0)
        axes.grid(axis="y", visible=False)
        axes.axvline(1, color="#8a949e", linewidth=1.2, linestyle=":", label="without drafts")
        self.rates = self.marks(look("full").colour, "D", markersize=7, label="so far")
        self.now = self.marks(look("gdn").colour, "|", markersize=13, markeredgewidth=2,
                              label="this round")  # fmt: skip
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8.5,
                    columnspacing=0.9, handletextpad=0.3)  # fmt: skip

    def show(self, view: AcceptanceView) -> None:
        self.rates.set_data(view.per_pass, range(ROWS))
        now = view.kept[view.round - 1]
        rows = np.flatnonzero(now >= 0)
        self.now.set_data(now[rows] + 1, rows)


class AcceptancePanel(Panel):
    """The sparse drafts accepted by the rows of a batch, round by round.

    Example:
        >>> panel = AcceptancePanel(system="Quest", round=5)
        >>> panel.view.kept.shape[1]
        6
    """

    title = "Lossless sparse decoding: which drafts are kept?"
    figure_size = (9.6, 3.9)
    has_palette = True

    system = Choice("Drafts by", "HATA", {name: name for name in SYSTEMS})
    round = Number("Round", 6, low=1, high=ROUNDS, explanation="One dense pass over all rows each")

    compute = staticmethod(acceptance_view)
    places = (
        (TokensPlot, (0.115, 0.33, 0.53, 0.55)),
        (RatePlot, (0.675, 0.33, 0.295, 0.55)),
    )


if __name__ == "__main__":
    main()
