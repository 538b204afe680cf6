"""The cost of one more token for two mixers and softmax attention. Modelled, pure functions."""

import functools
from typing import Any

from toolkit.attention import mixer
from toolkit.lab.attention.view import DECODE, KEPT, CostView, Counted, Layer

REFERENCE = "full"
# Limits hold every size that can be set, so that a moved slider is seen to move the lines.
_BYTES = (2.0**10, 2.0**38)
COUNTED = {
    "operations": Counted(DECODE, "FLOP", "Operations per token", (1e3, 1e12)),
    "moved": Counted(DECODE, "bytes", "Bytes moved per token", _BYTES),
    "kept": Counted(KEPT, "bytes", "Bytes kept", _BYTES),
}


class DecodeCosts(CostView):
    """Costs of one layer and one sequence; the lines are `"full"`, `"left"` and `"right"`."""

    @functools.cached_property
    def names(self) -> dict[str, str]:
        return self.mixers | {REFERENCE: "softmax"}

    def heading(self, plot: str, line: str) -> str:
        """The two sides by their sides too, for they may show one mixer."""
        side = "" if line == REFERENCE else f"{line}: "
        return f"{plot}, {side}{self.names[line]}"

    def footnote(self) -> str:
        return "Modelled from the cost formulas of each mixer; one layer, one sequence."

    def sentence(self) -> str:
        parts = [
            f"{mixer(self.mixers[side]).title} moves {self.cell_of('moved', side)} and keeps a "
            f"state of {self.cell_of('kept', side)}"
            for side in ("left", "right")
        ]
        left, right, cache = (self.cost("kept", line) for line in ("left", "right", REFERENCE))
        outgrown = min(left, right) * self.chosen / cache
        return (
            f"At {self.chosen:,} tokens of context softmax attention moves "
            f"{self.cell_of('moved', REFERENCE)} for one more token and keeps a cache of "
            f"{self.cell_of('kept', REFERENCE)}; {parts[0]}; {parts[1]}. The cache outgrows the "
            f"smaller state at {outgrown:,.0f} tokens. Modelled; one layer, {self.layer.heads} "
            f"heads of {self.layer.head_size}, one sequence."
        )


def decode_costs(*, left: str, right: str, context_length: int, **sizes: Any) -> DecodeCosts:
    """Cost of one decoded token, and what is kept until the next; `sizes` are a `Layer`'s."""
    sides = {REFERENCE: REFERENCE, "left": left, "right": right}
    return DecodeCosts(context_length, Layer(**sizes), sides, COUNTED)
