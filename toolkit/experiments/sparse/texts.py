"""Perplexity against budget: the text model reads held-out code, its end sparsely.

The model is `data/models/text.safetensors`, bytes in and out, eight query heads on two key heads;
the passages are drawn from the tenth of its corpus that it was not trained on. What is read
sparsely lies beyond position `LENGTH - STEPS`. A quotation is a passage whose end repeats, letter
by letter, what stood at a depth of it.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax

from toolkit.attention.sparse import SELECTORS, FixedTokens, Selector
from toolkit.attention.sparse.budget import Budget
from toolkit.experiments.sparse.audit import run_sparsely
from toolkit.experiments.sparse.model import FILE
from toolkit.experiments.sparse.quality import (
    SMALLER,
    Quality,
    quality_of,
)
from toolkit.looped import LoopedLM, load_model
from toolkit.training import load_corpus

PASSAGES, LENGTH, STEPS, CUE = 2, 2048, 48, 16  # of a quotation, so many bytes are read before it
DENSE = "dense"  # reads everything
# Keys of 16 numbers: an index takes its share of them, and no more.
FINE = SMALLER | {"hata": {"bits": 64}}


def passages(seed: int, depth: float | None = None) -> np.ndarray:
    """The passages of a seed [passages, length]; with a depth, their ends quote from there."""
    held_out = load_corpus("code").split()[1]
    firsts = np.random.default_rng(seed).integers(0, len(held_out) - LENGTH, PASSAGES)
    text = np.stack([held_out[first : first + LENGTH] for first in firsts]).astype(np.int32)
    if depth is not None:
        quoted = CUE + STEPS
        start = round(depth * (LENGTH - 2 * quoted))
        text[:, -quoted:] = text[:, start : start + quoted]
    return text


def text_selector(name: str) -> Selector:
    """A system by its name, with an index for keys of 16 numbers."""
    return SELECTORS[name](**FINE.get(name, {}))


@functools.cache
def load_text_model() -> LoopedLM:
    """The recorded text model."""
    return load_model(FILE.with_name("text.safetensors"))


def perplexity(
    selector: Selector, budget: Budget | None, text: np.ndarray
) -> tuple[float, Quality]:
    """Perplexity of the last bytes of passages, and what was read; with no budget, of all bytes."""
    model, start = load_text_model(), text.shape[1] - STEPS - 1
    how = FixedTokens(text.shape[1]) if budget is None else budget
    logits, seen = run_sparsely(model, jnp.asarray(text), selector, start, how)
    parts = [(x.mass, x.out, x.exact[:, start:], x.tokens, x.bytes_read) for x in seen]
    quality = quality_of(*(np.stack(part) for part in zip(*parts, strict=True)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, -STEPS:])
    return math.exp(losses.mean()), quality
