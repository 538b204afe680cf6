"""Silence the late complaints of reads that orbax abandons after an error."""

import gc
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABANDONED_READ_SECONDS = 0.1


class Refused(Exception):
    """This checkpoint cannot be used; an older one may work."""


@contextmanager
def quiet_abandoned_reads() -> Iterator[None]:
    """Let only our report of an unreadable checkpoint be shown.

    orbax reads all arrays at once and closes its event loop at the first failure. The abandoned
    reads then complain one by one during garbage collection.
    """
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    logger = logging.getLogger("asyncio")
    level = logger.level
    sys.unraisablehook = hook
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Refused:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            time.sleep(_ABANDONED_READ_SECONDS)
            gc.collect()
        raise
    finally:
        sys.unraisablehook = usual
        logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"
