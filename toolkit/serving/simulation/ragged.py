"""Rows of a speculative batch that keep different numbers of drafts: cut, pooled, or left alone.

Three ways to go on: cut all rows to the batch's least (1 + sum_j a^(jB) tokens per round), pool
rows of equal length and pad the others anew (EXSPEC), or give every row its own length, as
`toolkit.looped.generate_speculatively` does, so that nothing is moved and nobody waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from toolkit._checks import checked


class PooledRounds(NamedTuple):
    """A pool of rows that is served in batches.

    Attributes:
        rounds: passes of the exact model until all rows have their text.
        grouped: the share of the rounds whose rows had one length.
        moved: tokens of caches that were moved by a change of padding.
        needed: rounds of rows with lengths of their own, in the same batches, without moves.

    Example:
        >>> PooledRounds(rounds=10, grouped=0.5, moved=100, needed=9).grouped
        0.5
    """

    rounds: int
    grouped: float
    moved: int
    needed: int


@checked
def tokens_by_least(acceptance: float, drafts: int, batch: int) -> float:
    """Tokens per round of a row in a batch that is cut to its least: 1 + sum_j a^(j B).

    Args:
        acceptance: a, the chance that a draft is kept.
        drafts: per round.
        batch: B, rows.

    Returns:
        Tokens; of a row with a length of its own those of B = 1.

    Example:
        >>> round(tokens_by_least(0.7, 5, 1), 4), round(tokens_by_least(0.7, 5, 8), 4)
        (2.9412, 1.0612)
    """
    return 1.0 + sum(acceptance ** (place * batch) for place in range(1, drafts + 1))


@checked
def pooled_rounds(
    prompts: Sequence[int], length: int, *,
    acceptance: float, drafts: int, batch: int, window: int, seed: int = 0,
) -> PooledRounds:  # fmt: skip
    """Serve rows from a sliding window of a pool, those of equal length together (simulated).

    The first length that `batch` rows of the window share is served; if none is, the window's first
    rows are padded to their longest, and the padding stays part of their length.

    Args:
        prompts: tokens of each, in the pool's order.
        length: tokens to write.
        acceptance: chance that a draft is kept, independent of all else.
        drafts: per round.
        batch: rows of a round.
        window: rows that are looked at.
        seed: of the draws.

    Returns:
        Rounds, and what padding moved.

    Source: EXSPEC, 2025 (arXiv:2510.22876) and its released rule.

    Example:
        >>> how = {"acceptance": 0.7, "drafts": 5, "batch": 2, "window": 8}
        >>> found = pooled_rounds([8] * 16, 32, **how)
        >>> found.rounds >= found.needed
        True
    """
    if not 0 <= acceptance < 1 or min(length, drafts, batch) < 1 or window < batch:
        raise ValueError(
            f"acceptance, length, drafts, batch, window: got {acceptance}, {length}, {drafts}, "
            f"{batch} and {window}; wanted a share, numbers of at least 1, and window >= batch"
        )
    draw = np.random.default_rng(seed)
    padded, written = list(prompts), [0] * len(prompts)
    pool, rounds, grouped, moved, turns = list(range(len(prompts))), 0, 0, 0, 0
    while pool:
        alike: dict[tuple[int, bool], list[int]] = {}
        chosen = None
        for row in pool[:window]:
            own = alike.setdefault((padded[row], written[row] > 0), [])
            own.append(row)
            if len(own) == batch:
                chosen = own
                break
        grouped += chosen is not None
        if chosen is None:
            chosen = pool[:batch]
            longest = max(padded[row] for row in chosen)
            for row in chosen:
                moved += padded[row] * (padded[row] < longest and written[row] > 0)
                padded[row] = longest
        rounds += 1
        turns += len(chosen)
        for row in chosen:
            is_kept = draw.random(drafts) < acceptance
            new = 1 + int(np.cumprod(is_kept).sum())
            written[row], padded[row] = written[row] + new, padded[row] + new
        pool = [row for row in pool if written[row] < length]
    return PooledRounds(rounds, grouped / rounds, moved, -(-turns // batch))
