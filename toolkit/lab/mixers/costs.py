"""What one more token costs two mixers, beside softmax attention. Modelled, pure functions.

Every number comes from the cost formulas in a mixer's row of `MIXERS`: no program is run.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.attention import mixer
from toolkit.figures import in_words
from toolkit.lab.attention.view import CostView, at_every_context
from toolkit.lab.kit.view import Data

REFERENCE = "full"


class Counted(NamedTuple):
    """One of the things counted: its unit, and the heading and limits of its axes.

    The limits hold every size that can be set, so that a moved slider is seen to move the lines.
    """

    unit: str
    heading: str
    limits: tuple[float, float]


_BYTES = (2.0**10, 2.0**38)
COUNTED: dict[str, Counted] = {
    "operations": Counted("FLOP", "Operations per token", (1e3, 1e12)),
    "moved": Counted("bytes", "Bytes moved per token", _BYTES),
    "kept": Counted("bytes", "Bytes kept", _BYTES),
}


@dataclass(frozen=True)
class DecodeCosts(CostView):
    """Of one layer and one sequence; the lines are `"full"`, `"left"` and `"right"`."""

    mixers: dict[str, str]  # line -> name in `MIXERS`
    described: str  # the sizes in words

    def data(self) -> Data:
        """The two sides by their sides too, for they may show one mixer."""
        names = {"left": f"left: {self.names['left']}", "right": f"right: {self.names['right']}"}
        return CostView.data(replace(self, names=self.names | names))

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

    `bytes_per_number` is of activations and cached keys and values; states stay in float32.
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
        **at_every_context(cost, COUNTED, sides, context_length),
        units={what: counted.unit for what, counted in COUNTED.items()},
        names={REFERENCE: "softmax", "left": left, "right": right},
        mixers=sides,
        described=f"one layer, {heads} heads of {head_size}, one sequence",
    )
