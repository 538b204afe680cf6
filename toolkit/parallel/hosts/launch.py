"""One job of several processes on this machine, watched by the process that started them.

jax leaves the survivors of a dead process in a collective that never ends, until a heartbeat is
missed and they abort where no `except` can catch it; and it keeps SIGTERM to itself. So nothing
inside of a job can end it well. A parent can: it sees at once which process died, ends the others
and says so, and what was saved is where the next start goes on.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from toolkit._checks import checked
from toolkit.parallel.hosts.signals import remembered_signals

MOST_PROCESSES = 256
MOST_DEVICES = 1024
_POLL_SECONDS = 0.05
# Survivors notice a killed process by its closed sockets, which close before its parent is told.
_BLAME_SECONDS = 0.5


@checked
def launch(
    command: Sequence[str],
    *,
    processes: int = 2,
    devices: int | None = None,
    restarts: int = 0,
    grace_seconds: float = 60.0,
) -> int:
    """Runs a command as several processes that make up one jax job, and watches them.

    Each process finds in its environment what `join_processes` needs; `toolkit train` calls that.
    The first process writes to this one's output as it is, the others' lines carry their number.
    What libraries in C++ write goes to a file per process, whose folder is named after a failure.
    When one process fails, the others are ended at once. SIGINT and SIGTERM are handed on as
    SIGTERM, so that a run can save; a second one ends the job.

    Args:
        command: the program and its arguments, such as ["toolkit", "train", "run"].
        processes: how many to start.
        devices: simulated CPU devices of each; None leaves every process the devices it finds.
        restarts: how often to start the job again when a process has failed.
        grace_seconds: how long processes that were asked to stop may take.

    Returns:
        0, or the exit status of processes that were asked to stop.

    Raises:
        RuntimeError: when a process failed more often than `restarts` allows; says which, and how.

    Cost: A failure is seen within 0.05 s.

    Example:
        >>> import sys
        >>> launch([sys.executable, "-c", "pass"], processes=2)
        0
    """
    _check(command, processes, devices)
    if restarts < 0 or grace_seconds < 0:
        name, value = ("restarts", restarts) if restarts < 0 else ("grace_seconds", grace_seconds)
        raise ValueError(f"{name}: got {value}, wanted at least 0")
    logs = Path(tempfile.mkdtemp(prefix="toolkit-logs-"))
    with remembered_signals() as signals, _only_with_content(logs):
        for attempt in range(restarts + 1):
            with _Job(command, processes, devices, logs) as job:
                failure = job.watch(signals, grace_seconds)
            if failure is None:
                shutil.rmtree(logs)
                return job.status
            if signals or attempt == restarts:
                break
            print(f"{failure}; starting again ({attempt + 1} of {restarts})", file=sys.stderr)
    written = f" What libraries wrote is in {logs}." if logs.exists() else ""
    raise RuntimeError(
        f"{failure}; the others were ended. Run the same command again: a run that saves "
        f"checkpoints goes on from its last one.{written}"
    )


def launch_commands(command: Sequence[str], processes: int, devices: int | None) -> str:
    """What `launch` would run, one line of a shell per process."""
    _check(command, processes, devices)
    lines, address = [], f"127.0.0.1:{_free_port()}"
    for index in range(processes):
        added = _environment(address, processes, index, devices)
        added.pop("TOOLKIT_SUPERVISED")  # a shell hands on its own standard input
        lines.append(" ".join([*(f"{k}={v}" for k, v in added.items()), shlex.join(command)]))
    return "\n".join(lines)


@contextmanager
def _only_with_content(folder: Path) -> Iterator[None]:
    """Removes a folder in whose files nothing was written."""
    try:
        yield
    finally:
        if folder.exists() and not any(path.stat().st_size for path in folder.iterdir()):
            shutil.rmtree(folder)


def _check(command: Sequence[str], processes: int, devices: int | None) -> None:
    if not command or not all(isinstance(word, str) and word for word in command):
        raise ValueError(f"command: got {command!r}, wanted a program and its arguments")
    if not 1 <= processes <= MOST_PROCESSES:
        raise ValueError(f"processes: got {processes}, wanted 1 to {MOST_PROCESSES}")
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices: got {devices}, wanted 1 to {MOST_DEVICES}, or None")


class _Job:
    """The processes of one attempt. Leaving it leaves none of them, nor what they started."""

    def __init__(self, command: Sequence[str], processes: int, devices: int | None, logs: Path):
        address = f"127.0.0.1:{_free_port()}"
        self.status = 0
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        try:
            for index in range(processes):
                added = _environment(address, processes, index, devices)
                added["TOOLKIT_LOGS"] = str(logs)
                self._start(command, os.environ | added, index)
        except OSError as error:
            self._end()
            raise ValueError(f"command: cannot run {command[0]!r} ({error.strerror})") from None

    def _start(self, command: Sequence[str], environment: dict[str, str], index: int) -> None:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,  # closes with this process, which `join_processes` watches
            stdout=None if index == 0 else subprocess.PIPE,
            stderr=None if index == 0 else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, and a group can be ended
        )
        self.processes.append(process)
        if process.stdout is not None:
            reader = threading.Thread(target=_repeat, args=(process.stdout, index), daemon=True)
            reader.start()
            self.readers.append(reader)

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def watch(self, signals: list[str], grace_seconds: float) -> str | None:
        """Waits for the end; None if it is a good one, else a sentence on the first failure."""
        deadline = None
        while True:
            statuses = [process.poll() for process in self.processes]
            failed = [index for index, status in enumerate(statuses) if status]
            if signals and deadline is None:
                deadline = time.monotonic() + grace_seconds
                for process in self.processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            if failed and deadline is None:
                return self._blamed(failed)
            if None not in statuses:
                self.status = max(abs(status) for status in statuses if status is not None)
                return None
            if deadline is not None and time.monotonic() > deadline:
                return f"{signals[0]}: some processes did not stop within {grace_seconds:g} s"
            time.sleep(_POLL_SECONDS)

    def _blamed(self, seen_first: list[int]) -> str:
        """A sentence on the process that failed of itself: others may since have, for its sake."""
        time.sleep(_BLAME_SECONDS)
        statuses = {
            i: status for i, process in enumerate(self.processes) if (status := process.poll())
        }

        def innocence(index: int) -> tuple[int, bool]:
            failed_itself = statuses[index] > 0  # as survivors may too: a kill comes from outside
            aborted = statuses[index] == -signal.SIGABRT  # by jax, when another is gone
            return 2 * aborted + failed_itself, index not in seen_first

        index = min(statuses, key=innocence)
        return self._sentence(index, statuses[index])

    def _sentence(self, index: int, status: int) -> str:
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return f"process {index} of {len(self.processes)} {how}"

    def _end(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for reader in self.readers:
            reader.join(timeout=5)


def _environment(address: str, processes: int, index: int, devices: int | None) -> dict[str, str]:
    added = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
        "TOOLKIT_SUPERVISED": "1",
    }
    if devices is not None:
        added |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return added


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _repeat(stream: IO[bytes], index: int) -> None:
    """Lines of one process, with its number, until it ends."""
    with stream:
        for line in stream:
            sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stderr.flush()
