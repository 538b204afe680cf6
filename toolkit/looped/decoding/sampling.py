"""From logits to a token: greedy, temperature, top-k, top-p, min-p, and a penalty on repetition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked


@checked
def truncated_logits(
    logits: Float[Array, "batch vocabulary"], *,
    temperature: float | Array = 1.0, top_k: int | Array | None = None,
    top_p: float | Array | None = None, min_p: float | Array | None = None,
) -> Float[Array, "batch vocabulary"]:  # fmt: skip
    """Logits of the distribution that sampling draws from; excluded tokens get -inf.

    First logits / temperature, then the k most likely tokens, then among those, renormalised,
    the smallest set of most likely tokens whose mass reaches p, then those of at least min_p times
    the probability of the most likely one. Equal logits rank in the order of the vocabulary, so
    the set is the same on every run. Order and rules are those of Hugging Face transformers.

    Args:
        logits: scores of the next token.
        temperature: above 0; below 1 sharpens, above 1 flattens.
        top_k: how many tokens to keep, or None.
        top_p: mass in (0, 1] to keep, or None.
        min_p: least probability in (0, 1], as a share of the largest, or None.

    Returns:
        Logits of the same shape; their softmax is the distribution.

    Cost: one sort of the vocabulary, only if top_k or top_p is given.

    Source: Fan et al. 2018 (top-k); Holtzman et al., "The Curious Case of Neural Text
        Degeneration", 2020 (top-p); Nguyen et al., "Turning Up the Heat", 2024, arXiv:2407.01082
        (min-p).

    Example:
        >>> truncated_logits(jnp.array([[0.0, 2.0, 1.0]]), top_k=2)
        Array([[-inf,   2.,   1.]], dtype=float32)
    """
    check_sampling(temperature, top_k, top_p, min_p)
    logits = logits / temperature
    if top_k is not None or top_p is not None:
        logits = _most_likely(logits, top_k, top_p)
    if min_p is not None:
        # p >= min_p max p, in logarithms.
        least = logits.max(axis=-1, keepdims=True) + jnp.log(jnp.asarray(min_p, logits.dtype))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def _most_likely(logits, top_k, top_p):
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if top_k is not None:
        top_k = top_k if isinstance(top_k, Array) else min(top_k, ranked.shape[-1])
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) < top_k, ranked, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token stays whatever p: the smallest set is never empty.
        keep = (mass_before < top_p).at[..., 0].set(True)
        ranked = jnp.where(keep, ranked, -jnp.inf)
    return jnp.put_along_axis(jnp.empty_like(logits), order, ranked, axis=-1, inplace=False)


@checked
def sample_token(
    logits: Float[Array, "batch vocabulary"], key: Array | None = None, *,
    temperature: float | Array | None = None, top_k: int | Array | None = None,
    top_p: float | Array | None = None, min_p: float | Array | None = None,
) -> Int[Array, "batch"]:  # fmt: skip
    """Draw the next token, or take the most likely one if temperature is None.

    Args:
        logits: scores of the next token.
        key: random key; not used when greedy.
        temperature: above 0, or None for greedy.
        top_k, top_p, min_p: see `truncated_logits`.

    Returns:
        int32 tokens; of equal largest logits, greedy takes the first in the vocabulary.

    Example:
        >>> sample_token(jnp.array([[0.0, 2.0, 1.0]]))
        Array([1], dtype=int32)
    """
    check_sampling(temperature, top_k, top_p, min_p)
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        raise ValueError("sampling at a temperature needs a key, e.g. jax.random.key(0).")
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return jax.random.categorical(key, truncated_logits(logits, **how)).astype(jnp.int32)


@checked
def penalised_logits(
    logits: Float[Array, "batch vocabulary"],
    seen: Bool[Array, "batch vocabulary"],
    penalty: float | Array,
) -> Float[Array, "batch vocabulary"]:
    """Logits that make the tokens of the text so far less likely.

        l_v <- l_v / penalty if l_v > 0, else l_v penalty;     for tokens v that were seen

    Args:
        logits: scores of the next token, before any temperature.
        seen: whether each token of the vocabulary is in the row's text, prompt included.
        penalty: above 0; 1 changes nothing, values below 1 encourage repetition.

    Returns:
        Logits of the same shape.

    Source: Keskar et al., "CTRL", 2019, arXiv:1909.05858, section 4.1, with the treatment of
        negative logits of Hugging Face transformers.

    Example:
        >>> seen = jnp.array([[True, True, False]])
        >>> penalised_logits(jnp.array([[3.0, -1.0, 2.0]]), seen, 2.0).tolist()
        [[1.5, -2.0, 2.0]]
    """
    check_sampling(None, None, None, repetition_penalty=penalty)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def check_sampling(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any = None, repetition_penalty: Any = None
) -> None:
    """Refuse numbers out of range; traced numbers are not checked."""
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    numbers["repetition_penalty"] = repetition_penalty
    for name, given in numbers.items():
        if given is None or isinstance(given, Tracer):
            continue
        number = np.asarray(given)
        is_sound = {
            "temperature": (number > 0) & np.isfinite(number),
            "top_k": (number >= 1) & (number % 1 == 0),
            "top_p": (number > 0) & (number <= 1),
            "min_p": (number > 0) & (number <= 1),
            "repetition_penalty": (number > 0) & np.isfinite(number),
        }[name]
        if not is_sound.all():
            positive = "finite and above 0"
            wanted = {"temperature": positive, "repetition_penalty": positive}
            wanted["top_k"] = "a whole number of at least 1"
            raise ValueError(f"{name} must be {wanted.get(name, 'in (0, 1]')}; got {given}.")
