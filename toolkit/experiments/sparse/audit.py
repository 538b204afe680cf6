"""A comparison of all systems of sparse decoding on a user's model and text.

The text is read densely except for its last tokens. These are read one by one with sparse attention
in every full softmax layer of every loop, as in decoding.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from toolkit.attention.sparse import SELECTORS, FixedTokens, Selector, offloaded_step
from toolkit.attention.sparse.budget import Budget
from toolkit.attention.sparse.decode.pqcache import PQCache
from toolkit.conversion.student import with_mixers
from toolkit.experiments.sparse.quality import (
    Quality,
    Steps,
    at_small_budgets,
    fewer_tokens,
    quality_of_steps,
    read_sparsely,
)
from toolkit.language import load_language_model
from toolkit.looped import LAYERS, LoopedConfig, LoopedLM, load_checkpoint
from toolkit.looped.layers import token_positions
from toolkit.looped.loops.rows import row_of
from toolkit.looped.mixing.layer import MixingLayer
from toolkit.looped.model import run_blocks
from toolkit.measure.tables import text_table

LEAST_BEFORE = 32  # tokens that are read densely first
ROUNDING = 1e-3  # of bytes that are equal
EQUAL = ", equal bytes"  # after a system's name: its index is part of what the budget reads
CONTROL, BEST = "random", "oracle"  # what any system should beat, and what none can
FIRST = (CONTROL, BEST, "window")  # quick ones, so that there is something to see soon
MARGIN = 0.05  # of the mass: what chance must lose at equal bytes for the text to decide anything


class Row(NamedTuple):
    """The result of the audit for one system.

    Attributes:
        name: name of the system.
        quality: quality of its attention, over layers, heads and steps.
        same: share of steps whose likeliest token is that of dense attention.
        loss: nats per token on the text.
        dense_loss: nats per token of dense attention.
        dense_kilobytes: kilobytes that dense attention reads per head and step.
        off: largest difference of a logit if the budget includes all tokens; 0 up to rounding.
            Measured for the first budget.
        link_kilobytes: kilobytes over the host link per head and step, if keys and values were on
            the host without a cache; only for PQCache.
        lost: mean share of the softmax on each token the last query did not read [time].
        budget: tokens that a head may attend to.
        budget_kilobytes: keys and values of so many tokens.
    """

    name: str
    quality: Quality
    same: float
    loss: float
    dense_loss: float
    dense_kilobytes: float
    off: float | None
    link_kilobytes: float | None
    lost: Float[np.ndarray, "time"]
    budget: int
    budget_kilobytes: float

    @property
    def is_equal(self) -> bool:
        """Whether tokens and index together read no more than the budget's keys and values."""
        return self.quality.kilobytes <= (1 + ROUNDING) * self.budget_kilobytes


def load_any(path: Path, dtype: str | None = None) -> LoopedLM:
    """A run's folder, an exported file, or a folder with a published checkpoint.

    `dtype` is what a published one computes in, float32 if None; a run's is that of its training.
    """
    is_published = path.is_dir() and (path / "config.json").is_file()
    is_ours = (path / "run.json").is_file() or path.is_file()
    if is_published and not is_ours:
        return load_checkpoint(path, dtype=dtype or "float32")
    if dtype is not None:
        raise ValueError(f"dtype is for a published checkpoint; {path} says its own")
    return load_language_model(path)


Reader = Callable[[str], tuple[Int[np.ndarray, "time"], list[str]]]
"""A text as tokens, and each token as text."""


def text_reader(model: LoopedLM, path: Path) -> Reader:
    """What turns a text into tokens: bytes, or the tokenizer of the checkpoint."""
    if model.config.vocabulary == 256:
        return as_bytes
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no tokenizer.json, and its model does not read bytes")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("a checkpoint's tokenizer needs: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"{file} is not a tokenizer: {error}") from None

    def read(text: str) -> tuple[Int[np.ndarray, "time"], list[str]]:
        encoded = tokenizer.encode(text)
        # A character of several tokens is the first one's; what no token has goes to the next.
        ends = np.maximum.accumulate([0, *(end for _, end in encoded.offsets)]).tolist()
        return np.array(encoded.ids, np.int32), [text[a:b] for a, b in itertools.pairwise(ends)]

    return read


def as_bytes(text: str) -> tuple[Int[np.ndarray, "time"], list[str]]:
    """A text as its bytes, and each byte as a character."""
    data = text.encode()
    return np.frombuffer(data, np.uint8).astype(np.int32), [chr(b) for b in data]


def bytes_per_token(config: LoopedConfig) -> int:
    """Bytes of a token's key and value, of one key-value head."""
    _, _, size = LAYERS["full"].sizes_of(config)
    return 2 * size * config.compute_dtype.itemsize


def audit(
    model: LoopedLM, tokens: Int[np.ndarray, "time"], budgets: tuple[int, ...], steps: int
) -> Iterator[list[Row]]:
    """Each system on the last `steps` tokens of a text; one with an index once more, with so many
    fewer tokens that both together read no more than the budget's keys and values.

    Yields all rows so far after every system, the first budget first; a budget has rows where it is
    below the text's length, and of the systems that do not always read more. Last comes the check
    with room for all tokens.
    """
    config = model.config
    if config.windows is not None or "full" not in config.layers:
        raise ValueError(
            "an audit needs softmax layers that see everything; "
            f"got pattern {config.pattern!r}, windows {config.windows!r}"
        )
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if len(tokens) < steps + LEAST_BEFORE:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short for {steps} steps after {LEAST_BEFORE}"
        )
    if not budgets or not 0 < budgets[0] < len(tokens):
        raise ValueError(f"budget must be 1 to {len(tokens) - 1} tokens; got {budgets}")
    budgets = tuple(budget for budget in budgets if budget < len(tokens))
    order = [name for name in FIRST if name in SELECTORS]
    order += [name for name in SELECTORS if name not in FIRST]
    selectors = {name: at_small_budgets(name) for name in order}
    name = min(selectors, key=lambda name: selectors[name].least)
    if min(budgets) < (least := selectors[name].least):
        raise ValueError(
            f"budget must be at least {least} tokens, what {name} always reads; got {min(budgets)}"
        )
    given, start = jnp.asarray(tokens)[None], len(tokens) - steps
    dense = nnx.jit(lambda model, tokens: model(tokens))(model, given)[0, start:]
    itemsize, per_token = config.compute_dtype.itemsize, bytes_per_token(config)
    size = per_token // (2 * itemsize)
    dense_bytes = (start + (steps + 1) / 2) * per_token
    rows: list[Row] = []
    cells = [(b, *pair) for b in budgets for pair in selectors.items() if pair[1].least <= b]
    for most, name, selector in tqdm(cells, desc="audit", unit="system"):

        def row(name: str, budget: int, selector: Selector = selector, most: int = most) -> Row:
            logits, seen = run_sparsely(
                model, given, selector, start, FixedTokens(budget), tells_lost=True
            )
            loss, dense_loss = (_loss(x, tokens[start:]) for x in (logits[0], dense))
            quality = quality_of_steps(seen, start)
            lost = np.mean([np.asarray(steps.lost) for steps in seen], axis=(0, 1, 2))
            same = float((logits[0].argmax(-1) == dense.argmax(-1)).mean())
            link = None
            if isinstance(selector, PQCache):
                fetched = round(quality.tokens - selector.sinks - selector.least_recent(budget))
                sizes = {"key": size, "value": size, "itemsize": itemsize}
                sizes |= {"parts": selector.parts, "bits": selector.bits}
                step = offloaded_step(len(tokens), max(fetched, 0), link=1.0, **sizes)
                link = (step.index_bytes + step.fetched_bytes) / 1000
            return Row(
                name, quality, same, loss, dense_loss, dense_bytes / 1000, None, link, lost,
                most, most * per_token / 1000,
            )  # fmt: skip

        rows.append(row(name, most))
        fewer = fewer_tokens(rows[-1].quality, most, per_token)
        if selector.least <= fewer < most:
            rows.append(row(f"{name}{EQUAL}", fewer))
        yield list(rows)
    for name, selector in tqdm(selectors.items(), desc="room for all", unit="system"):
        whole, _ = run_sparsely(model, given, selector, start, FixedTokens(len(tokens)))
        off = float(jnp.abs(whole[0] - dense).max())
        is_own = [row.budget == budgets[0] and row.name.removesuffix(EQUAL) == name for row in rows]
        rows = [row._replace(off=off) if own else row
                for row, own in zip(rows, is_own, strict=True)]  # fmt: skip
    yield rows


def _loss(logits, targets) -> float:
    """Of each token but the first, given those before it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], jnp.asarray(targets[1:]))
    return float(losses.mean()) if len(targets) > 1 else math.nan


class _Sparse(MixingLayer):
    """A softmax layer that attends sparsely from `start` on, and shows what it dropped."""

    def __init__(self, mixer: Any, attend: Any):
        self.dense, self.attend = mixer, attend

    def __call__(self, x: Float[Array, "batch time width"], **_: Any) -> tuple[Array, Any]:
        seen = self.dense._project(x, token_positions(x.shape[:2], None, None))
        steps = self.attend(seen)
        start = x.shape[1] - steps.out.shape[1]
        out = jnp.concatenate([steps.exact[:, :start], steps.out.astype(x.dtype)], axis=1)
        return self.dense._finish(x, out), steps


def run_sparsely(
    model: LoopedLM,
    tokens: Array,
    selector: Selector,
    start: int,
    budget: Budget,
    **how: bool,
) -> tuple[Array, list[Steps]]:
    """Logits of the last tokens, and what each softmax layer of each loop saw and dropped.

    Layer after layer, for the attention to be compiled once and not with every layer again.
    """
    attend = partial(read_sparsely, selector=selector, start=start, budget=budget, **how)
    full = [layer for layer, word in enumerate(model.config.layers) if word == "full"]
    sparse = with_mixers(model, {i: _Sparse(model.blocks[i].mixer, attend) for i in full})
    injected, _ = run_blocks(sparse.prelude, sparse.embedding(tokens))
    # A sparse layer hands on what it saw where other layers hand on a cache.
    places = (None,) * len(sparse.blocks)
    h, rows, seen = sparse.start(injected), sparse.loop_rows(), []
    for tau in range(model.config.loops):
        h, loop = sparse.loop(h, *row_of(rows, tau), tau=tau, injected=injected, caches=places)
        assert loop is not None  # there were places
        seen += [loop[layer] for layer in full]
    h, _ = run_blocks(sparse.coda, h)
    return sparse.head(h[:, start:]), seen


def audit_table(rows: list[Row]) -> str:
    """The rows as text."""
    head = ["system", "same next token", "loss", "mass kept", "5th percentile", "output error",
            "budget", "tokens read", "kB read", "of dense", "kB over a host link",
            "off with room for all"]  # fmt: skip
    all_of_it = f"{rows[0].dense_kilobytes:.1f}"
    lines = [["dense", "100 %", f"{rows[0].dense_loss:.4f}", "1.000", "1.000", "0.000", "", "all",
              all_of_it, "100 %", all_of_it, "0"]]  # fmt: skip
    for row in rows:
        q = row.quality
        share = q.kilobytes / row.dense_kilobytes
        link = "" if row.link_kilobytes is None else f"{row.link_kilobytes:.1f}"
        lines.append(
            [row.name, f"{row.same:.0%}".replace("%", " %"), f"{row.loss:.4f}", f"{q.mass:.3f}",
             f"{q.worst_mass:.3f}", f"{q.error:.3f}", str(row.budget), f"{q.tokens:.0f}",
             f"{q.kilobytes:.1f}", f"{share:.0%}".replace("%", " %"), link,
             "" if row.off is None else f"{row.off:.1e}"]
        )  # fmt: skip
    table = text_table([head, *lines], "<" + ">" * (len(head) - 1))
    equal = {(row.name.removesuffix(EQUAL), row.budget) for row in rows if row.is_equal}
    for row in rows:
        if (row.name.removesuffix(EQUAL), row.budget) not in equal:
            table += f"\n{row.name}: not at equal bytes, as its index leaves too few tokens"
    return table + without_rows(dict.fromkeys(row.budget for row in rows))


def without_rows(budgets: Iterable[int], selectors: Mapping[str, Selector] | None = None) -> str:
    """A line for every system that always reads more than one of these budgets."""
    selectors = selectors or {name: at_small_budgets(name) for name in SELECTORS}
    cells = itertools.product(budgets, selectors)
    found = ((budget, name, selectors[name].least) for budget, name in cells)
    return "".join(
        f"\n{name}, budget {budget}: no row, as its sinks and recent tokens, which are always "
        f"read, are {least}"
        for budget, name, least in found
        if budget < least
    )


def verdict(rows: list[Row]) -> str:
    """What the rows at equal bytes say, budget by budget, or that this text decides nothing."""
    sentences = []
    for budget in dict.fromkeys(row.budget for row in rows):
        found = {row.name.removesuffix(EQUAL): row.quality
                 for row in rows if row.budget == budget and row.is_equal}  # fmt: skip
        others = {name: q.mass for name, q in found.items() if name not in (CONTROL, BEST)}
        if CONTROL not in found or not others:
            continue
        best, chance = max(others, key=lambda name: others[name]), found[CONTROL].mass
        words = f"Budget {budget}: at equal bytes {best} keeps the most mass, {others[best]:.3f}"
        if others[best] < chance + MARGIN:
            words = f"Budget {budget} is void: at equal bytes {best} keeps {others[best]:.3f}"
        sentences.append(f"{words} (5th percentile {found[best].worst_mass:.3f}); {CONTROL} tokens "
                         f"keep {chance:.3f}.")  # fmt: skip
    return " ".join(sentences) or f"No row at equal bytes beside {CONTROL} tokens yet."
