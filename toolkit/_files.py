"""Files for resuming: written atomically, sealed by a checksum, read with errors of one line.

A seal is the SHA-256 of the whole file, or of the whole line, with the digest itself blank:

    {"step": 10, "loss": 0.5, "checksum": "sha256:ed41..."}

so that no byte of it can change unnoticed, and an edited record is told from the one that was
written. It guards against accidents and edits, not against anybody who makes a new seal.
"""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

LARGEST_JSON = 64 << 20  # bytes: a thousand times what is written here
DEEPEST_JSON = 64  # brackets in brackets; Python's own reader ends a process some way beyond

KEY = "checksum"
_BLANK = "0" * 64
_SEAL = re.compile(rb'"checksum":\s?"sha256:([0-9a-f]{64})"')
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def unfinished_beside(path: str | os.PathLike) -> Path:
    """A new name for what becomes this file or folder when it is complete; every writer has its
    own."""
    path = Path(path)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


def write_whole(path: str | os.PathLike, content: bytes) -> None:
    """Write a file atomically. As after `open`, the umask says who may read it."""
    if not Path(path).name:
        raise ValueError(f"path must name a file; got {os.fspath(path)!r}.")
    unfinished = unfinished_beside(path)
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def bounded_json(text: str | bytes, where: str) -> Any:
    """What JSON says, or a ValueError of one line: no JSON, too large, nested too deeply."""
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{where} is {len(text):,} bytes of JSON, more than {LARGEST_JSON:,}")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        depth = deepest = 0
        for found in _BRACKETS.finditer(text):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
            deepest = max(deepest, depth)
        if deepest <= DEEPEST_JSON:
            return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {str(error).splitlines()[0]}") from None
    raise ValueError(f"{where} is JSON nested {deepest} deep, more than {DEEPEST_JSON}")


def json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """What JSON says, if it is an object; otherwise a ValueError of one line."""
    found = bounded_json(text, where)
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(found).__name__}")
    return found


def unsealed_facts(blank_facts: dict[str, Any]) -> dict[str, Any]:
    """The same without the seal."""
    return {name: value for name, value in blank_facts.items() if name != KEY}


def with_blank_seal(facts: dict[str, Any]) -> dict[str, Any]:
    """The same with the place that `sealed` fills."""
    return {**unsealed_facts(facts), KEY: f"sha256:{_BLANK}"}


def sealed(content: bytes) -> bytes:
    """The content with its blank seal filled in."""
    place = _SEAL.search(content)
    if place is None or place[1] != _BLANK.encode():
        raise ValueError("content to be sealed must have one blank checksum before anything else")
    return b"".join((content[: place.start(1)], _digest(content, place), content[place.end(1) :]))


def require_seal(content: bytes, where: str) -> None:
    """Refuses content that is not what was sealed."""
    place = _SEAL.search(content)
    if place is None:
        raise ValueError(f"{where} has no checksum: it is damaged or was not written by toolkit")
    if place[1] != _digest(content, place):
        raise ValueError(f"{where} is damaged or was edited: its checksum differs")


def _digest(content: bytes, place: re.Match) -> bytes:
    whole = hashlib.sha256(memoryview(content)[: place.start(1)])
    whole.update(_BLANK.encode())
    whole.update(memoryview(content)[place.end(1) :])
    return whole.hexdigest().encode()


def sealed_json(facts: dict[str, Any], **options: Any) -> bytes:
    """Facts as sealed JSON; `options` are those of `json.dumps`."""
    return sealed(json.dumps(with_blank_seal(facts), **options).encode())


def read_sealed_json(content: bytes, where: str) -> dict[str, Any]:
    """The facts of `sealed_json`, or a ValueError of one line."""
    require_seal(content, where)
    return unsealed_facts(json_object(content, where))


def append_sealed_line(path: Path, facts: dict[str, Any]) -> None:
    """Adds a line; it is on disk when this returns. What a kill left of another is cut off."""
    with path.open("ab+") as file:
        file.seek(0)
        begun = file.read()
        whole = begun.rfind(b"\n") + 1
        if _SEAL.search(begun, whole):  # all but its newline
            file.write(b"\n")
        else:
            file.truncate(whole)
        file.write(sealed_json(facts, allow_nan=False) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_sealed_lines(path: Path) -> list[dict[str, Any]]:
    """The facts of every line, each sealed; a last line that a kill cut short is left out.

    A file that does not exist has no lines.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    # What follows the last newline was being written when the process died. It is no such thing if
    # its seal is complete: then it is the newline that is missing, or has become something else.
    if _SEAL.search(rest):
        lines.append(rest)
    return [read_sealed_json(line, f"{path}, line {at}") for at, line in enumerate(lines, 1)]
