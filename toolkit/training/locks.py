"""Locks between processes: files that one process holds until it lets go or dies.

`fcntl` locks belong to the process, so the kernel releases them at its death, by kill -9 too.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HeldError(RuntimeError):
    """Another process holds the lock; `holder` says which."""

    def __init__(self, path: Path, holder: str):
        super().__init__(f"{str(path)!r} is held by {holder}")
        self.holder = holder


@contextmanager
def locked(path: str | os.PathLike, *, wait: bool = False) -> Iterator[None]:
    """Holds a lock file, which names its holder; HeldError when another does and `wait` is off."""
    path = Path(path)
    # Appending neither truncates what the holder wrote nor needs the file to exist.
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
