"""From logits to a token: greedy, temperature, top-k and top-p, as pure functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from toolkit._checks import checked


@checked
def truncated_logits(
    logits: Float[Array, "batch vocabulary"],
    *,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Float[Array, "batch vocabulary"]:
    """Logits of the distribution that sampling draws from; excluded tokens get -inf.

    First logits / temperature, then the k most likely tokens, then among those, renormalised,
    the smallest set of most likely tokens whose mass reaches p. Equal logits rank in the order
    of the vocabulary, so the set is the same on every run.

    Args:
        logits: scores of the next token.
        temperature: above 0; below 1 sharpens, above 1 flattens.
        top_k: how many tokens to keep, or None.
        top_p: mass in (0, 1] to keep, or None.

    Returns:
        Logits of the same shape; their softmax is the distribution.

    Cost: one sort of the vocabulary, only if top_k or top_p is given.

    Source: Fan et al. 2018 (top-k); Holtzman et al., "The Curious Case of Neural Text
        Degeneration", 2020 (top-p).

    Example:
        >>> truncated_logits(jnp.array([[0.0, 2.0, 1.0]]), top_k=2)
        Array([[-inf,   2.,   1.]], dtype=float32)
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits / temperature
    if top_k is None and top_p is None:
        return logits
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
    logits: Float[Array, "batch vocabulary"],
    key: Array | None = None,
    *,
    temperature: float | Array | None = None,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Int[Array, "batch"]:
    """Draw the next token, or take the most likely one if temperature is None.

    Args:
        logits: scores of the next token.
        key: random key; not used when greedy.
        temperature: above 0, or None for greedy.
        top_k, top_p: see `truncated_logits`.

    Returns:
        int32 tokens; of equal largest logits, greedy takes the first in the vocabulary.

    Example:
        >>> sample_token(jnp.array([[0.0, 2.0, 1.0]]))
        Array([1], dtype=int32)
    """
    check_sampling(temperature, top_k, top_p)
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        raise ValueError("sampling at a temperature needs a key, e.g. jax.random.key(0).")
    kept = truncated_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    return jax.random.categorical(key, kept).astype(jnp.int32)


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Refuse numbers out of range; traced numbers are not checked."""
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, given in numbers.items():
        if given is None or isinstance(given, Tracer):
            continue
        number = np.asarray(given)
        is_sound = {
            "temperature": (number > 0) & np.isfinite(number),
            "top_k": (number >= 1) & (number % 1 == 0),
            "top_p": (number > 0) & (number <= 1),
        }[name]
        if not is_sound.all():
            wanted = {"temperature": "finite and above 0", "top_k": "a whole number of at least 1"}
            raise ValueError(f"{name} must be {wanted.get(name, 'in (0, 1]')}; got {given}.")
