"""A text of which one token is looked at, as words or as whatever else a model reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from toolkit.lab.kit.view import View
from toolkit.measure.words import counted

MOST = 0.9
"""The part of all influence on a token whose distance is told."""


@dataclass(frozen=True)
class TextView(View):
    """A text of which one token is looked at."""

    unit: ClassVar = "token"  # what a sentence calls its parts
    words: tuple[str, ...]  # the tokens
    left_out: int  # tokens at the end that did not fit
    token: int  # index of the one looked at

    @property
    def place_in_words(self) -> str:
        """How the first sentence begins."""
        at, count = self.token + 1, len(self.words)
        return f"At “{self.words[self.token]}” ({self.unit} {at} of {count})"

    @property
    def left_out_in_words(self) -> str:
        """The last sentence, if anything did not fit."""
        words = f" The last {counted(self.left_out, self.unit)} did not fit and are left out."
        return words if self.left_out else ""


def back_to_most(share: np.ndarray, token: int) -> int:
    """Tokens back within which `MOST` of all shares lies; 0 is the token itself."""
    return int(np.argmax(np.cumsum(share[token::-1]) >= MOST))


def looked_at(words: Sequence[str], token: int, most: int) -> dict[str, Any]:
    """The fields of a `TextView`; `token` counts from 1, more than there are means the last."""
    if not words:
        raise ValueError("text: got no words, wanted at least one")
    shown = tuple(words[:most])
    return {
        "words": shown, "left_out": len(words) - len(shown), "token": min(token, len(shown)) - 1,
    }  # fmt: skip
