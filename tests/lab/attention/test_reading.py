"""Two memories read one sentence: the view data against the library's own mixers."""

import numpy as np
import pytest

from toolkit.attention import gated_delta_net_reference, softmax_attention_reference
from toolkit.lab.attention.online import online_scene, online_view
from toolkit.lab.attention.reading import (
    KEY_SIZE,
    MAX_TOKENS,
    SENTENCE,
    SHARPNESS,
    VALUE_SIZE,
    Reading,
    _both_memories,
    read_sentence,
    word_key,
)
from toolkit.measure import in_words

TEXT = "the cat saw the dog and the dog saw it"
FLOAT32_TOLERANCE = 1e-5


def read(**changes) -> Reading:
    values = {"token": 10, "window": MAX_TOKENS, "write_strength": 1.0, "keep": 1.0}
    return read_sentence(changes.pop("text", TEXT), **(values | changes))


def keys_of(text: str) -> np.ndarray:
    return np.stack([word_key(word) for word in text.split()])[None, :, None]


@pytest.mark.parametrize("window", [3, MAX_TOKENS])
def test_weights_are_those_of_the_library(window: int) -> None:
    keys = keys_of(TEXT)
    count = keys.shape[1]
    one_hot = np.eye(count, dtype=np.float32)[None, :, None]
    out, _ = softmax_attention_reference(
        SHARPNESS * keys, keys, one_hot, scale=1.0, sliding_window=window
    )
    ours = read(window=window).weights[:count, :count]
    np.testing.assert_allclose(ours, out[0, :, 0], atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(("keep", "write_strength"), [(1.0, 1.0), (0.8, 0.4)])
def test_state_is_that_of_the_library(keep: float, write_strength: float) -> None:
    from toolkit.lab.attention.reading import _values

    keys = keys_of(TEXT)
    count = keys.shape[1]
    gates = np.ones((1, count, 1), np.float32)
    values = _values()[None, :count, None, :VALUE_SIZE]
    _, state = gated_delta_net_reference(
        keys, keys, values, np.log(keep) * gates, write_strength * gates
    )
    ours = read(keep=keep, write_strength=write_strength)
    np.testing.assert_allclose(ours.states[count - 1], state[0, 0], atol=FLOAT32_TOLERANCE)
    assert ours.states.shape == (MAX_TOKENS, KEY_SIZE, VALUE_SIZE)


def test_recall_of_the_token_just_written_is_the_write_strength() -> None:
    for write_strength in (1.0, 0.3, 0.0):
        recall = read(text="one two three", write_strength=write_strength).recall
        np.testing.assert_allclose(np.diag(recall)[:3], write_strength, atol=FLOAT32_TOLERANCE)


def test_the_delta_rule_replaces_an_equal_word() -> None:
    view = read(text="the cat the", token=3)
    assert abs(view.recall[2, 0]) < FLOAT32_TOLERANCE
    assert view.recall[1, 0] > 0.5
    assert view.weights[2, 0] == pytest.approx(view.weights[2, 2])


def test_keep_fades_the_state_token_by_token() -> None:
    faded, whole = read(keep=0.5).recall, read(keep=1.0).recall
    assert abs(faded[4, 1]) < abs(whole[4, 1])


def test_future_tokens_have_no_weight_and_windows_cut_the_past() -> None:
    weights = read(window=2).weights[:10, :10]
    assert np.all(np.triu(weights, 1) == 0)
    assert np.all(np.tril(weights, -2) == 0)
    np.testing.assert_allclose(weights.sum(1), 1, atol=FLOAT32_TOLERANCE)


def test_equal_words_have_equal_keys_and_punctuation_does_not_count() -> None:
    np.testing.assert_array_equal(word_key("The"), word_key("the,"))
    assert np.linalg.norm(word_key("cat")) == pytest.approx(1)
    close, far = word_key("cat") @ word_key("cats"), word_key("cat") @ word_key("zebra")
    assert close > far
    assert np.isfinite(word_key("…")).all()


def test_long_sentences_are_cut_and_say_so() -> None:
    view = read(text="word " * 30, token=30)
    assert len(view.words) == MAX_TOKENS
    assert view.token == MAX_TOKENS - 1
    assert "last 6 tokens did not fit" in view.sentence()


def test_no_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="text: got no words"):
        read(text="   ")


def test_sliders_never_recompile() -> None:
    read()
    before = _both_memories._cache_size()
    for change in ({"window": 5}, {"keep": 0.7}, {"write_strength": 0.2}, {"text": "a b"}):
        read(**change)
    assert _both_memories._cache_size() == before


def test_sentence_and_table_agree_with_the_arrays() -> None:
    view = read(token=4)
    assert "token 4 of 10" in view.sentence()
    table = view.table()
    assert len(table.rows) == 4
    assert table.rows[0][2] == in_words(view.weights[3, 0], "share")


@pytest.mark.parametrize(("token", "block"), [(1, 3), (12, 3), (15, 1), (16, 24)])
def test_softmax_in_blocks_ends_where_softmax_does(token: int, block: int) -> None:
    view = online_view(SENTENCE, token=token, block=block, sharpness=5.0)
    weights = np.exp(view.scores - view.scores.max())
    values = np.random.default_rng(3).standard_normal((MAX_TOKENS, VALUE_SIZE))[:token]
    wanted = weights @ values / weights.sum()
    np.testing.assert_allclose(view.outputs[-1] / view.sums[-1], wanted, rtol=1e-12)
    scene = online_scene(view)
    last = scene.grids[0].values[-1].ravel()[:token]
    np.testing.assert_allclose(last, weights, rtol=1e-12)
    # Without rescaling, what was summed first would count too much.
    if token == 12:
        assert (view.factors[1:] < 0.5).sum() == 2
        assert scene.grids[0].values[4, 0, 0] < scene.grids[0].values[1, 0, 0]
