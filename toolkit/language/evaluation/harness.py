"""A looped language model behind the interface of lm-evaluation-harness, if that is installed."""

import itertools
from typing import Any

import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.language.evaluation.evaluate import windows
from toolkit.language.evaluation.likelihoods import Words, log_likelihoods
from toolkit.language.tokens import SpecialTokens
from toolkit.looped import LoopedLM, generate


@checked
def harness_model(
    model: LoopedLM, *,
    tokenizer: Any = None, special: SpecialTokens | None = None, batch: int = 8,
    window: int = 2048,
) -> Any:  # fmt: skip
    """The model as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Args:
        model: any looped language model.
        tokenizer: made by `load_tokenizer`; None for a model of bytes.
        special: the tokens that start and end a text.
        batch: sequences computed together.
        window: most tokens that are read or predicted together; contexts lose their beginning.

    Returns:
        An instance of a subclass of `LM`; it decodes greedily and refuses to sample.

    Raises:
        ImportError: lm-evaluation-harness is not installed.

    Source: Gao et al., "A framework for few-shot language model evaluation", whose class `LM` says
        what its three methods return.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0))
        >>> harness_model(model)
        Traceback (most recent call last):
        ImportError: lm_eval is missing: pip install lm-eval
    """
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("lm_eval is missing: pip install lm-eval") from None
    words = Words(tokenizer, special or SpecialTokens(), model.config.vocabulary)
    stops = (special or SpecialTokens()).stops

    def scored(pairs):
        found = dict(log_likelihoods(model, pairs, batch=batch))
        return [found[number] for number in range(len(pairs))]

    class Looped(LM):
        def loglikelihood(self, requests):
            pairs = [words.pair(*request.args) for request in requests]
            return [
                (found.log, found.is_greedy)
                for found in scored([(a[-(window + 1 - len(b)) :], b) for a, b in pairs])
            ]

        def loglikelihood_rolling(self, requests):
            pieces = [
                list(windows(words.first, words.tokens(request.args[0]), window))
                for request in requests
            ]
            found = iter(scored([pair for pairs in pieces for pair in pairs]))
            return [sum(next(found).log for _ in pairs) for pairs in pieces]

        def generate_until(self, requests):
            return [self._written(*request.args) for request in requests]

        def _written(self, context, how):
            if how.get("do_sample") or how.get("temperature", 0):
                raise ValueError("generate_until: sampling was asked for, wanted greedy decoding")
            length, ends = how.get("max_gen_toks", 256), how.get("until", ())
            ends = [ends] if isinstance(ends, str) else list(ends)
            prompt = (words.tokens(context) or [words.first])[-window:]
            written = generate(model, jnp.asarray([prompt], jnp.int32), length, stop_token=stops)
            tokens = itertools.takewhile(
                lambda token: token not in (stops or ()), written[0].tolist()
            )
            text = words.text([*tokens])
            for end in ends:
                text = text.split(end)[0] if end else text
            return text

    return Looped()
