"""Memory of the half of a layer that is a mixture of experts: what it keeps, and works with.

The rows of a chip's buffers (`held_rows`) exist at the experts' hidden size in float32, in which
they are multiplied, and at the width in the compute type.
"""

from typing import NamedTuple

from toolkit.looped import LoopedConfig
from toolkit.planning.memory.sizes import FLOAT32
from toolkit.planning.mixtures import held_rows
from toolkit.planning.models import expert_hidden
from toolkit.planning.strategy import Strategy

GATED_KEPT = 6  # float32 arrays of the hidden size that JAX keeps of a gated layer


class Alive(NamedTuple):
    """Arrays of all rows that exist at one time in the backward pass, as libtpu's programs need
    them (`data/planning/README.md`): of the hidden size, and of the width."""

    hidden: float
    width: float


# The kernel for grouped rows ("gather", "ragged", and all experts on a chip) computes anew what
# slots keep.
ALIVE = {
    "all_to_all": Alive(1.6, 4),
    "gather": Alive(3, 1),
    "ragged": Alive(3, 4),
    "by_host": Alive(3, 4),  # as with "ragged": no program here has it
}
CLAMPED_ALIVE = 2.2  # more of the hidden size, where gpt-oss's gate is differentiated
SHARED_ALIVE = 2.5  # float32 arrays of a shared expert's hidden size


def mixture_memory(
    config: LoopedConfig, recompute: str, strategy: Strategy, tokens: int
) -> tuple[int, int]:
    """Bytes kept by one layer, and of its intermediates in the backward pass, for `tokens` of each
    group of "tensor"."""
    moe, size, is_folded = config.moe, config.compute_dtype.itemsize, strategy.expert > 1
    own = tokens // strategy.tensor if is_folded else tokens
    parts = 1 if is_folded else strategy.tensor
    rows, dispatch = held_rows(config, strategy, own), strategy.dispatch
    dispatch = dispatch if is_folded else "gather"
    hidden = FLOAT32 * rows * expert_hidden(config) // parts
    width = size * rows * config.width
    shared = FLOAT32 * own * (moe.shared_hidden or 0) // parts
    logits = FLOAT32 * own * moe.experts
    working = ALIVE[dispatch].hidden * hidden + ALIVE[dispatch].width * width
    if dispatch == "all_to_all" and moe.activation == "clamped":
        working += CLAMPED_ALIVE * hidden
    if recompute == "layer":
        return 0, round(working + SHARED_ALIVE * shared)
    if recompute == "elementwise":
        return logits + 2 * shared, round(working)
    kept = logits + GATED_KEPT * shared + size * own * (1 + moe.chosen) * config.width
    if dispatch == "all_to_all":
        return kept + GATED_KEPT * hidden + 2 * width, 0  # rows as sent and as received
    return kept + 2 * FLOAT32 * rows * config.width, round(working)
