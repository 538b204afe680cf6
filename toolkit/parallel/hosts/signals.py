"""Requests to stop, remembered until the work at hand is done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def remembered_signals() -> Iterator[list[str]]:
    """Record the first SIGINT or SIGTERM in a list; the second one interrupts at once."""
    received: list[str] = []

    def remember(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    # Python delivers signals to the main thread only, and lets only that one install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
