"""Lossless sparse decoding on a user's model: is it exact, and does it pay?

The model drafts for itself: a sparse pass proposes tokens, a dense pass over all of them decides.
Greedy text must equal dense decoding, token by token. It pays only if a sparse draft saves more
reading than the second pass costs, which is rare for short texts and on CPUs.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from toolkit.attention.sparse import SELECTORS
from toolkit.experiments.sparse.audit import without_rows
from toolkit.looped import LoopedLM, generate, generate_speculatively
from toolkit.measure.tables import text_table

CONTROL, MARGIN = "random", 0.25  # drafts more per round than chance's are what drafting must keep
ROUNDS = 3  # of timing, dense and sparse in turn; the best of each counts


class Lossless(NamedTuple):
    """The value of one system's drafts.

    Attributes:
        name: name of the system.
        same: share of the tokens that are those of dense greedy decoding.
        kept: drafts kept per round, of `drafts`.
        drafts: proposed per round.
        seconds, dense_seconds: seconds per token, and those of dense decoding.
    """

    name: str
    same: float
    kept: float
    drafts: int
    seconds: float
    dense_seconds: float

    @property
    def pays(self) -> bool:
        """Whether it is faster than dense decoding."""
        return self.seconds < self.dense_seconds


def decode_losslessly(
    model: LoopedLM, tokens: Int[np.ndarray, "time"], budget: int, length: int, drafts: int = 4
) -> list[Lossless]:
    """One row per system: tokens after a prompt, written densely and with sparse drafts."""
    if length < 1:
        raise ValueError(f"lossless must be at least 1 token; got {length}")
    prompt = jnp.asarray(tokens)[None]
    dense: Callable[[], Array] = lambda: generate(model, prompt, length)  # noqa: E731
    wanted, rows = np.asarray(dense()), []
    for name, kind in SELECTORS.items():
        if kind.sees_queries or kind().least > budget:
            continue  # `lossless_table` says so
        words = f"{name}:{budget}"
        sparse = lambda: generate_speculatively(  # noqa: E731
            model, model, prompt, length, drafts=drafts, sparse=words  # noqa: B023
        )  # fmt: skip
        found = sparse()
        times = [[_seconds(call) / length for call in (dense, sparse)] for _ in range(ROUNDS)]
        dense_seconds, seconds = np.min(times, axis=0).tolist()
        same = float((np.asarray(found.tokens) == wanted).mean())
        rows.append(Lossless(name, same, float(found.kept[0]), drafts, seconds, dense_seconds))
    return rows


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def lossless_table(rows: list[Lossless], budget: int) -> str:
    """The rows as text, the systems without one, and the verdict in words."""
    head = [
        "drafts by",
        "identical tokens",
        "drafts kept",
        "ms per token",
        "dense",
        "times as fast",
    ]
    lines = [
        [row.name, f"{row.same:.1%}".replace("%", " %"), f"{row.kept:.2f} of {row.drafts}",
         f"{1e3 * row.seconds:.2f}", f"{1e3 * row.dense_seconds:.2f}",
         f"{row.dense_seconds / row.seconds:.2f}"]
        for row in rows
    ]  # fmt: skip
    table = text_table([head, *lines], "<" + ">" * (len(head) - 1))
    drafting = {name: kind() for name, kind in SELECTORS.items() if not kind.sees_queries}
    others = ", ".join(name for name in SELECTORS if name not in drafting)
    table += without_rows([budget], drafting)
    table += f"\n{others}: no row, as generation shows them no queries of the prompt"
    return f"{table}\n{verdict(rows)}"


def verdict(rows: list[Lossless]) -> str:
    """Whether it is exact, and whether it pays, in a sentence or two."""
    if not rows:
        return "No system drafts with this budget."
    wrong = [f"{row.name} {row.same:.1%}" for row in rows if row.same < 1]
    paying = [row for row in rows if row.pays]
    words = "Every text is that of dense decoding." if not wrong else (
        f"NOT LOSSLESS: identical tokens are {', '.join(wrong)}; where two tokens are equally "
        "likely, rounding decides."
    )  # fmt: skip
    chance = [row.kept for row in rows if row.name == CONTROL]
    if chance and max(row.kept for row in rows) < chance[0] + MARGIN:
        words += (
            f" VOID: drafts of random tokens are kept as often ({chance[0]:.2f} per round), so "
            "this text does not tell one system from another."
        )
    if not paying:
        return f"{words} It does not pay here: no system is faster than dense decoding."
    best = max(paying, key=lambda row: row.dense_seconds / row.seconds)
    times = best.dense_seconds / best.seconds
    return f"{words} It pays with {best.name}: {times:.2f} times as fast as dense decoding."
