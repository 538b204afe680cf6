"""Systems at equal bytes with one, four and eight query heads per key head, and on long text.

Whatever a system reads of its index it does not read of keys and values: all of them, chance
included, read the bytes of as many tokens; but for the oracle, which is no system, and whose index,
all keys, is not counted. Chance is the control: an experiment in which it does not lose by a stated
margin decides nothing.
"""

import dataclasses
import functools
import math
from typing import Any

from toolkit.attention.sparse import FixedTokens, MassTarget
from toolkit.attention.sparse.budget import Budget
from toolkit.attention.sparse.evict.evictor import Evictor
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.data import heavy_tailed
from toolkit.experiments.sparse.quality import (
    Quality,
    at_equal_bytes,
    at_small_budgets,
    of_drawn,
    of_retrieval,
)
from toolkit.experiments.sparse.text_model import CONFIG
from toolkit.experiments.sparse.texts import (
    DENSE,
    LENGTH,
    load_text_model,
    passages,
    perplexity,
    text_selector,
)
from toolkit.experiments.tasks import Retrieval

BOUND, GROUPS = "oracle", (1, 4, 8)  # query heads per key head
TASK = Retrieval(pairs=64, length=1024, queries=32)
TOKENS, DRAWN_TOKENS, TEXT_TOKENS, TARGET, TEXT_TARGET = 256, 512, 384, 0.9, 0.5
DEPTHS, TEXT_DEPTHS = (0.1, 0.5, 0.9), (0.5,)  # beyond the sinks, before the recent tokens
QUERIES = 4  # of every query head, on drawn data


def numbers(kind: str, quality: Any) -> dict[str, float]:
    """A named tuple as numbers of an outcome."""
    return {f"{name}, {kind}": float(value) for name, value in quality._asdict().items()}


def heads(group: int) -> str:
    """The kind of the numbers of so many query heads per key head."""
    return f"{group} query head{'s' * (group > 1)}"


def needle(group: int, depth: float) -> str:
    """Name of the share of single needles found at a depth."""
    return f"needle found, {heads(group)}, depth {depth:g}"


def text(group: int, depth: float | None = None) -> str:
    """Name of the perplexity of code, or of quotations of what stands at a depth."""
    return f"perplexity, {of_text(group, depth)}"


def of_text(group: int, depth: float | None = None) -> str:
    """The kind of the numbers of code, or of quotations."""
    kind = "code" if depth is None else f"quotation at depth {depth:g}"
    return f"{kind}, {heads(group)}"


@functools.cache
def drawn_budget(system: str, group: int) -> FixedTokens | None:
    """What a system reads at equal bytes of drawn data, as the size of an index has no seed."""
    if system == BOUND:
        return FixedTokens(DRAWN_TOKENS)
    selector, drawn = at_small_budgets(system), heavy_tailed(0, group=group, queries=1)
    per_token = 2 * drawn.k.shape[2] * drawn.k.itemsize
    measure = functools.partial(of_drawn, drawn, selector)
    return at_equal_bytes(measure, selector, DRAWN_TOKENS, per_token)


@functools.cache
def needle_budget(system: str, group: int) -> FixedTokens | None:
    """The same in the retrieval model."""
    if system == BOUND:
        return FixedTokens(TOKENS)
    selector, params = at_small_budgets(system), model.load(model.FILES[group])
    task = dataclasses.replace(TASK, queries=1)

    def measure(budget: Budget) -> Quality:
        return of_retrieval(params, task, selector, budget, 0, batch=1)[1]

    return at_equal_bytes(measure, selector, TOKENS, 2 * model.SIZE * 4)


@functools.cache
def text_budget(system: str, group: int) -> FixedTokens | None:
    """The same in the text models, measured on drawn data of their sizes."""
    selector, size = text_selector(system), CONFIG.width // 4
    if system == BOUND or isinstance(selector, Evictor):
        return FixedTokens(TEXT_TOKENS)
    sizes = {"heads": CONFIG.heads // group, "tokens": LENGTH, "queries": 1, "size": size}
    measure = functools.partial(of_drawn, heavy_tailed(0, group=group, **sizes), selector)
    return at_equal_bytes(measure, selector, TEXT_TOKENS, 2 * size * 4)


def by_group(system: str, seed: int) -> dict[str, float]:
    """Mass and error on drawn data for every group, and needles found, at equal bytes.

    There is no number where an index leaves fewer tokens than the system always reads.
    """
    selector, outcome = at_small_budgets(system), {}
    for group in GROUPS:
        if budget := drawn_budget(system, group):
            drawn = heavy_tailed(seed, group=group, queries=QUERIES)
            outcome |= numbers(f"drawn, {heads(group)}", of_drawn(drawn, selector, budget))
        if group not in model.FILES or (budget := needle_budget(system, group)) is None:
            continue
        arguments = selector, budget, seed
        params = model.load(model.FILES[group])
        found, quality = of_retrieval(params, TASK, *arguments)
        outcome |= {f"accuracy, {heads(group)}": found, **numbers(heads(group), quality)}
        for depth in DEPTHS:
            task = Retrieval(pairs=32, length=TASK.length, queries=1, depth=depth)
            outcome[needle(group, depth)] = of_retrieval(params, task, *arguments)[0]
    return outcome


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


def on_text(system: str, seed: int, depths=(None, *TEXT_DEPTHS), **how: bool) -> dict[str, float]:
    """Perplexity of code near its two thousandth byte, and of quotations, at equal bytes."""
    selector, outcome = text_selector("window" if system == DENSE else system), {}
    for group in GROUPS:
        budget = None if system == DENSE else text_budget(system, group)
        if budget is None and system != DENSE:
            continue
        for depth in depths:
            arguments = load_text_model(group), selector, budget, passages(seed, depth)
            outcome[text(group, depth)], quality = perplexity(*arguments, **how)
            outcome |= numbers(of_text(group, depth), quality)
    return outcome


def with_a_tail(system: str, seed: int) -> dict[str, float]:
    """Perplexity of code with the tail corrected, and needles found with and without it."""
    outcome, group = on_text(system, seed, (None,), corrects_tail=True), max(model.FILES)
    budget = needle_budget(system, group)
    assert budget is not None  # every index leaves room there
    arguments = model.load(model.FILES[group]), TASK, at_small_budgets(system), budget, seed
    for is_on, kind in ((True, heads(group)), (False, f"{heads(group)}, without a tail")):
        found, quality = of_retrieval(*arguments, corrects_tail=is_on)
        outcome |= {f"accuracy, {kind}": found, **numbers(kind, quality)}
    return outcome


def fixed_or_adaptive_on_text(system: str, seed: int) -> dict[str, float]:
    """A mass to reach on code, and budgets of as many bytes, rounded up to a few sizes."""
    selector, outcome, rounded = text_selector(system), {}, 32
    for group in GROUPS:
        model, text = load_text_model(group), passages(seed)
        budget, per_token = text_budget(system, group), 8 * CONFIG.width // 4
        assert budget is not None  # every index leaves room there
        found = {"adaptive": perplexity(model, selector, MassTarget(TEXT_TARGET), text)}
        quality = found["adaptive"][1]
        tokens = quality.tokens
        if system != BOUND:  # whose index is not counted
            tokens = 1000 * quality.kilobytes / per_token - TEXT_TOKENS + budget.tokens
        fixed = FixedTokens(rounded * math.ceil(tokens / rounded))
        found["fixed"] = perplexity(model, selector, fixed, text)
        for kind, (value, quality) in found.items():
            outcome |= numbers(f"{kind}, {heads(group)}", quality)
            outcome[f"perplexity, {kind}, {heads(group)}"] = value
    return outcome
