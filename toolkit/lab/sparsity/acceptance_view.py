"""Lossless decoding of a batch: accepted drafts of each row, round by round. Pure functions.

In a round every row drafts n tokens, one dense pass reads them all, k <= n are kept, and one token
of the dense pass follows: k + 1 tokens per pass. Rows keep different numbers, so they drift apart.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.stored_acceptance import DRAFTS, LENGTH, PROMPTS, kept_by_round
from toolkit.measure.words import in_words

ROWS = len(PROMPTS)
ROUNDS = LENGTH - 1  # at most: the prompt's pass writes the first token, every round one or more
OPEN, DRAFTED, OWN, REFUSED = range(4)


@dataclass(frozen=True)
class AcceptanceView(View):
    """A batch after some rounds.

    Attributes:
        system: the system that drafts.
        round: number of finished rounds.
        kept: accepted drafts per round and row, -1 after the row's end [rounds, rows].
    """

    system: str
    round: int
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
