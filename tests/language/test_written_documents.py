"""Documents become tokens as a stream: each is found again, whatever the size of its file."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from toolkit.language import load_tokenizer, read_documents, write_tokens
from toolkit.language.documents import WINDOW, cut_documents
from toolkit.training import CorpusError, load_tokens, pack_documents

MEGABYTE = 1 << 20
MOST_MORE = 16 * MEGABYTE  # of memory, for six times as much text
WORDS = {word: index for index, word in enumerate(["[UNK]", "a", "café", "is", "rose"])}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(file))
    return load_tokenizer(file)


def documents_of(tokenizer, paths, folder, **how):
    count = write_tokens(tokenizer, paths, folder / "tokens.npy", **how)
    assert count == load_tokens(folder / "tokens.npy").size
    return [part.tolist() for part in read_documents(folder / "tokens.npy")]


def test_documents_are_separated_and_found_again_for_packing(tokenizer, tmp_path):
    for number, text in enumerate(["a rose is", "café", "is a"]):
        (tmp_path / f"{number}.txt").write_text(text)
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    found = documents_of(tokenizer, paths, tmp_path, separator="[UNK]")
    assert found == [[1, 4, 3, 0], [2, 0], [3, 1, 0]]
    ((inputs, _, segments),) = pack_documents(read_documents(tmp_path / "tokens.npy"), 6)
    assert inputs.tolist() == [1, 4, 3, 3, 1, 2]
    assert segments.tolist() == [1, 1, 1, 2, 2, 3]
    # The control: nothing between them.
    assert documents_of(tokenizer, paths, tmp_path) == [[1, 4, 3], [2], [3, 1]]
    with pytest.raises(ValueError, match="separator: got '<end>', wanted a token"):
        write_tokens(tokenizer, paths, tmp_path / "tokens.npy", separator="<end>")


def test_one_file_holds_many_documents(tokenizer, tmp_path):
    """Empty ones are left out, and line ends of any system are kept from being words."""
    plain = tmp_path / "stories.txt"
    plain.write_bytes("|a rose\r\nis|\r\n||café|".encode())
    how = {"separator": "[UNK]", "boundary": "|"}
    assert documents_of(tokenizer, plain, tmp_path, **how) == [[1, 4, 3, 0], [2, 0]]
    # The control: without the boundary, one document with an unknown word wherever it stood.
    assert len(documents_of(tokenizer, plain, tmp_path)) == 1
    lines = tmp_path / "stories.jsonl"
    rows = [{"text": "a rose\nis"}, {"text": ""}, {"text": "café", "source": 1}]
    lines.write_bytes("\r\n\r\n".join(map(json.dumps, rows)).encode())
    assert documents_of(tokenizer, lines, tmp_path) == [[1, 4, 3], [2]]
    with pytest.raises(CorpusError, match=r"key: .*stories.jsonl:1 has no string 'body'"):
        write_tokens(tokenizer, lines, tmp_path / "tokens.npy", key="body")
    lines.write_text('{"text": "a"}\n{"text":\n')
    with pytest.raises(CorpusError, match=r"stories.jsonl:2 is not JSON"):
        write_tokens(tokenizer, lines, tmp_path / "tokens.npy")


def test_pieces_end_anywhere():
    """In a document, a boundary or a line: against `str.split`."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(draw.choice(["ab", " ", "\n", "<>", "<", ">"], 40))
        ends = [0, *sorted(draw.integers(0, len(text), 6).tolist()), len(text)]
        pieces = [text[i:j] for i, j in itertools.pairwise(ends)]
        for boundary in ("<>", None):
            most, whole, parts = int(draw.integers(2, 12)), [""], []
            for part, is_last in cut_documents(pieces, boundary, most):
                parts.append(part)
                whole[-1] += part
                whole += [""] * is_last
            assert whole[:-1] == ([text] if boundary is None else text.split(boundary))
            assert max(map(len, parts)) <= most + 2


def test_a_document_longer_than_the_window_has_the_tokens_of_the_whole(tokenizer, tmp_path):
    text = "a rose is\n" * (WINDOW // 9)
    (tmp_path / "long.txt").write_text(text)
    (found,) = documents_of(tokenizer, tmp_path / "long.txt", tmp_path, separator="[UNK]")
    assert found == [*tokenizer.encode(text).ids, 0]


def test_a_damaged_text_is_named_and_nothing_is_written(tokenizer, tmp_path):
    at = MEGABYTE - 1  # the first of two bytes, at the end of a piece
    for byte, wanted in ((b"\xc3\xa9", None), (b"\xc3(", "0xc3"), (b"\xff", "0xff")):
        (tmp_path / "text.txt").write_bytes(b"a " * (at // 2) + b"a" + byte)
        if wanted is None:
            documents_of(tokenizer, tmp_path / "text.txt", tmp_path)
            (tmp_path / "tokens.npy").unlink()
            continue
        match = rf"text.txt' is not UTF-8: byte {wanted} at offset {at}"
        with pytest.raises(CorpusError, match=match):
            write_tokens(tokenizer, tmp_path / "text.txt", tmp_path / "tokens.npy")
    for missing in ("missing", "missing.jsonl"):
        with pytest.raises(CorpusError, match="no such file"):
            write_tokens(tokenizer, tmp_path / missing, tmp_path / "tokens.npy")
    (tmp_path / "text.txt").write_bytes(b"a\0")
    with pytest.raises(CorpusError, match="binary: a byte of value zero at offset 1"):
        write_tokens(tokenizer, tmp_path / "text.txt", tmp_path / "tokens.npy")
    with pytest.raises(CorpusError, match="paths: got none"):
        write_tokens(tokenizer, [], tmp_path / "tokens.npy")
    with pytest.raises(ValueError, match="boundary: got an empty text"):
        write_tokens(tokenizer, tmp_path, tmp_path / "tokens.npy", boundary="")
    assert not [*tmp_path.glob("*tokens.npy*")]


PROGRAM = """
import resource, sys
from toolkit.language import load_tokenizer, write_tokens
tokenizer = load_tokenizer(sys.argv[1])
if sys.argv[3] == "stream":
    write_tokens(tokenizer, sys.argv[2], sys.argv[2] + ".npy")
else:
    tokenizer.encode_batch_fast([open(sys.argv[2]).read()])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_file(tokenizer, tmp_path):
    """One document, in a file; reading it whole is the control."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def peak(megabytes, how):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text(("rose" * 255 + " is\n") * (megabytes * MEGABYTE // 1024))
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tokenizer.json"), str(file), how]
        return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)

    small, large = peak(4, "stream"), peak(24, "stream")
    assert large - small < MOST_MORE
    assert peak(24, "whole") - small > MOST_MORE
