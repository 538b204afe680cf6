"""Text on disk: files of folders, and the prose and source of Python's library."""

import codecs
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from toolkit.measure import available_memory, in_words

_PIECE = 1 << 20  # bytes read together
_NOT_LIBRARY_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class CorpusError(ValueError):
    """The text cannot be used: missing, unreadable, empty, not UTF-8 or too short."""


def manual_prose() -> bytes:
    """The text of Python's own manual."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def library_source() -> list[tuple[str, bytes]]:
    """The library's modules, without its tests, installed packages and build-machine constants."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in _files_below(root):
        name = path.relative_to(root)
        is_generated = name.parts[0] == "pydoc_data" or name.name.startswith("_sysconfig")
        if name.suffix != ".py" or is_generated or _NOT_LIBRARY_SOURCE & set(name.parts):
            continue
        if text := read_bytes(path):
            sources.append((name.as_posix(), checked_text(path, text)))
    return sources


def read_folder(root: Path) -> tuple[list[tuple[str, bytes]], list[str]]:
    """The texts below a folder, each with its name, and the files passed over, each with why."""
    files, skipped = folder_files(root)
    sources, size = [], 0
    for path in files:
        text = checked_text(path, read_bytes(path))
        sources.append((path.relative_to(root).as_posix(), text))
        size += len(text)
        if size > available_memory():
            raise CorpusError(f"folder {str(root)!r} holds more text than fits into memory")
    return sources, skipped


def folder_files(root: Path) -> tuple[list[Path], list[str]]:
    """The files of text below a folder, and the files passed over, each with why."""
    if not os.access(root, os.R_OK | os.X_OK):  # os.walk would ignore it silently
        raise CorpusError(f"cannot read folder {str(root)!r}: Permission denied")
    files, skipped = [], []

    def skip(path: str | os.PathLike, reason: str) -> None:
        skipped.append(f"{Path(path).relative_to(root).as_posix()} ({reason})")

    def skip_folder(error: OSError) -> None:
        skip(error.filename, "unreadable folder")

    for path in _files_below(root, skip_folder):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if not path.resolve().is_relative_to(root.resolve()):
            skip(path, "leads out of the folder")
        elif path.is_dir():
            skip(path, "link to a folder")
        elif not path.is_file():
            skip(path, "no file")
        elif not (begin := next(_pieces(path), b"")):
            skip(path, "empty")
        elif b"\0" in begin:
            skip(path, "binary")
        else:
            files.append(path)
    if not files:
        raise CorpusError(f"folder {str(root)!r} holds no text ({len(skipped)} files skipped)")
    return files, sorted(skipped)


def _files_below(root: Path, onerror: Callable[[OSError], None] | None = None) -> list[Path]:
    """The contents of a folder, recursively; links to folders are listed but not followed."""
    found = []
    for folder, folders, files in os.walk(root, onerror=onerror):
        here = Path(folder)
        found += [here / name for name in files]
        found += [here / name for name in folders if (here / name).is_symlink()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file that fits into memory."""
    size = path.stat().st_size if path.is_file() else 0
    if size > available_memory():
        raise CorpusError(
            f"file {str(path)!r} has {in_words(size, 'bytes')}, more than fits into memory"
        )
    return b"".join(_pieces(path))


def text_pieces(path: Path, pieces: Iterable[bytes] | None = None) -> Iterator[str]:
    """The text of a regular file of any size; an error where it is empty, binary or not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    for piece in _pieces(path) if pieces is None else pieces:
        if (offset := piece.find(b"\0")) >= 0:
            raise CorpusError(
                f"file {str(path)!r} is binary: a byte of value zero at offset {at + offset}"
            )
        yield _decoded(path, decoder, piece, at)
        at += len(piece)
    if not at:
        raise CorpusError(f"file {str(path)!r} is empty")
    _decoded(path, decoder, b"", at)


def checked_text(path: Path, text: bytes) -> bytes:
    """The same text; an error where it is empty, binary or not UTF-8."""
    for _ in text_pieces(path, [text]):
        pass
    return text


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a regular file."""
    try:
        # Checked first, because reading a pipe or a device might never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CorpusError(f"{str(path)!r} is neither a file nor a folder")
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError:
        raise CorpusError(f"no such file or folder: {str(path)!r}") from None
    except OSError as error:
        raise CorpusError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, piece: bytes, at: int) -> str:
    begun = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
    try:
        return decoder.decode(piece, final=not piece)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"file {str(path)!r} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{at - begun + error.start} ({error.reason})"
        ) from None
