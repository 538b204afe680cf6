"""Text as bytes: corpora that come with Python, or your own files; and their batches.

A token is a byte, so no tokeniser is needed. A batch is a pure function of (seed, step), so that
resuming needs no state of the data.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from toolkit._checks import checked
from toolkit.training.data.sources import (
    CorpusError,
    checked_text,
    library_source,
    manual_prose,
    read_bytes,
    read_folder,
)

BYTE_VOCABULARY = 256
_DIGESTED = 1 << 20  # tokens of one part


@dataclass(frozen=True)
class CorpusFile:
    """One source of a corpus.

    Attributes:
        name: its path relative to the folder or library.
        size: bytes.
        sha256: digest of its bytes.

    Example:
        >>> load_corpus("prose").files[0].name
        'pydoc_data/topics.py'
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Text as one array of bytes, with a record of its sources.

    Attributes:
        name: "prose", "code" or its paths.
        tokens: uint8 [size], the files' bytes one after the other; or an array on disk.
        files: the sources in the order of `tokens`.
        size: number of tokens.
        sha256: digest of `tokens`; two corpora with the same digest are the same data.
        skipped: skipped files of a folder with reasons: empty and binary files, links out of it,
            unreadable folders.

    Example:
        >>> corpus = load_corpus("prose")
        >>> training, held_out = corpus.split(0.1)
        >>> len(training) + len(held_out) == corpus.size
        True
    """

    name: str
    tokens: np.ndarray = field(repr=False)
    files: tuple[CorpusFile, ...] = field(repr=False)
    size: int
    sha256: str
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def split(self, evaluation_fraction: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """Split the corpus into two views: a training part, and a contiguous tail for evaluation.

        ValueError if the fraction is not between 0 and 1, CorpusError if a part would be empty.
        """
        if not 0.0 < evaluation_fraction < 1.0:
            raise ValueError(
                f"evaluation_fraction must lie strictly between 0 and 1, got {evaluation_fraction}"
            )
        cut = self.size - round(self.size * evaluation_fraction)
        if not 0 < cut < self.size:
            raise CorpusError(
                f"corpus {self.name!r} has {self.size} tokens: too few to hold out "
                f"{evaluation_fraction:.0%} of them"
            )
        return self.tokens[:cut], self.tokens[cut:]

    def record(self) -> dict[str, Any]:
        """The record for results: names, sizes and digests, without the text."""
        files = [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in self.files]
        return {
            "name": self.name,
            "size": self.size,
            "sha256": self.sha256,
            "files": files,
            "skipped": list(self.skipped),
        }


@checked
def load_corpus(paths: str | os.PathLike | Iterable[str | os.PathLike] | None = None) -> Corpus:
    """Read text into one array of bytes.

    "prose" (the default) is the language manual that ships with Python as `pydoc_data.topics`;
    "code" is the source of the standard library. Both depend on the Python version. Anything else
    is a file or a folder; a folder is read recursively in the order of its paths, without hidden,
    empty and binary files, unreadable folders and links out of it.

    Args:
        paths: None, "prose", "code", a path, or several paths. Write "./prose" for a file of that
            name.

    Raises:
        CorpusError: when a path is missing, unreadable, not a file, larger than memory, empty,
            binary or not UTF-8 (names the file and the offset).

    Example:
        >>> corpus = load_corpus("prose")
        >>> corpus.tokens.dtype, len(corpus.files)
        (dtype('uint8'), 1)
    """
    if paths is None or paths == "prose":
        return _corpus("prose", [("pydoc_data/topics.py", manual_prose())])
    if paths == "code":
        return _corpus("code", library_source())
    roots = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not roots:
        raise CorpusError('no paths given: name at least one file or folder, or "prose" or "code"')
    sources: list[tuple[str, bytes]] = []
    skipped: list[str] = []
    for root in map(Path, roots):
        if root.is_dir():
            found, left_out = read_folder(root)
            sources += found
            skipped += left_out
        else:
            sources.append((str(root), checked_text(root, read_bytes(root))))
    return _corpus(", ".join(str(root) for root in roots), sources, skipped)


@checked
def load_tokens(path: str | os.PathLike) -> Corpus:
    """Open a token array on disk, of any size, without reading it.

    Args:
        path: a `.npy` file of whole numbers [size].

    Returns:
        A corpus whose `tokens` stay on disk, for `token_batches`. Above 64 MiB its digest covers 64
        evenly spaced parts.

    Raises:
        CorpusError: when the file is missing, or holds something else.

    Example:
        >>> import numpy as np
        >>> np.save("tokens.npy", np.arange(1000, dtype=np.uint16))
        >>> load_tokens("tokens.npy").size
        1000
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"path: cannot open {str(path)!r} as a token array: {error}") from None
    is_row = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and len(tokens) > 0
    if not is_row or not np.issubdtype(tokens.dtype, np.integer):
        raise CorpusError(f"path: {str(path)!r} holds no row of whole numbers")
    starts = range(0, len(tokens), max(_DIGESTED, -(-len(tokens) // 64)))
    sha256 = hashlib.sha256(f"{tokens.dtype}[{len(tokens)}]".encode())
    for start in starts:
        sha256.update(np.asarray(tokens[start : start + _DIGESTED]).tobytes())
    digest = sha256.hexdigest()
    file = CorpusFile(str(path), tokens.nbytes, digest)
    return Corpus(str(path), tokens, (file,), len(tokens), digest)


@checked
def sample_batch(
    tokens: UInt8[Array, "size"], step: Int[Array, ""] | int, seed: Int[Array, ""] | int,
    batch: int, time: int,
) -> tuple[Int[Array, "batch time"], Int[Array, "batch time"]]:  # fmt: skip
    """Draw windows uniformly at random, with replacement, as a pure function of (seed, step).

        start_b ~ Uniform{0, ..., size - time - 1},  inputs_b = tokens[start_b : start_b + time],
        targets_b = tokens[start_b + 1 : start_b + time + 1]

    Traceable, so that a train step draws its batches on the device; a resumed run sees the same
    batches as an unbroken one.

    Args:
        tokens: uint8 [size], the training part of a corpus, on the device.
        step: which batch; may be traced.
        seed: which sequence of batches; may be traced.
        batch: windows per batch.
        time: tokens per window.

    Returns:
        (inputs, targets), both int32 [batch, time]; targets are the next bytes.

    Raises:
        CorpusError: when the text is shorter than one window and its next byte.

    Example:
        >>> tokens = jnp.arange(100, dtype=jnp.uint8)
        >>> inputs, targets = sample_batch(tokens, 0, seed=0, batch=2, time=5)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        ((2, 5), True)
    """
    _require_window(tokens, batch, time)
    key = jax.random.fold_in(jax.random.key(seed), step)
    starts = jax.random.randint(key, (batch, 1), 0, tokens.shape[0] - time)
    windows = tokens[starts + jnp.arange(time + 1)].astype(jnp.int32)
    return windows[:, :-1], windows[:, 1:]


@checked
def evaluation_batches(
    tokens: np.ndarray, batch: int, time: int, count: int
) -> tuple[Int[Array, "count batch time"], Int[Array, "count batch time"]]:
    """Cut `count` fixed batches of windows, spread evenly over the tokens.

    Windows do not overlap as long as count * batch windows fit; a smaller split is covered densely.

    Args:
        tokens: uint8 [size], the held-out part of a corpus.
        batch: windows per batch.
        time: tokens per window.
        count: how many batches.

    Returns:
        (inputs, targets), both int32 [count, batch, time].

    Raises:
        CorpusError: when the text is shorter than one window and its next byte.

    Example:
        >>> inputs, targets = evaluation_batches(load_corpus().tokens, batch=4, time=16, count=2)
        >>> inputs.shape
        (2, 4, 16)
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    _require_window(tokens, batch, time)
    last_start = tokens.shape[0] - time - 1
    starts = np.linspace(0, last_start, count * batch).astype(np.int64)
    windows = np.asarray(tokens)[starts[:, None] + np.arange(time + 1)].astype(np.int32)
    windows = windows.reshape(count, batch, time + 1)
    return jnp.asarray(windows[..., :-1]), jnp.asarray(windows[..., 1:])


def _require_window(tokens: Any, batch: int, time: int) -> None:
    for name, number in (("batch", batch), ("time", time)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if tokens.shape[0] < time + 1:
        raise CorpusError(
            f"a window of time={time} needs {time + 1} bytes (the last one is a target), "
            f"the corpus part has {tokens.shape[0]}: use more text or a shorter window"
        )


def _corpus(name: str, sources: Sequence[tuple[str, bytes]], skipped: Sequence[str] = ()) -> Corpus:
    files = tuple(
        CorpusFile(source, len(text), hashlib.sha256(text).hexdigest()) for source, text in sources
    )
    whole = b"".join(text for _, text in sources)
    tokens = np.frombuffer(whole, dtype=np.uint8)
    digest = hashlib.sha256(whole).hexdigest()
    return Corpus(name, tokens, files, len(whole), digest, tuple(skipped))
