"""A text with a selected token, as words or other units that a model reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from toolkit.lab.kit.view import View
from toolkit.measure.words import counted

MOST = 0.9
"""The share of all influence on a token whose distance is reported."""


@dataclass(frozen=True)
class TextView(View):
    """A text with a selected token."""

    unit: ClassVar = "token"  # name of the units in a caption
    words: tuple[str, ...]  # the tokens
    left_out: int  # tokens at the end that did not fit
    token: int  # index of the one looked at

    @property
    def place_in_words(self) -> str:
        """The beginning of the caption."""
        at, count = self.token + 1, len(self.words)
        return f"At “{self.words[self.token]}” ({self.unit} {at} of {count})"

    @property
    def left_out_in_words(self) -> str:
        """The last sentence of the caption if tokens were left out."""
        words = f" The last {counted(self.left_out, self.unit)} did not fit and are left out."
        return words if self.left_out else ""


def back_to_most(share: np.ndarray, token: int) -> int:
    """The number of tokens back that hold `MOST` of all shares; 0 is the token itself."""
    return int(np.argmax(np.cumsum(share[token::-1]) >= MOST))


def looked_at(words: Sequence[str], token: int, most: int) -> dict[str, Any]:
    """The fields of a `TextView`; `token` counts from 1, and is limited to the last one."""
    if not words:
        raise ValueError("text: got no words, wanted at least one")
    shown = tuple(words[:most])
    return {
        "words": shown, "left_out": len(words) - len(shown), "token": min(token, len(shown)) - 1,
    }  # fmt: skip
