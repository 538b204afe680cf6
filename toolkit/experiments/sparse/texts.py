"""Perplexity against budget: a small looped model reads held-out text, its end sparsely.

The model is `data/models/full-full.safetensors`, bytes in and out, trained on sequences of 128; the
passages are drawn from the tenth of its corpus that it was not trained on.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit.attention.sparse import FixedTokens, Selector
from toolkit.attention.sparse.budget import Budget
from toolkit.experiments.sparse.audit import run_sparsely
from toolkit.experiments.sparse.model import FILE
from toolkit.looped import LoopedLM, load_model
from toolkit.training import load_corpus

PASSAGES, LENGTH, STEPS = 16, 160, 32


def perplexity(
    selector: Selector, tokens: int | None, seed: int, *, corrects_tail: bool = False
) -> float:
    """Perplexity of the last bytes of a seed's passages with a budget of tokens per head; None:
    all."""
    held_out = load_corpus("prose").split()[1]
    firsts = np.random.default_rng(seed).integers(0, len(held_out) - LENGTH, PASSAGES)
    text = np.stack([held_out[first : first + LENGTH] for first in firsts]).astype(np.int32)
    budget = FixedTokens(LENGTH if tokens is None else tokens)
    return math.exp(_loss(_model(), jnp.asarray(text), selector, budget, corrects_tail))


@functools.cache
def _model() -> LoopedLM:
    return load_model(FILE.with_name("full-full.safetensors"))


def _loss(
    model: LoopedLM, text: jax.Array, selector: Selector, budget: Budget, corrects_tail: bool
) -> jax.Array:
    """Nats per byte: the logits before each of the last bytes are those of sparse steps."""
    start = LENGTH - STEPS - 1
    logits, _ = run_sparsely(model, text, selector, start, budget, corrects_tail=corrects_tail)
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits[:, :-1], text[:, -STEPS:]).mean()
