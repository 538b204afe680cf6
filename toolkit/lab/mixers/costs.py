"""What one more token costs two mixers, beside softmax attention. Modelled, pure functions.

Every number comes from the cost formulas in a mixer's row of `MIXERS`: no program is run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from toolkit.attention import mixer
from toolkit.figures import in_words
from toolkit.lab.attention.view import TOKENS
from toolkit.lab.kit.table import Table

REFERENCE = "full"


class Counted(NamedTuple):
    """One of the things counted.

    Attributes:
        unit: `"FLOP"` or `"bytes"`.
        heading: of its axes.
        limits: of its axes, wide enough for every size that can be set; fixed, so that a moved
            slider is seen to move the lines.
    """

    unit: str
    heading: str
    limits: tuple[float, float]


_BYTES = (2.0**10, 2.0**38)
COUNTED: dict[str, Counted] = {
    "operations": Counted("FLOP", "Operations a token", (1e3, 1e12)),
    "moved": Counted("bytes", "Bytes moved a token", _BYTES),
    "kept": Counted("bytes", "Bytes kept", _BYTES),
}


@dataclass(frozen=True)
class DecodeCosts:
    """Curves of one layer and one sequence against context length.

    Attributes:
        mixers: side (`"full"`, `"left"`, `"right"`) -> name in `MIXERS`.
        chosen: the context length marked.
        tokens: horizontal axis, [points].
        curves: what is counted -> side -> cost at `tokens`, [points].
        at_chosen: what is counted -> side -> cost at `chosen`.
        described: the sizes in words.
    """

    mixers: dict[str, str]
    chosen: int
    tokens: np.ndarray
    curves: dict[str, dict[str, np.ndarray]]
    at_chosen: dict[str, dict[str, float]]
    described: str

    def sentence(self) -> str:
        kept, moved = self.at_chosen["kept"], self.at_chosen["moved"]
        parts = [
            f"{mixer(self.mixers[side]).title} moves {in_words(moved[side], 'bytes')} and keeps a "
            f"state of {in_words(kept[side], 'bytes')}"
            for side in ("left", "right")
        ]
        smaller = min(kept["left"], kept["right"])
        bytes_per_token = kept[REFERENCE] / self.chosen
        return (
            f"At {self.chosen:,} tokens of context softmax attention moves "
            f"{in_words(moved[REFERENCE], 'bytes')} for one more token and keeps a cache of "
            f"{in_words(kept[REFERENCE], 'bytes')}; {parts[0]}; {parts[1]}. The cache outgrows "
            f"the smaller state at {smaller / bytes_per_token:,.0f} tokens. "
            f"Modelled; {self.described}."
        )

    def table(self) -> Table:
        places = [(what, side) for what in self.curves for side in self.mixers]
        header = ("tokens", *(f"{what}, {self.mixers[side]}" for what, side in places))
        rows = [
            (
                f"{n:,}",
                *(
                    in_words(self.curves[what][side][i], COUNTED[what].unit)
                    for what, side in places
                ),
            )
            for i, n in enumerate(self.tokens)
            if i % 2 == 0
        ]
        return Table(header, rows)


def decode_costs(
    *,
    left: str,
    right: str,
    context_length: int,
    heads: int,
    head_size: int,
    bytes_per_number: int,
) -> DecodeCosts:
    """Cost of one decoded token in one layer, and what is kept until the next one.

    Args:
        left: a name in `MIXERS`.
        right: another, or the same.
        context_length: the context to mark, tokens.
        heads: query, key and value heads.
        head_size: key and value size of a head.
        bytes_per_number: of activations and cached keys and values; states stay in float32.

    Returns:
        A `DecodeCosts`.

    Raises:
        ValueError: for an unknown mixer.

    Cost:
        A few hundred calls of arithmetic.

    Source:
        `step_flops`, `step_bytes` and `state_bytes` of `toolkit.attention.MIXERS`.
    """
    sides = {REFERENCE: REFERENCE, "left": left, "right": right}

    def cost(what: str, side: str, tokens: int) -> float:
        row = mixer(sides[side])
        sizes = (1, tokens, heads, head_size, head_size)
        if what == "operations":
            return float(row.step_flops(*sizes, **row.options))
        formula = row.step_bytes if what == "moved" else row.state_bytes
        return float(formula(*sizes, element_bytes=bytes_per_number, **row.options))

    return DecodeCosts(
        mixers=sides,
        chosen=context_length,
        tokens=TOKENS,
        curves={
            what: {side: np.array([cost(what, side, int(n)) for n in TOKENS]) for side in sides}
            for what in COUNTED
        },
        at_chosen={
            what: {side: cost(what, side, context_length) for side in sides} for what in COUNTED
        },
        described=f"one layer, {heads} heads of {head_size}, one sequence",
    )
