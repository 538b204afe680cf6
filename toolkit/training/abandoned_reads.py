"""orbax reads on after an error, and says so later: a moment of quiet for what it abandoned."""

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
    """This checkpoint cannot be used; an older one may be."""


@contextmanager
def quiet_abandoned_reads() -> Iterator[None]:
    """Lets an unreadable checkpoint be reported once, by us.

    orbax reads all arrays at once and closes its event loop at the first failure. The reads it
    abandons then complain one by one, through whichever channel their garbage collection finds.
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
