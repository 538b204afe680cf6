"""Two mixers on one text: the view data against the equations and against the library."""

import dataclasses

import jax
import numpy as np
import pytest

from toolkit.attention import MIXERS, Input, mixer, retention_log_decay
from toolkit.attention.inputs import FRACTION
from toolkit.lab.mixers.inputs import (
    HEADS,
    MAX_TOKENS,
    VALUE_SIZE,
    Settings,
    features_of,
    inputs_of,
    recurrent_mixers,
)
from toolkit.lab.mixers.view import Comparison, compare, program, read
from toolkit.measure import in_words

TEXT = "the cat saw the dog and the dog saw it"
WORDS = tuple(TEXT.split())
FLOAT32_TOLERANCE = 1e-5
EVERY = list(recurrent_mixers())


def view_of(left: str, right: str = "linear", **changes) -> Comparison:
    settings = Settings(**{name: changes.pop(name) for name in vars(Settings()) if name in changes})
    values = {"text": TEXT, "token": 10, "head": 1} | changes
    return compare(left=left, right=right, settings=settings, **values)


def inputs(name: str, **settings: float):
    row = mixer(name)
    given = inputs_of(row, features_of(WORDS), Settings(**settings))
    return row, given, dict(zip(row.names, given.arrays, strict=True))


def test_every_mixer_with_a_state_is_offered_and_no_cache() -> None:
    assert set(MIXERS) - set(recurrent_mixers()) == {
        "full",
        "window",
        "fox",
        "path",
        "nsa",
        "moba",
        "dsa",
        "hca",
        "csa",
        "qsa",
    }


@pytest.mark.by_family
@pytest.mark.parametrize("name", EVERY)
def test_reach_and_state_are_those_of_the_library(name: str) -> None:
    row, given, _ = inputs(name, write_strength=0.7)
    memory, count = read(name, WORDS, Settings(write_strength=0.7)), len(WORDS)
    cut = [x[:, :count] for x in given.arrays]
    # The output is linear in the values: a batch of basis vectors gives the whole Jacobian. The
    # values themselves come last in the batch and give the state.
    place, token = row.names.index("v"), count - 1
    per_token = cut[place].shape[3:]
    size = int(np.prod(per_token))
    basis = np.eye(count * size, dtype=np.float32).reshape(count * size, count, 1, *per_token)
    batch = [np.broadcast_to(x, (len(basis) + 1, *x.shape[1:])) for x in cut]
    one_hot = np.broadcast_to(basis, (len(basis), *cut[place].shape[1:]))
    batch[place] = np.concatenate([one_hot, cut[place]])
    run = jax.jit(lambda arrays: row.function(*arrays, **row.options, **given.constants))
    out, state = (np.asarray(x) for x in run(batch))
    last_norm = np.linalg.norm(state[-1], axis=(-2, -1))
    np.testing.assert_allclose(memory.state_norm[-1], last_norm, rtol=FLOAT32_TOLERANCE)
    columns = out[:-1, token].reshape(count, size, HEADS, -1)
    # Largest singular value: what the strongest change of a value does to the output.
    wanted = np.linalg.norm(np.moveaxis(columns, 2, 1), ord=2, axis=(2, 3))
    np.testing.assert_allclose(memory.reach[token], wanted, atol=FLOAT32_TOLERANCE)


def test_linear_attention_reaches_back_by_its_scores() -> None:
    _, _, arrays = inputs("linear")
    q, k = (arrays[name][0, : len(WORDS)] for name in "qk")
    scores = np.abs(np.einsum("thk,shk->tsh", q, k)) * q.shape[-1] ** -0.5
    wanted = scores * np.tri(len(WORDS))[:, :, None]
    np.testing.assert_allclose(view_of("linear").left.reach, wanted, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("strength", [1.0, 3.0])
def test_retention_fades_by_its_rate_at_every_token(strength: float) -> None:
    view = view_of("retention", decay_strength=strength)
    age = np.arange(len(WORDS))[:, None] - np.arange(len(WORDS))
    faded = np.exp(strength * np.asarray(retention_log_decay(HEADS)) * age[..., None])
    wanted = view.right.reach * faded  # that of linear attention
    np.testing.assert_allclose(view.left.reach, wanted, atol=FLOAT32_TOLERANCE)
    half = view.left.half_life()
    np.testing.assert_allclose(half[0], half[-1])
    np.testing.assert_allclose(half[0, 0], np.log(0.5) / np.log(1 - 2**-5) / strength, rtol=1e-5)


@pytest.mark.parametrize("name", ["retention", "gla"])
def test_without_decay_they_are_linear_attention(name: str) -> None:
    view = view_of(name, decay_strength=0.0)
    np.testing.assert_allclose(view.left.reach, view.right.reach, atol=FLOAT32_TOLERANCE)
    assert np.all(np.isinf(view.left.half_life()))


def test_the_write_slider_shuts_and_opens_the_gate() -> None:
    np.testing.assert_allclose(inputs("gdn", write_strength=2.0)[2]["beta"], 2.0)
    np.testing.assert_allclose(inputs("gdn", write_strength=0.0)[2]["beta"], 0.0)
    view = view_of("gdn", write_strength=0.0)
    assert view.left.distance(5, 0) is None
    assert np.all(view.left.share(5, 0) == 0)
    assert "nothing reaches the output" in view.sentence()


def test_a_delta_rule_erases_what_its_key_returned_and_returns_what_it_wrote() -> None:
    _, _, arrays = inputs("delta", write_strength=2.0)
    k, v = (arrays[name][0, : len(WORDS)] for name in "kv")
    memory = view_of("delta", write_strength=2.0).left
    strength = arrays["beta"][0, : len(WORDS), :, None, None]
    before = np.concatenate([0 * memory.states[:1], memory.states[1:-1:2]])
    returned = np.einsum("thk,thkv->thv", k, before)
    erased = before - strength * k[..., None] * returned[:, :, None]
    np.testing.assert_allclose(memory.states[::2], erased, atol=FLOAT32_TOLERANCE)
    written = erased + strength * k[..., None] * v[:, :, None]
    np.testing.assert_allclose(memory.states[1::2], written, atol=FLOAT32_TOLERANCE)
    exact = view_of("delta", write_strength=1.0, decay_strength=0.0).left
    for token in range(len(WORDS)):
        assert exact.returned[token, token, 0] > 0.5
    assert not view_of("retention").left.returned[3, 4:].any()


def test_share_and_distance_agree_with_the_reach() -> None:
    memory = view_of("gdn").left
    for token in range(len(WORDS)):
        share = memory.share(token, 2)
        assert share.sum() == pytest.approx(1)
        assert np.all(share[token + 1 :] == 0)
        distance = memory.distance(token, 2)
        assert distance is not None
        assert share[token - distance : token + 1].sum() >= 0.9
        assert share[token - distance + 1 : token + 1].sum() < 0.9


def test_both_mixers_get_the_same_queries_keys_and_rates() -> None:
    one, other = inputs("gdn"), inputs("mamba2")
    for name in ("q", "k", "v", "g"):
        np.testing.assert_array_equal(one[2][name], other[2][name])
    np.testing.assert_allclose(np.linalg.norm(one[2]["k"][0, :10], axis=-1), 1, rtol=1e-5)
    another_seed = inputs("gdn", seed=1)[2]
    assert not np.allclose(one[2]["k"], another_seed["k"])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("strengths", [(0.0, 0.0), (4.0, 2.0)])
def test_the_ends_of_the_sliders_give_finite_numbers(name: str, strengths) -> None:
    view = view_of(name, decay_strength=strengths[0], write_strength=strengths[1])
    assert np.all(np.isfinite(view.left.state_norm))
    assert np.all(np.isfinite(view.left.reach))
    assert np.all(view.left.log_decay <= 0)
    assert view.sentence()
    assert view.table().rows


@pytest.mark.parametrize("name", EVERY)
def test_sliders_never_recompile(name: str) -> None:
    read(name, WORDS, Settings())
    before = program(name)._cache_size()
    read(name, WORDS, Settings(0.3, 1.2, 5))
    read(name, ("a", "b"), Settings())
    assert program(name)._cache_size() == before == 1


def test_a_gate_of_a_new_name_is_made_by_its_range() -> None:
    surprise = Input("surprise", ("batch", "time", "heads", "value"), FRACTION)
    row = dataclasses.replace(mixer("gdn"), inputs=(*mixer("gdn").inputs, surprise))
    made = inputs_of(row, features_of(WORDS), Settings()).arrays[-1]
    assert made.shape == (1, MAX_TOKENS, HEADS, VALUE_SIZE)
    assert 0 <= made.min() < made.max() <= 1


def test_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 'full', wanted one with a recurrent state: .*'gdn'"):
        read("full", WORDS, Settings())


def test_long_texts_are_cut_and_say_so() -> None:
    view = view_of("gdn", text="word " * 40, token=40)
    assert len(view.words) == MAX_TOKENS
    assert view.token == MAX_TOKENS - 1
    assert "last 8 tokens did not fit" in view.sentence()
    with pytest.raises(ValueError, match="text: got no words"):
        view_of("gdn", text="  ")


def test_words_table_and_data_tell_the_same_numbers() -> None:
    view = view_of("gdn", token=4)
    data, table = view.data(), view.table()
    assert f"“{WORDS[3]}” (token 4 of 10), head 1" in view.sentence()
    assert "Measured here" in view.sentence()
    assert len(table.rows) == len(data["word"]) == 10
    column = table.columns.index("left: share")
    shares = data["left: share"]
    np.testing.assert_array_equal(shares, view.left.share(3, 1))
    assert [row[column] for row in table.rows] == [in_words(share) for share in shares]
    assert f"the {view.left.distance(3, 1)} token" in view.sentence()
