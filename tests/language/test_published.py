"""Published checkpoints at the command line: their tokenizer, their end of a text, the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.cli import language, train
from toolkit.language import (
    SpecialTokens,
    find_special_tokens,
    load_language_model,
    load_tokenizer,
    next_byte_loss,
    stream_text,
)
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    checkpoint_folder,
    generate,
    load_checkpoint,
    save_checkpoint,
)
from toolkit.training import read_metrics, sample_batch

WORDS = ["[UNK]", "<s>", "</s>", *(f"w{number}" for number in range(37))]
START, STOP = 1, 2
STYLE = {"residual_gate": False, "tied_embedding": False, "rope_theta": 1e4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Llama of words with its tokenizer, as transformers writes it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[1:3])
    folder = tmp_path_factory.mktemp("published")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LoopedConfig.tiny("full full", width=32, heads=2, vocabulary=len(WORDS), **STYLE)
    config = config.with_options(full={"key_value_heads": 1})
    model: Any = LoopedLM(config, rngs=nnx.Rngs(3))
    model.unembedding[...] *= 8  # so that what is likeliest changes from word to word
    settings = {"bos_token_id": START, "eos_token_id": [STOP, 39]}
    save_checkpoint(model, folder / "llama", style="llama", settings=settings, tokenizer=folder)
    return folder / "llama"


def in_words(tokens) -> str:
    """The text of tokens: a space between words, and none for those that start or end a text."""
    return " ".join(WORDS[token] for token in tokens if token not in (START, STOP))


def written(folder: Path, capsys: Any, **how: Any) -> str:
    language.generate(folder, **how)
    return capsys.readouterr().out


def test_a_folder_of_transformers_is_continued(folder, capsys):
    model, prompt = load_checkpoint(folder), "w3 w5 w4"
    how: Any = {"temperature": 0.0, "repetition_penalty": 1.5}
    ids = jnp.asarray([WORDS.index(word) for word in prompt.split()])[None]
    tokens = np.asarray(generate(model, ids, 30, **how, stop_token=[STOP, 39]))[0].tolist()
    text = written(folder, capsys, prompt=prompt, length=30, **how)
    ends = [place for place, token in enumerate(tokens) if token in (STOP, 39)]
    end = ends[0] if ends else 30
    expected = in_words(tokens[:end])
    assert text == f"{prompt}{expected}\n"
    assert load_language_model(folder).config == model.config


def test_a_text_ends_where_the_generation_config_says(folder, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    how = {"prompt": "w3 w5 w4", "length": 30, "temperature": 0.0, "repetition_penalty": 1.5}
    (other / "generation_config.json").write_text('{"eos_token_id": null}')
    whole = written(other, capsys, **how).removeprefix("w3 w5 w4").split()
    assert len(whole) > 20
    last = WORDS.index(whole[7])
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": last}))
    cut = written(other, capsys, **how).removeprefix("w3 w5 w4").split()
    assert cut == whole[: whole.index(whole[7])]
    assert find_special_tokens(other) == SpecialTokens(START, (last,))
    # Without that file, what config.json says counts.
    (other / "generation_config.json").unlink()
    assert find_special_tokens(other) == SpecialTokens(START, (STOP, 39))
    (other / "config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="eos_token_id is '</s>'; it must be a token"):
        find_special_tokens(other)


def test_an_empty_prompt_is_the_token_that_starts_a_text(folder):
    tokenizers = pytest.importorskip("tokenizers")
    model, tokenizer = load_checkpoint(folder), load_tokenizer(folder)
    how: Any = {"temperature": 0.0, "tokenizer": tokenizer}
    wanted = np.asarray(generate(model, jnp.array([[START]]), 5))[0]
    expected = in_words(wanted)
    assert "".join(stream_text(model, "", 5, special=SpecialTokens(START), **how)) == expected
    with pytest.raises(ValueError, match="prompt: got an empty text, and the tokenizer has no"):
        stream_text(model, "", 5, **how)
    # A tokenizer that starts every text by itself needs no setting.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", START)]
    )
    assert "".join(stream_text(model, "", 5, **how)) == expected


def test_what_no_tokenizer_takes_is_refused_in_one_line(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = load_checkpoint(folder)
    without = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))

    def refused(message, prompt="a", **how):
        with pytest.raises(ValueError, match=message) as refusal:
            stream_text(model, prompt, 3, **{"tokenizer": load_tokenizer(folder)} | how)
        assert "\n" not in str(refusal.value)

    refused("the tokenizer cannot encode 'zzz'", "zzz", tokenizer=without)
    refused("holds bytes that are not UTF-8", "caf\udce9")
    refused("seed must be a number of 64 bits", seed=2**70)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": true}')
    with pytest.raises(ValueError, match="eos_token_id is True; it must be a token"):
        find_special_tokens(tmp_path)


@pytest.mark.slow
def test_training_goes_on_from_a_folder(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[3 + number % 5] for number in range(4000)))
    how: Any = {"batch": 2, "sequence_length": 16, "text": (text,), "learning_rate": 1e-2}
    run, file = tmp_path / "run", tmp_path / "small.safetensors"
    train.train(run, init_from=str(folder), steps=30, **how)
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
    # It starts from the published numbers, whose loss is far from that of even chances.
    model, tokens = load_checkpoint(folder), np.load(run / "tokens.npy")
    assert tokens[:6].tolist() == [3, 4, 5, 6, 7, 3]
    batch, targets = sample_batch(jnp.asarray(tokens), 0, seed=0, batch=2, time=16)
    start = next_byte_loss(*nnx.split(model), (batch, targets))
    assert start > 1.5 * np.log(len(WORDS))
    assert losses[0] > 1.2 * losses[-1] > 0
    assert load_language_model(run).config == model.config
    language.export(run, file, dtype="float32")
    theirs = tmp_path / "theirs"
    language.export(run, theirs, dtype="float32", style="llama")
    assert f"{theirs}: " in capsys.readouterr().out
    assert {"config.json", "tokenizer.json", "training.json"} <= {f.name for f in theirs.iterdir()}
    with pytest.raises(ValueError, match="'qwen3' cannot express"):
        language.export(run, tmp_path / "no", style="qwen3")
    with pytest.raises(ValueError, match=r"ends in \.safetensors, or a style"):
        language.export(run, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    greedy: Any = {"prompt": "w0 w1 w2", "length": 4, "temperature": 0.0}
    for place in (run, file, theirs):
        assert written(place, capsys, **greedy) == "w0 w1 w2w3 w4 w0 w1\n"
        assert find_special_tokens(place) == SpecialTokens(START, (STOP, 39))
    # Resumed, nothing is left to do; from another start, it is another run.
    before = (run / "metrics.jsonl").read_bytes()
    train.train(run, init_from=str(folder), steps=30, **how)
    assert (run / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="width: got 64 with init_from, whose model has its own"):
        train.train(run, init_from=str(folder), width=64, **how)
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json"])
    large = LoopedConfig.tiny("full", width=16, heads=2, vocabulary=300, **STYLE)
    save_checkpoint(LoopedLM(large, rngs=nnx.Rngs(0)), tmp_path / "large", style="llama")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json for its 300 tokens"):
        train.train(tmp_path / "other", init_from=str(tmp_path / "large"), **how)
    with pytest.raises(ValueError, match=r"config\.vocabulary must be more than"):
        train.train(tmp_path / "other", init_from=str(bare), **how)


@pytest.mark.slow
@pytest.mark.oracle
def test_the_text_is_that_of_transformers(folder, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for penalty in (1.0, 1.3):
        ids = torch.tensor([[WORDS.index(word) for word in ("w3", "w5", "w4", "w20")]])
        mask = torch.ones_like(ids)
        how = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": penalty}
        with torch.no_grad():
            found = theirs.generate(ids, attention_mask=mask, pad_token_id=0, **how)[0, 4:]
        tokens = [token for token in found.tolist() if token not in (STOP, 39)]
        ours = written(
            folder, capsys, prompt="w3 w5 w4 w20", length=20, temperature=0.0,
            repetition_penalty=penalty,
        )  # fmt: skip
        assert ours == "w3 w5 w4 w20" + in_words(tokens) + "\n"


@pytest.mark.slow
def test_a_name_is_read_from_the_hubs_cache_without_a_network(
    folder, tmp_path, capsys, monkeypatch
):
    """The layout of the cache of `huggingface_hub`: a snapshot per commit, and a name of it."""
    pytest.importorskip("huggingface_hub")
    stored = tmp_path / "hub/models--somebody--small"
    shutil.copytree(folder, stored / "snapshots/0123abc")
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text("0123abc")
    offline = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    how = ["--prompt", "w3 w5", "--length", "5", "--temperature", "0"]

    def run(source: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolkit", "generate", source, *how]
        where: Any = {"env": offline, "cwd": tmp_path}
        return subprocess.run(command, capture_output=True, text=True, **where)

    found = run("somebody/small")
    assert found.returncode == 0, found.stderr
    assert found.stdout == written(folder, capsys, prompt="w3 w5", length=5, temperature=0.0)
    missing = run("somebody/else")
    assert missing.returncode == 2
    assert missing.stderr.startswith("toolkit: source: no folder at 'somebody/else', and the Hug")
    assert missing.stderr.count("\n") == 1
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"is missing: pip install 'mlsys-toolkit\[hub\]'$"):
        checkpoint_folder("somebody/small")
