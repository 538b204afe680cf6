"""Fixed budgets and adaptive ones with grouped heads, and long text at equal bytes.

On text, whatever a system reads of its index it does not read of keys and values: all of them,
chance included, read the bytes of as many tokens; but for the oracle, which is no system, and whose
index, all keys, is not counted. Chance is the control: where it does not lose by a stated margin, a
claim is void.
"""

import functools
from typing import Any

from toolkit.attention.sparse import FixedTokens, MassTarget
from toolkit.experiments.sparse.data import heavy_tailed
from toolkit.experiments.sparse.quality import (
    at_equal_bytes,
    at_small_budgets,
    of_drawn,
)
from toolkit.experiments.sparse.text_model import CONFIG
from toolkit.experiments.sparse.texts import DENSE, passages, perplexity, text_selector
from toolkit.experiments.tasks import Retrieval

BOUND, GROUPS = "oracle", (1, 4, 8)  # query heads per key head
TEXT_TOKENS, TARGET = 384, 0.9
TASK = Retrieval(pairs=64, length=1024, queries=32)
TEXT_DEPTHS = (0.5,)
QUERIES = 4  # of every query head, on drawn data


def numbers(kind: str, quality: Any) -> dict[str, float]:
    """A named tuple as numbers of an outcome."""
    return {f"{name}, {kind}": float(value) for name, value in quality._asdict().items()}


def heads(group: int) -> str:
    """The kind of the numbers of so many query heads per key head."""
    return f"{group} query head{'s' * (group > 1)}"


def text(depth: float | None = None) -> str:
    """Name of the perplexity of code, or of quotations of what stands at a depth."""
    return "perplexity" if depth is None else f"perplexity, quotation at depth {depth:g}"


@functools.cache
def text_budget(system: str) -> FixedTokens | None:
    """How many tokens a system reads at equal bytes; the size of an index has no seed."""
    if system == BOUND:
        return FixedTokens(TEXT_TOKENS)
    selector, text = text_selector(system), passages(0)[:1]
    per_token = 2 * CONFIG.width // CONFIG.heads * 4
    return at_equal_bytes(
        lambda budget: perplexity(selector, budget, text)[1], selector, TEXT_TOKENS, per_token
    )


def fixed_or_adaptive(system: str, seed: int) -> dict[str, float]:
    """A mass to reach, and the same number of tokens for every query, on drawn data."""
    selector, outcome = at_small_budgets(system), {}
    for group in GROUPS:
        drawn = heavy_tailed(seed, group=group, queries=QUERIES)
        adaptive = of_drawn(drawn, selector, MassTarget(TARGET))
        fixed = of_drawn(drawn, selector, FixedTokens(round(adaptive.tokens)))
        outcome |= numbers(f"adaptive, {heads(group)}", adaptive)
        outcome |= numbers(f"fixed, {heads(group)}", fixed)
    return outcome


def on_text(system: str, seed: int) -> dict[str, float]:
    """Perplexity of code near its two thousandth byte, and of quotations, at equal bytes."""
    selector = text_selector("window" if system == DENSE else system)
    budget = None if system == DENSE else text_budget(system)
    if budget is None and system != DENSE:
        return {}
    outcome = {}
    for depth in (None, *TEXT_DEPTHS):
        found, quality = perplexity(selector, budget, passages(seed, depth))
        outcome[text(depth)] = found
        outcome |= numbers("code", quality) if depth is None else {}
    return outcome
