"""Tokenizers of the library `tokenizers`: text as tokens, and tokens as text."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toolkit._checks import checked
from toolkit._files import json_object
from toolkit.training.data.corpora import BYTE_VOCABULARY

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = ("generation_config.json", "config.json")
"""Where a checkpoint names the tokens that start and end a text; the first that does counts."""

_WAITING = "\N{REPLACEMENT CHARACTER}"


@checked
def load_tokenizer(path: str | os.PathLike) -> Any:
    """Read a `tokenizer.json`, as in Llama's and Qwen's checkpoints.

    Args:
        path: the file, or the folder of a checkpoint that holds it.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer.
        ImportError: the library is not installed.

    Example:
        >>> load_tokenizer("no/such/folder")
        Traceback (most recent call last):
        FileNotFoundError: path: no tokenizer.json at 'no/such/folder'
    """
    path = Path(path)
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"path: no tokenizer.json at {str(path)!r}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("tokenizers is missing: pip install 'mlsys-toolkit[data]'") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"path: {str(file)!r} is not a tokenizer ({error})") from None


@checked
def find_tokenizer(directory: Path) -> Any:
    """The tokenizer stored with a run or an exported model.

    Args:
        directory: a folder written by `train_language_model`, or an exported file.

    Returns:
        A `tokenizers.Tokenizer`, or None if none is stored, as for a byte model.

    Raises:
        ImportError: the library is not installed.

    Example:
        >>> find_tokenizer("run") is None
        True
    """
    file = tokenizer_beside(directory)
    return load_tokenizer(file) if file.is_file() else None


class SpecialTokens(NamedTuple):
    """The tokens with which texts of a model start and end.

    Attributes:
        start: the token before the first of a text, or None.
        stops: tokens that end a text; None if there are none.

    Example:
        >>> SpecialTokens(start=1, stops=(2,)).stops
        (2,)
    """

    start: int | None = None
    stops: tuple[int, ...] | None = None


@checked
def find_special_tokens(directory: Path) -> SpecialTokens:
    """The tokens that start and end a text, from the generation_config.json of a checkpoint.

    Args:
        directory: the folder of a published checkpoint, a run that continued one, or the file that
            such a run was exported to.

    Returns:
        The tokens; none for a model of bytes.

    Example:
        >>> find_special_tokens(".").stops is None
        True
    """
    os.stat(directory)  # of a path that is not there, nobody would notice the missing tokens
    found: dict[str, Any] = {}
    for name in SPECIAL_TOKENS:
        if (file := beside(directory, name)).is_file():
            found = json_object(file.read_bytes(), str(file)) | found
    starts, stops = (_tokens(found, f"{name}_token_id") for name in ("bos", "eos"))
    return SpecialTokens(starts[0] if starts else None, stops or None)


def write_special_tokens(directory: Path, special: SpecialTokens) -> None:
    """Write a generation_config.json into a folder, or beside a file, unless there are none."""
    stops = None if special.stops is None else list(special.stops)
    ids = {"bos_token_id": special.start, "eos_token_id": stops}
    if any(found is not None for found in ids.values()):
        beside(directory, SPECIAL_TOKENS[0]).write_text(json.dumps(ids) + "\n")


def _tokens(settings: dict[str, Any], name: str) -> tuple[int, ...]:
    """The token or tokens of a setting; none where it is missing or null."""
    value = settings.get(name)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f"{name} is {value!r}; it must be a token, a list of tokens, or null")
    return tuple(tokens)


def tokenizer_beside(file: str | os.PathLike) -> Path:
    """The path of the tokenizer of a token array, a run's folder or an exported model."""
    return beside(file, TOKENIZER)


def beside(file: str | os.PathLike, name: str) -> Path:
    """The path of a file of this name in a folder, or beside a file, whose name it then begins
    with."""
    file = Path(file)
    return file / name if file.is_dir() else file.with_suffix(f".{name}")


def check_vocabulary(tokenizer: Any, vocabulary: int) -> None:
    """Refuse a tokenizer with more tokens than the model's `vocabulary`; None stands for bytes."""
    if tokenizer is None:
        if vocabulary > BYTE_VOCABULARY:
            raise ValueError(
                f"tokenizer: got None, wanted the one of the model's {vocabulary:,} tokens "
                "(`toolkit generate --tokenizer FILE`): a model of bytes has at most 256"
            )
        return
    check_tokenizer(tokenizer)
    if (size := tokenizer.get_vocab_size()) > vocabulary:
        raise ValueError(
            f"tokenizer: got one of {size:,} tokens for a model of {vocabulary:,}; wanted the one "
            f"that the model was trained with, or for a new model --vocabulary {size}"
        )


def bytes_per_token(tokenizer: Any, tokens: np.ndarray) -> float:
    """UTF-8 bytes per token of `tokens` [..., time], accurate to one character per row."""
    rows = np.reshape(tokens, (-1, np.shape(tokens)[-1])).tolist()
    texts = tokenizer.decode_batch(rows, skip_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / np.size(tokens)


def decoded(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Decode incoming tokens to pieces of text; a character of several tokens is returned with its
    last."""
    ids: list[int] = []
    yielded = ""
    for token in tokens:
        ids.append(int(token))
        text = tokenizer.decode(ids)
        if not text.endswith(_WAITING):
            yield text[len(yielded) :]
            yielded = text


def encoded(tokenizer: Any, text: str, start: int | None = None) -> list[int]:
    """The tokens of a prompt, with the tokenizer's initial special tokens.

    An empty prompt is these alone, or the token `start`.
    """
    check_tokenizer(tokenizer)
    try:
        ids = tokenizer.encode(text).ids
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"prompt: the tokenizer cannot encode {text!r} ({error})") from None
    if ids:
        return ids
    if start is None:
        raise ValueError(
            "prompt: got an empty text, and the tokenizer has no token that starts one; wanted at "
            "least one character"
        )
    return [start]


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what `load_tokenizer` would not return."""
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise ValueError(
            f"tokenizer: got {type(tokenizer).__name__}, wanted one made by load_tokenizer"
        )
