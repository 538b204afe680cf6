"""Locks between processes, held until released or until the process dies.

The kernel releases `fcntl` locks when the process dies, even by kill -9.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HeldError(RuntimeError):
    """Another process, `holder`, holds the lock."""

    def __init__(self, path: Path, holder: str):
        super().__init__(f"{str(path)!r} is held by {holder}")
        self.holder = holder


@contextmanager
def locked(path: str | os.PathLike, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file, which names its holder; HeldError if another process does and `wait` is
    off."""
    path = Path(path)
    # Append mode neither truncates the holder's text nor requires the file to exist.
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise HeldError(path, file.read().strip() or "another process") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
