"""Generation of text from a prompt."""

import codecs
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.language.tokens import SpecialTokens, check_vocabulary, decoded, encoded
from toolkit.looped import LoopedLM, stream


@checked
def stream_text(
    model: LoopedLM, prompt: str, length: int, *,
    temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, repetition_penalty: float | None = None, seed: int = 0,
    tokenizer: Any = None, special: SpecialTokens | None = None,
) -> Iterator[str]:  # fmt: skip
    """Continue a prompt and yield pieces of text.

    Args:
        model: a model of bytes, or of the tokenizer's tokens.
        prompt: the text to continue; it may be empty if the tokenizer has a token that starts a
            text.
        length: number of bytes, or tokens, to write.
        temperature: 0 for the likeliest byte every time.
        top_k: sample among the k likeliest bytes only.
        top_p: sample among the likeliest bytes with this share of the probability.
        min_p: sample among bytes of at least this share of the largest probability.
        repetition_penalty: make bytes of the text so far less likely, see
            `toolkit.looped.penalised_logits`.
        seed: seed of the sampling.
        tokenizer: made by `load_tokenizer`; None for bytes.
        special: the tokens that start and end a text, from `find_special_tokens`;
            None for a model that has none.

    Returns:
        Pieces of text, until one of the tokens that end it; bytes that are not UTF-8 show as the
        replacement character.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0))
        >>> text = "".join(stream_text(model, "Once upon", length=4))
    """
    start, stops = special or SpecialTokens()
    check_vocabulary(tokenizer, model.config.vocabulary)
    if not prompt and tokenizer is None:
        raise ValueError("prompt: got an empty text, wanted at least one character")
    try:
        ids = list(prompt.encode())
    except UnicodeEncodeError:
        raise ValueError(f"prompt: {prompt!r} holds bytes that are not UTF-8") from None
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a number of 64 bits; got {seed}")
    if tokenizer is not None:
        ids = encoded(tokenizer, prompt, start)
    tokens = jnp.asarray([ids], jnp.int32)
    pieces = stream(
        model,
        tokens,
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        key=jax.random.key(seed),
        stop_token=stops,
    )
    ends = stops or ()
    tokens = itertools.takewhile(lambda token: token not in ends, (x.item() for x in pieces))
    if tokenizer is not None:
        return decoded(tokenizer, tokens)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return (decoder.decode(bytes([token])) for token in tokens)
