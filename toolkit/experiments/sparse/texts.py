"""Perplexity against budget: the text models read held-out code, its end sparsely.

The models are those of `text_model.py`, bytes in and out, eight query heads on two key heads or on
one; with the two copied for each of their query heads, the same model has one per key head. The
passages are drawn from the tenth of the corpus that was not trained on. What is read sparsely lies
beyond position `LENGTH - STEPS`. A quotation is a passage whose end repeats, letter by letter, what
stood at a depth of it.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from toolkit.attention.sparse import SELECTORS, FixedTokens, Selector
from toolkit.attention.sparse.budget import Budget
from toolkit.experiments.sparse.audit import run_sparsely
from toolkit.experiments.sparse.quality import SMALLER, Quality, quality_of_steps
from toolkit.experiments.sparse.text_model import CONFIG, FILES
from toolkit.looped import LoopedLM, load_model
from toolkit.training import load_corpus

PASSAGES, LENGTH, STEPS, CUE = 1, 2048, 96, 16  # of a quotation, so many bytes are read before it
DENSE = "dense"  # reads everything
# Keys of 32 numbers: an index takes its share of them, and no more.
FINE = {"tactic": SMALLER["tactic"], "hata": {"bits": 64}}


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
    """A system by its name, with an index for keys of 32 numbers."""
    return SELECTORS[name](**FINE.get(name, {}))


@functools.cache
def load_text_model(group: int) -> LoopedLM:
    """The recorded text model of so many query heads per key head, one by copies of key heads."""
    if group in FILES:
        return load_model(FILES[group])
    (copies, file), *_ = FILES.items()
    own = load_model(file)
    config = own.config.with_options(full={"key_value_heads": CONFIG.heads})
    params = dict(nnx.to_flat_state(nnx.state(own)))
    for path, param in params.items():
        if path[-2:] in (("key", "kernel"), ("value", "kernel")):
            heads = param[...].reshape(CONFIG.width, CONFIG.heads // copies, -1)
            params[path] = nnx.Param(heads.repeat(copies, axis=1).reshape(CONFIG.width, -1))
    copied = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(copied), nnx.from_flat_state(params))


def perplexity(
    model: LoopedLM, selector: Selector, budget: Budget | None, text: np.ndarray, **how: bool
) -> tuple[float, Quality]:
    """Perplexity of the last bytes of passages, and what was read; with no budget, of all bytes."""
    start, budget = text.shape[1] - STEPS - 1, budget or FixedTokens(text.shape[1])
    logits, seen = run_sparsely(model, jnp.asarray(text), selector, start, budget, **how)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, -STEPS:])
    return math.exp(losses.mean()), quality_of_steps(seen, start)
