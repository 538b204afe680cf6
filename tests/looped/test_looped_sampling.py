"""Sampling as Hugging Face transformers does it; prompts of many lengths share a few programs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from looped_small_model import small

from toolkit.looped import generate, pad_prompts, penalised_logits, truncated_logits
from toolkit.looped.decoding import generation, steps

EXACT: Any = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.slow
@pytest.mark.oracle
def test_the_distribution_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    draw = np.random.default_rng(0)
    logits = (3 * draw.normal(size=(40, 200))).astype(np.float32)
    text = draw.integers(0, 200, (40, 30))
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, text, True, axis=1)

    def theirs(processors):
        scores = torch.tensor(logits)
        for processor in processors:
            scores = processor(torch.tensor(text), scores)
        return scores.numpy()

    repeated = theirs([process.RepetitionPenaltyLogitsProcessor(1.7)])
    np.testing.assert_allclose(
        penalised_logits(jnp.asarray(logits), jnp.asarray(seen), 1.7), repeated, **EXACT
    )
    always_divided = np.where(seen, logits / 1.7, logits)  # the paper's rule, of positive logits
    assert not np.allclose(always_divided, repeated, **EXACT)
    for kept in ({"min_p": 0.05}, {"top_k": 9, "min_p": 0.2}, {"top_p": 0.8, "min_p": 0.2}):
        how: Any = {"temperature": 0.7, **kept}
        warpers = [process.TemperatureLogitsWarper(0.7)]
        if "top_k" in how:
            warpers.append(process.TopKLogitsWarper(how["top_k"]))
        if "top_p" in how:
            warpers.append(process.TopPLogitsWarper(how["top_p"]))
        warpers.append(process.MinPLogitsWarper(how["min_p"]))
        wanted, ours = theirs(warpers), np.asarray(truncated_logits(jnp.asarray(logits), **how))
        assert 40 < np.isfinite(wanted).sum() < logits.size
        np.testing.assert_allclose(ours, wanted, **EXACT)
        without_min_p: Any = {name: value for name, value in how.items() if name != "min_p"}
        loose = np.asarray(truncated_logits(jnp.asarray(logits), **without_min_p))
        assert np.isfinite(loose).sum() > np.isfinite(wanted).sum()


def test_a_penalty_counts_the_prompt_and_what_was_written():
    model, prompts = small("full"), [[3, 7, 7], [9, 1, 2, 30, 4]]
    tokens, lengths = pad_prompts(prompts)
    free = np.asarray(generate(model, tokens, 40, lengths=lengths))
    written = np.asarray(generate(model, tokens, 40, lengths=lengths, repetition_penalty=1e9))
    unmoved = generate(model, tokens, 40, lengths=lengths, repetition_penalty=1.0)
    np.testing.assert_array_equal(unmoved, free)
    for prompt, row, plain in zip(prompts, written, free, strict=True):
        assert len({*prompt, *row.tolist()}) == len({*prompt}) + 40
        assert len({*plain.tolist()}) < 40
        # The padding, token 0, is not of the prompt.
        alone = generate(model, jnp.asarray([prompt]), 40, repetition_penalty=1e9)
        np.testing.assert_array_equal(alone[0], row)


def test_any_of_several_tokens_ends_a_text():
    model, prompt = small("full"), jnp.array([[3, 7, 7]])
    varied: Any = {"repetition_penalty": 1e9}
    free = np.asarray(generate(model, prompt, 12, **varied))[0].tolist()
    last = free[4]
    unused = next(token for token in range(50) if token not in free)
    stopped = np.asarray(generate(model, prompt, 12, stop_token=[unused, last], **varied))[
        0
    ].tolist()
    end = free.index(last) + 1
    assert stopped == free[:end] + [unused] * (12 - end)
    for wrong, message in (([], "must name tokens"), ([1, 50], r"must lie in \[0, 50\)")):
        with pytest.raises(ValueError, match=f"stop_token is .*{message}"):
            generate(model, prompt, 12, stop_token=wrong)


def test_a_hundred_lengths_of_prompts_are_at_most_eight_programs():
    model, text = small("gdn full", loops=1, width=24), jnp.arange(100)[None] % 50
    programs: list[Any] = [steps._prefill, generation.decode_chunk]
    before = sum(program._cache_size() for program in programs)
    kept = {}
    for length in range(1, 101):
        kept[length] = np.asarray(generate(model, text[:, :length], 2))
    assert sum(program._cache_size() for program in programs) - before <= 8
    for length in (1, 17, 50):  # the padding changes nothing
        h = model(text[:, :length])[0, -1]
        assert kept[length][0, 0] == int(jnp.argmax(h))
