"""Generation of text from a prompt."""

import codecs
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit._checks import checked
from toolkit.language.tokens import check_vocabulary, decoded, encoded
from toolkit.looped import LoopedLM, stream


@checked
def stream_text(
    model: LoopedLM,
    prompt: str,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: Any = None,
) -> Iterator[str]:
    """Continue a prompt and yield pieces of text.

    Args:
        model: a model of bytes, or of the tokenizer's tokens.
        prompt: the text to continue.
        length: number of bytes, or tokens, to write.
        temperature: 0 for the likeliest byte every time.
        top_k: sample among the k likeliest bytes only.
        top_p: sample among the likeliest bytes with this share of the probability.
        seed: seed of the sampling.
        tokenizer: made by `load_tokenizer`; None for bytes.

    Returns:
        Pieces of text; bytes that are not UTF-8 show as the replacement character.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0))
        >>> text = "".join(stream_text(model, "Once upon", length=4))
    """
    check_vocabulary(tokenizer, model.config.vocabulary)
    if not prompt:
        raise ValueError("prompt: got an empty text, wanted at least one character")
    ids = list(prompt.encode()) if tokenizer is None else encoded(tokenizer, prompt)
    tokens = jnp.asarray([ids], jnp.int32)
    pieces = stream(
        model,
        tokens,
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        key=jax.random.key(seed),
    )
    if tokenizer is not None:
        return decoded(tokenizer, (token.item() for token in pieces))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return (decoder.decode(bytes(token.astype(np.uint8))) for token in pieces)
