"""Speculative decoding writes the exact model's text, whatever the draft proposes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, generate, generate_speculatively, pad_prompts
from toolkit.looped.decoding.speculative import speculate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A cache that holds nothing."""

    length: jax.Array


def chain_one(table, tokens, cache):
    return table[tokens], Rows(cache.length + 1)


def chain_all(table, tokens, cache):
    return table[tokens], Rows(cache.length + tokens.shape[1])


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


def test_a_draft_may_read_the_exact_cache():
    exact = model_of(0)
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    found = generate_speculatively(exact, exact, prompt, 9, drafts=2, shares_cache=True)
    assert (found.tokens == generate(exact, prompt, 9)).all()
    assert found.kept.tolist() == [2, 2]


def test_sampled_text_has_the_exact_distribution():
    """A chain of three tokens whose draft is wrong: counts of pairs against their chances."""
    p = jnp.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.25, 0.5, 0.25]])
    q = jnp.array([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.6, 0.2, 0.2]])
    batch = 4096
    found = speculate(
        chain_one,
        chain_all,
        (jnp.log(q), jnp.log(p)),
        (jnp.tile(jnp.log(p[:1]), (batch, 1)), *(Rows(jnp.zeros(batch, int)) for _ in "qp")),
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
        ({}, {"temperature": 1.0}, "needs a key"),
        ({"pattern": "gdn"}, {}, "draft has layers 'gdn', whose cache cannot"),
        ({"windows": "4"}, {}, "draft has windows"),
    ],
)
def test_what_cannot_be_is_refused(draft, how, message):
    how = {"length": 4, **how}
    with pytest.raises(ValueError, match=message):
        generate_speculatively(model_of(0), model_of(1, **draft), jnp.array([[1]]), **how)
