"""Corpora: what is read, what is refused and why, and how batches are drawn."""

import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.training import CorpusError, evaluation_batches, load_corpus, sample_batch


def test_prose_is_the_language_manual():
    corpus = load_corpus()
    assert corpus.tokens.dtype == np.uint8
    assert corpus.size == corpus.tokens.shape[0] > 400_000
    assert b'The "if" statement' in corpus.tokens.tobytes()
    assert corpus.sha256 == hashlib.sha256(corpus.tokens.tobytes()).hexdigest()
    assert load_corpus("prose").sha256 == corpus.sha256


def test_code_is_the_standard_library_in_a_fixed_order_without_tests():
    corpus = load_corpus("code")
    names = [file.name for file in corpus.files]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not [name for name in names if "/tests/" in name or "site-packages" in name]
    assert corpus.size == sum(file.size for file in corpus.files) > 5_000_000


def test_folder_is_read_recursively_in_order_and_recorded(tmp_path):
    for name, text in {"b.txt": b"second", "a/z.md": b"first ", ".hidden": b"no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "nothing.txt").write_bytes(b"")
    corpus = load_corpus(tmp_path)
    assert corpus.tokens.tobytes() == b"first second"
    assert corpus.skipped == ("nothing.txt (empty)", "picture.png (binary)")
    record = json.loads(json.dumps(corpus.record()))
    assert [file["name"] for file in record["files"]] == ["a/z.md", "b.txt"]
    assert record["files"][1]["sha256"] == hashlib.sha256(b"second").hexdigest()


def test_several_paths_keep_their_order(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("one")
    two.write_text("two")
    assert load_corpus([two, one]).tokens.tobytes() == b"twoone"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"fine until \xff here", "not UTF-8: byte 0xff at offset 11"),
        (b"cut short \xc3", "offset 10"),
        (b"text" * 4096 + b"\0", "is binary: a byte of value zero at offset 16384"),
    ],
)
def test_unusable_file_is_named(tmp_path, text, message):
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    with pytest.raises(CorpusError, match=message) as error:
        load_corpus(path)
    assert str(path) in str(error.value)


def test_missing_empty_and_absent_paths_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"no such file or folder: .*nowhere"):
        load_corpus([tmp_path / "nowhere"])
    with pytest.raises(CorpusError, match="holds no text"):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="no paths given"):
        load_corpus([])


def test_unreadable_file_is_refused():
    path = Path("/proc/self/mem")  # which nobody may read at its beginning
    if not path.is_file():
        pytest.skip("needs /proc")
    with pytest.raises(CorpusError, match=r"cannot read '/proc/self/mem': Input/output error"):
        load_corpus(path)


def test_what_cannot_be_read_to_its_end_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(CorpusError, match="is neither a file nor a folder"):
            load_corpus(path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**43)  # takes no room on the disk
    with pytest.raises(CorpusError, match=r"huge' has 8.*more than fits into memory"):
        load_corpus(tmp_path / "huge")


def test_a_folder_lists_what_it_does_not_read(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "deeper").mkdir(parents=True)
    root.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / "text.txt").write_text("text")
    (root / "late.bin").write_bytes(b"x" * 10_000 + b"\0")
    (root / "file").symlink_to(outside / "secret.txt")
    (root / "folder").symlink_to(outside)
    (root / "circle").symlink_to(root)
    (root / "gone").symlink_to(root / "absent")
    os.mkfifo(root / "pipe")
    corpus = load_corpus(root)
    assert corpus.tokens.tobytes() == b"text"
    assert corpus.skipped == (
        "circle (link to a folder)",
        "file (leads out of the folder)",
        "folder (leads out of the folder)",
        "gone (no file)",
        "late.bin (binary)",
        "pipe (no file)",
    )


def test_a_subfolder_that_cannot_be_read_is_listed(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "locked").mkdir()
    walk, locked = os.scandir, str(tmp_path / "locked")

    def scandir(path):
        if str(path) == locked:
            raise PermissionError(13, "Permission denied", locked)
        return walk(path)

    monkeypatch.setattr("os.scandir", scandir)
    assert load_corpus(tmp_path).skipped == ("locked (unreadable folder)",)


def test_unreadable_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(CorpusError, match=r"cannot read folder '.*': Permission denied"):
        load_corpus(tmp_path)


def test_split_is_a_contiguous_tail_without_overlap(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(path)
    train, evaluation = corpus.split(0.2)
    assert np.concatenate([train, evaluation]).tobytes() == corpus.tokens.tobytes()
    inputs, targets = evaluation_batches(evaluation, batch=2, time=4, count=2)
    seen_in_evaluation = set(np.asarray(inputs).ravel()) | set(np.asarray(targets).ravel())
    seen_in_training = set()
    for step in range(50):
        batch = sample_batch(jnp.asarray(train), step, seed=0, batch=8, time=4)
        seen_in_training |= set(np.asarray(batch).ravel())
    assert seen_in_training == set(range(1, 81)), "every training byte can be drawn, and no other"
    assert seen_in_evaluation <= set(range(81, 101))
    with pytest.raises(ValueError, match="evaluation_fraction"):
        corpus.split(1.0)
    with pytest.raises(CorpusError, match="too few"):
        corpus.split(0.001)


def test_batch_is_a_function_of_seed_and_step_with_next_byte_targets():
    tokens = jnp.arange(200, dtype=jnp.uint8)
    inputs, targets = sample_batch(tokens, 7, seed=1, batch=5, time=9)
    assert inputs.shape == targets.shape == (5, 9)
    assert inputs.dtype == targets.dtype == jnp.int32
    np.testing.assert_array_equal(targets, inputs + 1)
    traced = jax.jit(lambda step: sample_batch(tokens, step, seed=1, batch=5, time=9))
    np.testing.assert_array_equal(traced(7)[0], inputs)
    assert not np.array_equal(traced(8)[0], inputs)
    assert not np.array_equal(sample_batch(tokens, 7, seed=2, batch=5, time=9)[0], inputs)


def test_evaluation_batches_are_fixed_and_cover_the_split_evenly():
    tokens = np.arange(101, dtype=np.uint8)
    inputs, targets = evaluation_batches(tokens, batch=2, time=10, count=5)
    assert inputs.shape == (5, 2, 10)
    np.testing.assert_array_equal(np.asarray(inputs).ravel(), np.arange(100))
    np.testing.assert_array_equal(targets, inputs + 1)


@pytest.mark.parametrize("draw", [sample_batch, evaluation_batches])
def test_corpus_shorter_than_a_window_is_refused(draw):
    tokens = jnp.zeros(16, jnp.uint8)
    sizes = {"step": 0, "seed": 0} if draw is sample_batch else {"count": 1}
    draw(tokens, batch=1, time=15, **sizes)
    with pytest.raises(CorpusError, match="time=16 needs 17 bytes"):
        draw(tokens, batch=1, time=16, **sizes)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        draw(tokens, batch=0, time=4, **sizes)
