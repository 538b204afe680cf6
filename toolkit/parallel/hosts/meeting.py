"""A barrier for the processes of a job, with time enough for a slow host.

A program's first collective connects the processes. gloo waits 30 seconds for that, and then the
job is lost; one host may compile a minute longer than another. So the processes first wait for each
other at the coordination service, whose time limit is ours and which knows who is missing.
"""

import itertools
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from toolkit._compat import coordination

MOST_SECONDS = 1800.0
_NOTICE_SECONDS = 20.0
_numbers = itertools.count()


def introduce() -> None:
    """Publish the name of this process's host; called once, by `join_processes`."""
    coordination().key_value_set(f"toolkit/host/{jax.process_index()}", socket.gethostname())


def meet(what: str, seconds: float = MOST_SECONDS) -> None:
    """Wait until every process of the job calls this; a timeout names the missing ones.

    All processes call it in the same order. `what` names the task before it, "compile the train
    step".
    """
    client, count = coordination(), jax.process_count()
    if client is None or count == 1:
        return
    place = f"toolkit/meeting/{next(_numbers)}"
    client.key_value_set(f"{place}/{jax.process_index()}", "here")

    def by_process(folder: str) -> dict[str, str]:
        return {key.rpartition("/")[2]: value for key, value in client.key_value_dir_get(folder)}

    def missing() -> str:
        present, hosts = by_process(place), by_process("toolkit/host")
        absent = [index for index in map(str, range(count)) if index not in present]
        names = [f"process {index} (host {hosts.get(index, 'unknown')})" for index in absent]
        return f"{', '.join(names) or 'none'} of {count}"

    def notice() -> None:
        print(f"waiting for {missing()} to {what}", file=sys.stderr, flush=True)

    timer = threading.Timer(_NOTICE_SECONDS, notice)
    timer.daemon = True
    if jax.process_index() == 0:
        timer.start()
    try:
        client.wait_at_barrier(place, round(1000 * seconds))
    except RuntimeError as error:
        raise RuntimeError(
            f"waited {seconds:g} s for {missing()} to {what} ({str(error).splitlines()[0]})"
        ) from None
    finally:
        timer.cancel()


class Together:
    """A jitted function; processes wait for each other between its compilation and its first
    run."""

    def __init__(self, program: Callable[..., Any], what: str):
        self.program: Any = program
        self.what = what
        self._is_first = True

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._is_first and jax.process_count() > 1:
            self.program.lower(*arguments, **options).compile()
            meet(f"compile {self.what}")
        self._is_first = False
        return self.program(*arguments, **options)
