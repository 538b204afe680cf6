"""Log-likelihoods of texts under a model, in batches of like lengths."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit.attention import bucket_length
from toolkit.language.tokens import SpecialTokens, check_vocabulary
from toolkit.looped import LoopedLM

NEWLINE = 10


class Likelihood(NamedTuple):
    """Of a text after another one.

    Attributes:
        log: the logarithm of its probability, in nats.
        is_greedy: whether each of its tokens is the likeliest.

    Example:
        >>> Likelihood(log=-0.5, is_greedy=True).log
        -0.5
    """

    log: float
    is_greedy: bool


class Words:
    """A tokenizer as evaluation asks it: tokens of a text before another, and of the other.

    Args:
        tokenizer: made by `load_tokenizer`; None for bytes.
        special: the tokens that start and end a text.
        vocabulary: of the model.

    Example:
        >>> from toolkit.language import SpecialTokens
        >>> Words(None, SpecialTokens(), 256).pair("a ", "b")
        ([97], [32, 98])
    """

    @checked
    def __init__(self, tokenizer: Any, special: SpecialTokens, vocabulary: int) -> None:
        check_vocabulary(tokenizer, vocabulary)
        self.tokenizer = tokenizer
        first = special.start
        if first is None and special.stops:
            first = special.stops[0]
        if first is None:
            first = NEWLINE if tokenizer is None else self.tokens("\n")[0]
        self.first = first

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, none of them special."""
        if self.tokenizer is None:
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a text and of what follows it, cut where the harness cuts them.

        Spaces at the end of `context` belong to what follows. Without a context the text follows
        the token that starts one; else the one that ends one, else a line break.
        """
        body = context.rstrip()
        continuation, context = context[len(body) :] + continuation, body
        if not context:
            return [self.first], self.tokens(continuation)
        before = self.tokens(context)
        return before, self.tokens(context + continuation)[len(before) :]


@checked
def log_likelihoods(
    model: LoopedLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch: int = 8
) -> Iterator[tuple[int, Likelihood]]:
    """Log-likelihoods of tokens after other tokens, the longest pairs first.

        log p = sum_i log softmax(logits(context, continuation_<i))[continuation_i]

    Args:
        model: any causal one.
        pairs: (context, continuation), each of at least one token.
        batch: sequences computed together.

    Yields:
        The number of a pair, and its likelihood.

    Cost: One forward pass over at most twice the tokens, as sequences are padded to buckets of
        lengths; one program per bucket. The logits of one sequence at a time are in memory.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0))
        >>> [(number, found)] = log_likelihoods(model, [([1, 2], [3])])
        >>> number, found.log < 0
        (0, True)
    """
    if batch < 1:
        raise ValueError(f"batch: got {batch}, wanted at least 1")
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"pairs: context or continuation {number} is empty")
    graph, state = nnx.split(model)
    score = jax.jit(partial(_score, graph))
    sizes = [bucket_length(len(a) + len(b) - 1) for a, b in pairs]
    order = sorted(range(len(pairs)), key=lambda number: -sizes[number])
    while order:
        size = sizes[order[0]]
        chosen = [number for number in order[:batch] if sizes[number] == size]
        order = order[len(chosen) :]
        tokens = np.zeros((batch, size + 1), np.int32)
        is_scored = np.zeros((batch, size), bool)
        for row, number in enumerate(chosen):
            context, continuation = pairs[number]
            end = len(context) + len(continuation)
            tokens[row, :end] = [*context, *continuation]
            is_scored[row, len(context) - 1 : end - 1] = True
        logs, greedy = map(np.asarray, score(state, tokens, is_scored))
        for row, number in enumerate(chosen):
            if not math.isfinite(logs[row]):
                raise ValueError(f"model: the log-likelihood of pair {number} is {logs[row]}")
            yield number, Likelihood(float(logs[row]), bool(greedy[row]))


def _score(
    graph: nnx.GraphDef,
    state: Any,
    tokens: Int[Array, "batch next_time"],
    is_scored: Bool[Array, "batch time"],
) -> tuple[Float[Array, "batch"], Bool[Array, "batch"]]:
    model = nnx.merge(graph, state)

    def row(hidden, targets, is_scored):
        logits = model.head(hidden)
        logs = jax.nn.log_softmax(logits)[jnp.arange(targets.size), targets]
        is_best = jnp.argmax(logits, axis=-1) == targets
        return jnp.sum(logs, where=is_scored), jnp.all(is_best, where=is_scored)

    hidden = model.last_hidden(tokens[:, :-1])
    return jax.lax.map(lambda x: row(*x), (hidden, tokens[:, 1:], is_scored))
