"""Speculative decoding writes the exact model's text, whatever the draft proposes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from toolkit.attention import register_dataclass
from toolkit.attention._caches import Rows
from toolkit.looped import LoopedConfig, LoopedLM, generate, generate_speculatively, pad_prompts
from toolkit.looped.decoding.drafts import History, ngram_draft, verify_all
from toolkit.looped.decoding.speculative import speculate
from toolkit.looped.decoding.steps import prefill


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Nothing(Rows):
    """A cache that holds nothing."""

    length: jax.Array


def chain_one(table, tokens, cache):
    return table[tokens], Nothing(cache.length + 1)


def chain_all(table, tokens, cache):
    return table[tokens], Nothing(cache.length + tokens.shape[1])


def model_of(seed, **fields):
    config = LoopedConfig.tiny(width=16, heads=2, vocabulary=12, **fields)
    return LoopedLM(config, rngs=nnx.Rngs(seed))


@pytest.mark.slow
def test_greedy_text_is_that_of_the_exact_model_row_by_row():
    exact, other = model_of(0, pattern="full full"), model_of(1)
    prompts, lengths = pad_prompts([[1, 2, 3], [4], [5, 6]])
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    wanted = generate(exact, prompts, 12, lengths=lengths)
    for draft in (other, exact):
        found = generate_speculatively(exact, draft, prompts, 12, drafts=3, lengths=lengths)
        assert (found.tokens == wanted).all()
    assert found.kept.tolist() == [3, 3, 3]
    assert found.rounds == 3  # one token of the prompt's, and four a round
    assert generate_speculatively(exact, exact, prompts, 1).rounds == 0


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        pytest.param("gdn full", {"loops": 2}, marks=pytest.mark.slow),
        *(
            pytest.param(pattern, fields, marks=pytest.mark.nightly)
            for pattern, fields in (
                ("gdn", {}), ("mamba2 full", {}), ("hybrid", {}), ("rwkv7", {}), ("conv full", {}),
                ("full", {"windows": "4"}), ("csa full", {}), ("nsa moba", {}),
                ("dsa mla", {}), ("mesa", {}), ("kda full", {}),
            )
        ),
    ],
)  # fmt: skip
def test_a_target_may_have_states_and_windows(pattern, fields):
    """Its own loops, n-grams, a stranger and itself draft; a state not taken back would show."""
    exact = model_of(0, pattern=pattern, **fields)
    prompts, lengths = pad_prompts([[1, 2, 3, 1, 2], [4], [5, 6]])
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    wanted = generate(exact, prompts, 12, lengths=lengths)
    drafts = ["ngram:2", model_of(1), *(["loops:1"] if fields.get("loops") else [])]
    for draft in drafts:
        found = generate_speculatively(exact, draft, prompts, 12, drafts=3, lengths=lengths)
        assert (found.tokens == wanted).all()
        assert found.kept.min() < 3  # some drafts were taken back


def test_n_grams_propose_what_followed_before():
    history = History.of(jnp.array([[0, 0, 7, 8, 9, 7], [1, 2, 3, 4, 5, 6]]), jnp.array([4, 6]), 10)
    logits, after = ngram_draft(2, 12)(None, jnp.array([8, 1]), history)
    assert logits.argmax(1).tolist() == [9, 1]  # found; or the last token again
    assert after.length.tolist() == [5, 7]
    assert after.tokens[0, :5].tolist() == [7, 8, 9, 7, 8]


@pytest.mark.nightly
def test_truncated_samples_and_stop_tokens_are_those_of_the_model():
    exact = model_of(0, pattern="gdn full", loops=2)
    prompt = jnp.tile(jnp.array([[1, 2, 3]]), (2048, 1))
    how = {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "key": jax.random.key(1)}
    for draft in ("loops:1", "ngram:1"):
        found = generate_speculatively(exact, draft, prompt, 3, drafts=2, **how)
        plain = generate(exact, prompt, 3, **how)
        # Two samples of the same law, compared by pairs of tokens (two-sample chi-square).
        counts = np.zeros((2, 12, 12))
        for side, tokens in enumerate((found.tokens, plain)):
            np.add.at(counts[side], tuple(np.asarray(tokens[:, 1:]).T), 1)
        cells = counts[:, counts.sum(0) > 20].T
        assert stats.chi2_contingency(cells).pvalue > 1e-3
    other = generate(exact, prompt, 3, **how | {"temperature": 0.5})  # the control
    counts[1] = 0
    np.add.at(counts[1], tuple(np.asarray(other[:, 1:]).T), 1)
    assert stats.chi2_contingency(counts[:, counts.sum(0) > 20].T).pvalue < 1e-3
    wanted = generate(exact, prompt[:2], 12)
    stop = int(wanted[0, 4])
    found = generate_speculatively(exact, "loops:1", prompt[:2], 12, stop_token=[stop, 11])
    assert (found.tokens == generate(exact, prompt[:2], 12, stop_token=[stop, 11])).all()


def test_every_row_advances_by_its_own_and_ends_where_its_text_does():
    """What EQSPEC restores after each round: positions, masks and cache lengths of true tokens."""
    exact = model_of(0)
    prompts, lengths = pad_prompts([[0, 2, 0], [4], [5, 6, 1, 0, 2]])
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    drafts, room = 2, prompts.shape[1] + 12
    logits, cache = prefill(exact, prompts, room, lengths=lengths)
    found, seen = generate_speculatively(exact, "ngram:1", prompts, 9, lengths=lengths), []

    def verify(model, tokens, cache):
        jax.debug.callback(lambda length: seen.append(np.array(length)), cache.length)
        return verify_all(model, tokens, cache)

    own = speculate(
        ngram_draft(1, 12), verify, (exact, exact),
        (logits, History.of(prompts, lengths, room), cache), 9,
        drafts=drafts, temperature=0.0, key=jax.random.key(0),
    )  # fmt: skip
    jax.effects_barrier()
    assert (own.tokens == found.tokens).all()
    written = np.ones(3, int)
    assert len(seen) == own.rounds
    for length, kept in zip(seen, own.by_round, strict=True):
        goes_on = kept >= 0
        # The last token written is not read yet, the prompt is.
        assert (length == np.asarray(lengths) + written - 1)[goes_on].all()
        written += np.where(goes_on, kept + 1, 0)
    assert len({tuple(length) for length in seen}) > 1
    assert len({*own.by_round[0].tolist()} | {*own.by_round[-1].tolist()}) > 1  # ragged


def test_a_draft_may_read_the_exact_cache():
    exact = model_of(0)
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    found = generate_speculatively(exact, exact, prompt, 9, drafts=2, shares_cache=True)
    assert (found.tokens == generate(exact, prompt, 9)).all()
    assert found.kept.tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gdn", "mamba2 full", "rwkv7", "nsa", "moba"])
def test_a_draft_returns_to_its_state(pattern):
    """A draft whose memory kept rejected tokens would propose other tokens than it should."""
    exact, draft = model_of(0), model_of(1, pattern=pattern)
    prompt = jnp.array([[1, 2, 3, 4], [4, 5, 6, 7]])
    found = generate_speculatively(exact, draft, prompt, 12, drafts=3)
    text = generate(exact, prompt, 12 + 3)  # the last round may draft beyond the end
    assert (found.tokens == text[:, :12]).all()
    next_of = nnx.jit(lambda draft, text, at: draft(text[None])[0, at - 1].argmax())
    for row, kept in zip(jnp.concatenate([prompt, text], axis=1), found.by_round.T, strict=True):
        wanted = drafts_kept(lambda text, at: int(next_of(draft, text, at)), np.array(row), 3)
        assert kept[kept >= 0].tolist() == wanted


def drafts_kept(next_of, text, drafts, start=5):
    """How many drafts of each round a text keeps, by reading it anew before every token."""
    kept, at = [], start
    while at < len(text) - drafts:
        draft = np.pad(text, (0, drafts))  # what follows a token does not change what it says
        for n in range(drafts):
            draft[at + n] = next_of(draft, at + n)
        wanted = np.pad(text, (0, drafts), constant_values=-1)[at : at + drafts]
        kept.append(int(np.cumprod(draft[at : at + drafts] == wanted).sum()))
        at += kept[-1] + 1
    return kept


def test_sampled_text_has_the_exact_distribution():
    """A chain of three tokens whose draft is wrong: counts of pairs against their chances."""
    p = jnp.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.25, 0.5, 0.25]])
    q = jnp.array([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.6, 0.2, 0.2]])
    batch = 4096
    found = speculate(
        chain_one,
        chain_all,
        (jnp.log(q), jnp.log(p)),
        (jnp.tile(jnp.log(p[:1]), (batch, 1)), *(Nothing(jnp.zeros(batch, int)) for _ in "qp")),
        3,
        drafts=2,
        temperature=1.0,
        key=jax.random.key(0),
    )
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, tuple(np.asarray(found.tokens).T), 1)
    wanted = batch * np.asarray(p)[0, :, None, None] * np.asarray(p)[:, :, None] * np.asarray(p)
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    assert chi_square < 54  # the largest of 26 degrees of freedom in a thousand trials
    assert 0 < found.kept.mean() < 2


@pytest.mark.parametrize(
    ("draft", "how", "message"),
    [
        ({}, {"drafts": 0}, r"drafts must lie in \[1, 64\]; got 0"),
        ({}, {"length": 0}, "length must lie in"),
        ({}, {"draft": "loops:9"}, "draft: got 'loops:9'"),
        ({}, {"draft": "ngram:x"}, "draft: got 'ngram:x'"),
        ({}, {"temperature": 1.0}, "needs a key"),
        ({"pattern": "gdn"}, {"shares_cache": True}, "draft has layers 'gdn', whose cache cannot"),
        ({"windows": "4"}, {}, "draft has windows"),
    ],
)
def test_what_cannot_be_is_refused(draft, how, message):
    how = {"length": 4, "draft": model_of(1, **draft), **how}
    with pytest.raises(ValueError, match=message):
        generate_speculatively(model_of(0), prompt=jnp.array([[1]]), **how)
