"""Tokens that are no bytes: made from text, trained on, written as text again."""

import json

import numpy as np
import pytest

from toolkit.language import (
    TrainingRun,
    load_language_model,
    load_tokenizer,
    stream_text,
    train_language_model,
    write_tokens,
)
from toolkit.looped import LoopedConfig
from toolkit.training import CorpusError, load_tokens

WORDS = ["a", "rose", "is", "a", "rose", "is", "a", "café", ""]


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
    train_language_model(run, tmp_path / "run", is_progress_shown=False)
    model = load_language_model(tmp_path / "run")
    written = list(stream_text(model, "a rose", 3, temperature=0, tokenizer=tokenizer))
    assert len("".join(written).split()) <= 3
    assert set("".join(written).split()) <= {"[UNK]", *WORDS}
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["configuration"]["corpus"]["size"] == 320
    small = TrainingRun(
        LoopedConfig.tiny("window", width=16, heads=2, vocabulary=4), (str(file),), 1, 2, 8
    )
    with pytest.raises(CorpusError, match="vocabulary"):
        train_language_model(small, tmp_path / "other", is_progress_shown=False)


def test_what_is_no_tokenizer_or_array_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="path"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is no tokenizer"):
        load_tokenizer(folder / "text.txt")
    with pytest.raises(ValueError, match="npy"):
        write_tokens(load_tokenizer(folder), [folder / "text.txt"], tmp_path / "tokens.bin")
    with pytest.raises(CorpusError, match="cannot open"):
        load_tokens(tmp_path / "missing.npy")
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    with pytest.raises(CorpusError, match="whole numbers"):
        load_tokens(tmp_path / "square.npy")
