r"""Speculative decoding: a cheap model proposes tokens, an exact one checks them all at once.

The draft model writes d_1 ... d_n after the last token; the exact model reads them in one pass and
gives distributions p_0 ... p_n. Greedy decoding keeps drafts as long as each is the likeliest
token. Sampling keeps d_i+1 with probability min(1, p_i(d)/q_i(d)), with q_i the draft model's
distribution, and replaces the first rejected draft by a sample of max(p_i - q_i, 0), normalised, so
that the text has the exact model's distribution whatever the draft. If all n drafts are kept, one
more token is drawn from p_n.

Rows of a batch keep different numbers of drafts. The exact model's cache drops the others by
`truncate`, for which layers with a state or a window keep one per token (`drafts.py`); the draft's
own cache returns to the last token kept by `restore`, so that its states and indices are exact too.

Each row has its own length, so no row waits for the batch's least (1 + sum_j a^(jB) tokens per
round of B rows that keep a draft with chance a), none is padded anew and no key or value moves,
which is what EQSPEC repairs and EXSPEC avoids by pooling rows of equal length.

Source: Leviathan et al. (2023), arXiv:2211.17192; Chen et al. (2023), arXiv:2302.01318.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.looped.decoding.cache import LoopedCache, read_sparsely
from toolkit.looped.decoding.drafts import MOST_DRAFTS, check_draft, drafting, verify_all
from toolkit.looped.decoding.layer_parallel import ParallelLayers
from toolkit.looped.decoding.sampling import check_sampling, truncated_logits
from toolkit.looped.decoding.steps import prefill
from toolkit.looped.loops.rows import check_tokens
from toolkit.looped.model import LoopedLM


class Speculation(NamedTuple):
    """The generated text, and how many drafts were kept.

    Attributes:
        tokens: the text after the prompt [batch, length].
        kept: drafts kept per round, mean over the rounds of a row [batch].
        rounds: passes of the exact model over the batch.
        by_round: drafts that each row kept in each round, -1 once it has its text
            [rounds, batch].

    Example:
        >>> kept = jnp.array([[2], [2]])
        >>> found = Speculation(jnp.zeros((1, 6), int), jnp.array([2.0]), 2, kept)
        >>> found.tokens.shape
        (1, 6)
    """

    tokens: Int[Array, "batch length"]
    kept: Float[Array, "batch"]
    rounds: int
    by_round: Int[np.ndarray, "rounds batch"]

    @property
    def tokens_per_pass(self) -> Float[Array, "batch"]:
        """Tokens that a pass of the exact model gives each row; 1 without drafts."""
        return self.kept + 1


class _Writing(NamedTuple):
    """The state between rounds; the last token is sampled but not yet in the caches."""

    tokens: Int[Array, "batch room"]
    written: Int[Array, "batch"]
    last: Int[Array, "batch"]
    cache: Any
    draft_cache: Any
    kept: Int[Array, "batch"]
    rounds: Int[Array, "batch"]


@checked
def generate_speculatively(
    model: LoopedLM, draft: LoopedLM | ParallelLayers | str, prompt: Int[Array, "batch time"],
    length: int, *,
    drafts: int = 4, temperature: float = 0.0, top_k: int | None = None,
    top_p: float | None = None, min_p: float | None = None,
    stop_token: int | Sequence[int] | None = None, key: Array | None = None,
    lengths: Int[Array, "batch"] | None = None, shares_cache: bool = False,
    sparse: str | None = None,
) -> Speculation:  # fmt: skip
    """Continue a prompt as `generate` does, with the drafts of a cheaper model.

    Args:
        model: the exact model.
        draft: the model that proposes tokens, with the same vocabulary. With its own cache it may
            have recurrent layers. Or "loops:2", the first loops of the model itself, which share
            its cache; or "ngram:3", what followed the last 3 tokens before; or `ParallelLayers`.
        prompt: at least one token per sequence.
        length: tokens to write.
        drafts: tokens proposed per round.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k, top_p, min_p: of that distribution, as in `generate`.
        stop_token: ends a row and fills it up, as in `generate`.
        key: random key, needed unless the temperature is 0.
        lengths: tokens of each prompt, see `generate`.
        shares_cache: the draft reads the exact model's cache, as the model of `with_slices` can;
            otherwise it has its own.
        sparse: how the draft reads its own cache, such as "quest:512"; with the model as its own
            draft this is sparse decoding without loss. None reads everything.

    Returns:
        The text and how many drafts were kept; the greedy text is that of `generate`.

    Cost: per round `drafts` steps of the draft and one pass of the model over drafts + 1 tokens.

    Source: Leviathan et al. (2023), arXiv:2211.17192, algorithm 1.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> found = generate_speculatively(model, model, jnp.array([[5, 3]]), length=6, drafts=2)
        >>> found.tokens.shape, found.kept.tolist()
        ((1, 6), [2.0])
    """
    propose, drafter, shares_cache, own = drafting(model, draft, shares_cache)
    _check(model, prompt, length, drafts, temperature, key)
    if not isinstance(draft, str):
        check_draft(model, drafter, shares_cache)
    check_sampling(None, top_k, top_p, min_p)
    capacity = prompt.shape[1] + length + drafts + 1
    logits, cache = prefill(model, prompt, capacity, lengths=lengths)
    if own is not None:
        own = own(prompt, lengths, capacity, drafts)
    elif not shares_cache:
        own = prefill(drafter, prompt, capacity, lengths=lengths)[1]
    if sparse is not None:
        if not isinstance(own, LoopedCache):
            raise ValueError("sparse drafts need a cache of their own; leave out shares_cache.")
        own = read_sparsely(drafter.config, own, sparse)
    return speculate(
        propose,
        verify_all,
        (drafter, model),
        (logits, own, cache),
        length,
        drafts=drafts,
        temperature=temperature,
        truncation={"top_k": top_k, "top_p": top_p, "min_p": min_p},
        stop_token=stop_token,
        key=jax.random.key(0) if key is None else key,
    )


def speculate(
    draft: Callable[..., tuple[Array, Any]], verify: Callable[..., tuple[Array, Any]],
    models: tuple[Any, Any], start: tuple[Array, Any, Any], length: int, *,
    drafts: int, temperature: float, key: Array,
    truncation: Mapping[str, float | None] | None = None,
    stop_token: int | Sequence[int] | None = None,
) -> Speculation:  # fmt: skip
    """Speculate with any two models.

    draft(model, tokens [batch], cache) returns logits [batch, size] and the new cache;
    verify(model, tokens [batch, n], cache) returns logits [batch, n, size] and the new cache.

    `start` holds the exact model's logits after the prompt and both caches (None for the draft's if
    they share one). The exact cache needs `truncate`, the draft's own `restore`.
    """
    logits, draft_cache, cache = start
    batch = logits.shape[0]
    is_greedy = temperature == 0
    key, first_key = jax.random.split(key)
    heat: dict[str, Any] = {"temperature": jnp.float32(temperature)}
    # As arrays, so that another value compiles nothing.
    heat |= {name: jnp.asarray(x) for name, x in (truncation or {}).items() if x is not None}
    stops = np.atleast_1d(np.asarray([] if stop_token is None else stop_token, np.int32))
    first = _pick(_distribution(logits, heat, is_greedy), first_key, is_greedy)
    room = jnp.zeros((batch, length + drafts + 1), jnp.int32).at[:, 0].set(first)
    # Copies, because every round donates its state.
    kept, passes = (jnp.zeros(batch, jnp.int32) for _ in range(2))
    first_place = jnp.where(jnp.isin(first, stops), length, 1).astype(jnp.int32)
    state = _Writing(room, first_place, first, cache, draft_cache, kept, passes)
    by_round = []
    while int(state.written.min()) < length:
        before, goes_on = np.array(state.kept), np.array(state.written) < length
        key, own = jax.random.split(key)
        how = {"drafts": drafts, "length": length, "is_greedy": is_greedy}
        state = _round(draft, verify, models, state, heat, stops, own, **how)
        by_round.append(np.where(goes_on, np.array(state.kept) - before, -1))
    kept = state.kept / jnp.maximum(state.rounds, 1)
    history = np.array(by_round, np.int32).reshape(-1, batch)
    tokens = state.tokens[:, :length]
    if stops.size:
        is_stop = jnp.isin(tokens, stops).astype(jnp.int32)
        tokens = jnp.where(jnp.cumsum(is_stop, axis=1) > is_stop, stops[0], tokens)
    return Speculation(tokens, kept, len(by_round), history)


@functools.partial(
    jax.jit,
    static_argnames=("draft", "verify", "drafts", "length", "is_greedy"),
    donate_argnames="state",
)
def _round(draft, verify, models, state, heat, stops, key, *, drafts, length, is_greedy):
    draft_model, model = models
    is_shared = state.draft_cache is None
    draft_key, accept_key, last_key = jax.random.split(key, 3)

    def propose(carry, own):
        token, cache = carry
        logits, cache = draft(draft_model, token, cache)
        q = _distribution(logits, heat, is_greedy)
        token = _pick(q, own, is_greedy)
        return (token, cache), (token, q)

    # The draft's own cache must hold the last draft too: one more step, whose token is discarded.
    steps = drafts if is_shared else drafts + 1
    drafting = state.cache if is_shared else state.draft_cache
    keys = jax.random.split(draft_key, steps)
    carry, proposed, q, passed = (state.last, drafting), [], [], [drafting]
    for own in keys:
        carry, (token, chances) = propose(carry, own)
        passed.append(carry[1])
        proposed.append(token)
        q.append(chances)
    proposed, q = jnp.stack(proposed[:drafts], axis=1), jnp.stack(q[:drafts], axis=1)

    checked_tokens = jnp.concatenate([state.last[:, None], proposed], axis=1)
    logits, cache = verify(model, checked_tokens, state.cache)
    p = _distribution(logits, heat, is_greedy)
    is_kept = _kept(p[:, :-1], q, proposed, accept_key, is_greedy)
    kept = jnp.cumprod(is_kept.astype(jnp.int32), axis=1).sum(axis=1)
    last = _pick(_correction(p, q, kept, is_greedy), last_key, is_greedy)

    # Rows whose text is complete stay where they were.
    goes_on = state.written < length
    place = jnp.arange(drafts + 1, dtype=jnp.int32)[None]
    new = jnp.where(place < kept[:, None], jnp.pad(proposed, ((0, 0), (0, 1))), last[:, None])
    to = jnp.where(goes_on[:, None], state.written[:, None] + place, state.tokens.shape[1])
    rows = jnp.arange(len(last), dtype=jnp.int32)[:, None]
    read = jnp.where(goes_on, kept + 1, 0)
    has_stopped = (jnp.isin(new, stops) & (place <= kept[:, None])).any(axis=1)
    return _Writing(
        state.tokens.at[rows, to].set(new, mode="drop"),
        jnp.where(goes_on & has_stopped, length, state.written + read),
        jnp.where(goes_on, last, state.last),
        cache.truncate(state.cache.length + read),
        None if is_shared else carry[1].restore(passed, read),
        state.kept + jnp.where(goes_on, kept, 0),
        state.rounds + goes_on.astype(jnp.int32),
    )


def _distribution(logits, heat, is_greedy):
    """Probabilities of the next token; all on the likeliest when greedy."""
    if is_greedy:
        return jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
    flat = truncated_logits(logits.reshape(-1, logits.shape[-1]), **heat)
    return jax.nn.softmax(flat, axis=-1).reshape(logits.shape)


def _pick(chances, key, is_greedy):
    if is_greedy:
        return chances.argmax(axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, jnp.log(chances), axis=-1).astype(jnp.int32)


def _kept(p, q, proposed, key, is_greedy):
    """Whether each draft would be kept if all before it were."""
    p, q = (jnp.take_along_axis(x, proposed[..., None], axis=-1)[..., 0] for x in (p, q))
    return p > 0 if is_greedy else jax.random.uniform(key, p.shape) * q < p


def _correction(p, q, kept, is_greedy):
    """The distribution of the token after the kept drafts."""
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # after the last draft there is none to correct
    p, q = (jnp.take_along_axis(x, kept[:, None, None], axis=1)[:, 0] for x in (p, q))
    left = jnp.maximum(p - q, 0)
    total = left.sum(axis=-1, keepdims=True)
    return p if is_greedy else jnp.where(total > 0, left / jnp.where(total > 0, total, 1), p)


def _check(model, prompt, length, drafts, temperature, key):
    check_tokens(prompt, model.config.vocabulary)
    for name, number, most in (("length", length, 2**20), ("drafts", drafts, MOST_DRAFTS)):
        if not 1 <= number <= most:
            raise ValueError(f"{name} must lie in [1, {most}]; got {number}.")
    if model.config.recursion:
        raise ValueError("recursion: caches that lack tokens cannot go back to a length.")
    check_sampling(temperature or None, None, None)
    if temperature and key is None:
        raise ValueError("sampling at a temperature needs a key, e.g. key=jax.random.key(0).")
