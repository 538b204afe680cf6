"""Tokens that are no bytes: made from text, trained on, written as text again."""

import dataclasses
import json
import math

import numpy as np
import pytest
from flax import nnx

from toolkit.language import (
    TrainingRun,
    export_language_model,
    find_tokenizer,
    load_language_model,
    load_tokenizer,
    stream_text,
    train_language_model,
    write_tokens,
)
from toolkit.language.tokens import bytes_per_token, tokenizer_beside
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import CorpusError, load_tokens

WORDS = ["a", "rose", "is", "a", "rose", "is", "a", "café", ""]
BYTES_PER_WORD = (sum(len(word.encode()) for word in WORDS) + 7) / 8  # a space between them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of words, and a text of them."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokens")
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "a", "café", "is", "rose"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(" ".join(WORDS * 40))
    return folder


@pytest.mark.slow
def test_a_model_of_tokens_is_trained_and_writes_text(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    file = tmp_path / "tokens.npy"
    assert write_tokens(tokenizer, [folder / "text.txt"], file) == 8 * 40
    assert np.load(file)[:4].tolist() == [1, 4, 3, 1]
    config = LoopedConfig.tiny("window", loops=1, width=16, heads=2, vocabulary=5)
    run = TrainingRun(config, text=(str(file),), steps=2, batch=2, sequence_length=8)
    trained = train_language_model(run, tmp_path / "run", is_progress_shown=False)
    # Eight windows of eight words: the unit is the token's, and bits per byte follow from the text.
    assert "nats per token" in trained.loss_in_words
    assert trained.bytes_per_token == pytest.approx(BYTES_PER_WORD, rel=0.2)
    in_bits = trained.evaluation_loss / math.log(2) / trained.bytes_per_token
    assert trained.history[-1]["evaluation_bits_per_byte"] == pytest.approx(in_bits)
    assert f"{in_bits:.4f} bits per byte" in trained.loss_in_words
    model = load_language_model(tmp_path / "run")
    tokenizer = find_tokenizer(tmp_path / "run")  # stored with the run
    written = list(stream_text(model, "a rose", 3, temperature=0, tokenizer=tokenizer))
    assert len("".join(written).split()) <= 3
    assert set("".join(written).split()) <= {"[UNK]", *WORDS}
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["configuration"]["corpus"]["size"] == 320
    _, described = export_language_model(tmp_path / "run", tmp_path / "small.safetensors")
    assert json.loads(described.read_text())["result"]["held_out_loss_unit"] == "nats per token"
    assert find_tokenizer(tmp_path / "small.safetensors").get_vocab_size() == 5
    small = TrainingRun(
        LoopedConfig.tiny("window", width=16, heads=2, vocabulary=4),
        (str(file),),
        steps=1,
        batch=2,
        sequence_length=8,
    )
    with pytest.raises(ValueError, match="5 tokens for a model of 4"):
        train_language_model(small, tmp_path / "other", is_progress_shown=False)
    tokenizer_beside(file).unlink()
    with pytest.raises(CorpusError, match="vocabulary"):
        train_language_model(small, tmp_path / "other", is_progress_shown=False)
    unknown = train_language_model(run, tmp_path / "unknown", is_progress_shown=False)
    assert unknown.bytes_per_token is None
    assert unknown.loss_in_words.endswith("nats per token")


def test_a_model_of_tokens_writes_nothing_without_its_tokenizer(folder):
    """Tokens beyond 255 would otherwise be cut to some byte, and show as garbage."""
    config = LoopedConfig.tiny("window", loops=1, width=16, heads=2, vocabulary=4096)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"tokenizer: got None, wanted .* 4,096 tokens"):
        stream_text(model, "a rose", 3)
    few = LoopedLM(dataclasses.replace(config, vocabulary=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"got one of 5 tokens for a model of 4"):
        stream_text(few, "a rose", 3, tokenizer=load_tokenizer(folder))


def test_bytes_per_token_count_what_the_tokens_stand_for(folder):
    # "a rose is" and "café a a" have 9 bytes each: an accent takes two.
    found = bytes_per_token(load_tokenizer(folder), np.array([[[1, 4, 3], [2, 1, 1]]]))
    assert found == pytest.approx(18 / 6)


def test_what_is_no_tokenizer_or_array_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="path"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(folder / "text.txt")
    with pytest.raises(ValueError, match="npy"):
        write_tokens(load_tokenizer(folder), [folder / "text.txt"], tmp_path / "tokens.bin")
    with pytest.raises(CorpusError, match="cannot open"):
        load_tokens(tmp_path / "missing.npy")
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    with pytest.raises(CorpusError, match="whole numbers"):
        load_tokens(tmp_path / "square.npy")
