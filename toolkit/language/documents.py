"""Documents as tokens on disk, written and read as a stream, whatever their size."""

import os
from array import array
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from toolkit._checks import checked
from toolkit._files import json_object, unfinished_beside
from toolkit.language.tokens import beside, check_tokenizer, tokenizer_beside
from toolkit.training import CorpusError, load_corpus
from toolkit.training.data.sources import folder_files, text_pieces

DOCUMENTS = "documents.npy"
WINDOW = 1 << 20  # characters that are tokenised together
_BUILT_IN = ("prose", "code")


@checked
def write_tokens(
    tokenizer: Any, paths: str | os.PathLike | Iterable[str | os.PathLike],
    file: str | os.PathLike, *,
    separator: str | None = None, boundary: str | None = None, key: str = "text",
    is_progress_shown: bool = False,
) -> int:  # fmt: skip
    """Tokenise text files of any size into one array on disk, for `toolkit train --text FILE.npy`.

    The tokenizer is written beside the array, as FILE.tokenizer.json, where training finds it, and
    where each document begins as FILE.documents.npy, for `read_documents`. A document is a file, a
    part of a file between two boundaries, or a line of a .jsonl file; empty ones are left out. Text
    is taken as it is, with its line ends.

    A document of more than 2^20 characters is tokenised in parts, cut after a line, or before a
    space where a line is longer: the tokens are those of the whole if words end there, as they do
    for the byte-level tokenizers of Llama 3 and Qwen.

    Args:
        tokenizer: made by `load_tokenizer`.
        paths: files and folders of text, or "prose" or "code", as `load_corpus` takes them; in a
            folder, a file with a zero byte in its first MiB counts as binary.
        file: ends in .npy; uint16 if the vocabulary allows it, else uint32.
        separator: the token that ends every document, such as "<|endoftext|>"; None for none.
        boundary: the text between the documents of a file, such as "<|endoftext|>", which is no
            part of them; None: a document is a file.
        key: where an object on a line of a .jsonl file has its text.
        is_progress_shown: whether to draw a progress bar.

    Returns:
        The number of tokens, separators included.

    Raises:
        CorpusError: when a text cannot be used; nothing is written then.

    Cost: About 200 MB of memory beside the tokenizer, a line of a .jsonl file, and 8 bytes per
        document.

    Example:
        >>> write_tokens(None, ["book.txt"], "book.npy")
        Traceback (most recent call last):
        ValueError: tokenizer: got NoneType, wanted one made by load_tokenizer
    """
    file = Path(file)
    if file.suffix != ".npy":
        raise ValueError(f"file: got {str(file)!r}, wanted a name that ends in .npy")
    check_tokenizer(tokenizer)
    end = [] if separator is None else [tokenizer.token_to_id(separator)]
    if end == [None]:
        raise ValueError(f"separator: got {separator!r}, wanted a token of the tokenizer")
    if boundary == "":
        raise ValueError("boundary: got an empty text, wanted one between documents, or None")
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    starts, size, begun = array("q"), 0, 0
    unfinished = unfinished_beside(file)
    try:
        with unfinished.open("wb") as out:
            _write_header(out, dtype, 0)
            parts = _with_bar(_parts(paths, boundary, key), is_progress_shown)
            for text, is_last in _encoded(tokenizer, parts):
                ids = text + end if is_last and begun + len(text) else text
                if ids and not begun:
                    starts.append(size)
                out.write(np.asarray(ids, dtype).tobytes())
                size, begun = size + len(ids), 0 if is_last else begun + len(ids)
            out.seek(0)
            _write_header(out, dtype, size)
        if not size:
            raise CorpusError("paths: the tokenizer makes no token of this text")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    np.save(beside(file, DOCUMENTS), np.frombuffer(starts, np.int64))
    tokenizer.save(str(tokenizer_beside(file)))
    return size


@checked
def read_documents(file: str | os.PathLike) -> list[np.ndarray]:
    """The documents of a token array, on disk until they are read, for `pack_documents`.

    Args:
        file: written by `write_tokens`.

    Returns:
        One array of tokens [length] per document, in order.

    Raises:
        FileNotFoundError: the file, or FILE.documents.npy beside it, is missing.

    Example:
        >>> read_documents("no/such/tokens.npy")
        Traceback (most recent call last):
        FileNotFoundError: file: 'no/such/tokens.npy' has no tokens.documents.npy beside it
    """
    starts = beside(file, DOCUMENTS)
    if not starts.is_file():
        raise FileNotFoundError(f"file: {str(file)!r} has no {starts.name} beside it")
    return np.split(np.load(file, mmap_mode="r"), np.load(starts)[1:])


def _write_header(out: BinaryIO, dtype: np.dtype, size: int) -> None:
    """The header of a row of tokens, which numpy makes as long for every size."""
    descr = np.lib.format.dtype_to_descr(dtype)
    facts = {"descr": descr, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(out, facts)


def _with_bar(parts: Iterator[tuple[str, bool]], is_shown: bool) -> Iterator[tuple[str, bool]]:
    from tqdm import tqdm

    with tqdm(unit="char", unit_scale=True, disable=not is_shown) as bar:
        for text, is_last in parts:
            bar.update(len(text))
            yield text, is_last


def _encoded(tokenizer: Any, parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[int], bool]]:
    """The tokens of each part, several of which are encoded together."""
    waiting: list[tuple[str, bool]] = []

    def flushed() -> Iterator[tuple[list[int], bool]]:
        texts, ends = zip(*waiting, strict=True)
        found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        yield from zip((encoded.ids for encoded in found), ends, strict=True)

    characters = 0
    for part in parts:
        if waiting and characters + len(part[0]) > WINDOW:
            yield from flushed()
            waiting, characters = [], 0
        waiting.append(part)
        characters += len(part[0])
    if waiting:
        yield from flushed()


def _parts(
    paths: str | os.PathLike | Iterable[str | os.PathLike], boundary: str | None, key: str
) -> Iterator[tuple[str, bool]]:
    """The documents in parts of at most `WINDOW` characters, and whether each ends its document."""
    if isinstance(paths, str) and paths in _BUILT_IN:
        corpus = load_corpus(paths)
        ends = np.cumsum([source.size for source in corpus.files])[:-1]
        for part in np.split(corpus.tokens, ends):
            yield from cut_documents([part.tobytes().decode()], boundary)
        return
    roots = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not roots:
        raise CorpusError("paths: got none, wanted at least one file or folder")
    for root in map(Path, roots):
        for path in folder_files(root)[0] if root.is_dir() else [root]:
            if path.suffix == ".jsonl":
                for document in _json_documents(path, key):
                    yield from cut_documents([document], None)
            else:
                yield from cut_documents(text_pieces(path), boundary)


def _json_documents(path: Path, key: str) -> Iterator[str]:
    if not path.is_file():
        raise CorpusError(f"no such file: {str(path)!r}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json_object(line, f"{path}:{number}")
            except ValueError as error:
                raise CorpusError(str(error)) from None
            if not isinstance(found.get(key), str):
                raise CorpusError(f"key: {path}:{number} has no string {key!r}")
            yield found[key]


def cut_documents(
    pieces: Iterable[str], boundary: str | None, most: int = WINDOW
) -> Iterator[tuple[str, bool]]:
    """The documents of a text that comes in pieces, in parts of at most `most` characters, and
    whether each part is the last of its document."""
    rest = ""
    for piece in pieces:
        rest += piece
        *whole, rest = [rest] if boundary is None else rest.split(boundary)
        for document in whole:
            yield (yield from _cut(document, most, most)), True
        # So much is kept back that a boundary which has only begun is found when it is whole.
        rest = yield from _cut(rest, most, most + len(boundary or ""))
    yield (yield from _cut(rest, most, most)), True


def _cut(text: str, most: int, longest: int) -> Generator[tuple[str, bool], None, str]:
    """Parts of at most `most` characters, until no more than `longest` are left: these."""
    while len(text) > longest:
        at = text.rfind("\n", 0, most) + 1 or max(text.rfind(" ", 0, most), 0) or most
        yield text[:at], False
        text = text[at:]
    return text
