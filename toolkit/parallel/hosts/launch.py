"""One job of several processes on this machine, watched by its parent process.

When a process dies, jax leaves the others in a collective until a missed heartbeat aborts them,
which no `except` can catch, and it intercepts SIGTERM. So only a parent can end a job well: it sees
at once which process died, ends the others and reports it; the next start resumes from the last
checkpoint.
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
# Survivors may fail on a killed process's closed sockets before the parent sees its death.
_BLAME_SECONDS = 0.5


@checked
def launch(
    command: Sequence[str], *,
    processes: int = 2, devices: int | None = None, restarts: int = 0, fewest: int | None = None,
    grace_seconds: float = 60.0,
) -> int:  # fmt: skip
    """Run a command as several processes of one jax job, and watch them.

    The environment of each process has what `join_processes` needs; `toolkit train` calls that. The
    first process's output is passed on, the lines of the others are prefixed with their number. C++
    libraries write to a file per process, which is named after a failure. When one process fails,
    the others are ended at once. SIGINT and SIGTERM are passed on as SIGTERM, so that a run can
    save; a second signal ends the job.

    Args:
        command: the program and its arguments, such as ["toolkit", "train", "run"].
        processes: number of processes.
        devices: simulated CPU devices per process; None uses the devices that each process finds.
        restarts: how often to restart the job after a failure.
        fewest: restart with half as many processes each time, but no fewer than this; None
            for the same number. A run with `device_batch` keeps its batch.
        grace_seconds: time for processes to stop when asked.

    Returns:
        0, or the exit status of processes that were asked to stop.

    Raises:
        RuntimeError: when the job failed more often than `restarts` allows; names the process and
            the failure.

    Example:
        >>> import sys
        >>> launch([sys.executable, "-c", "pass"], processes=2)
        0
    """
    _check(command, processes, devices)
    if restarts < 0 or grace_seconds < 0:
        name, value = ("restarts", restarts) if restarts < 0 else ("grace_seconds", grace_seconds)
        raise ValueError(f"{name}: got {value}, wanted at least 0")
    if fewest is not None and not 1 <= fewest <= processes:
        raise ValueError(f"fewest: got {fewest}, wanted 1 to {processes} processes")
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
            if fewest is not None:
                processes = max(fewest, processes // 2)
    written = f" What libraries wrote is in {logs}." if logs.exists() else ""
    raise RuntimeError(
        f"{failure}; the others were ended. Run the same command again: a run that saves "
        f"checkpoints continues from its last one.{written}"
    )


def launch_commands(command: Sequence[str], processes: int, devices: int | None) -> str:
    """The commands of `launch`, one shell line per process."""
    _check(command, processes, devices)
    lines, address = [], f"127.0.0.1:{_free_port()}"
    for index in range(processes):
        added = _environment(address, processes, index, devices)
        added.pop("TOOLKIT_SUPERVISED")  # a shell passes on its own standard input
        lines.append(" ".join([*(f"{k}={v}" for k, v in added.items()), shlex.join(command)]))
    return "\n".join(lines)


@contextmanager
def _only_with_content(folder: Path) -> Iterator[None]:
    """Remove a folder of empty files."""
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
    """The processes of one attempt; leaving the context ends them and their children."""

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
            stdin=subprocess.PIPE,  # closes when this process dies, which `join_processes` watches
            stdout=None if index == 0 else subprocess.PIPE,
            stderr=None if index == 0 else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the parent only
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
        """Wait for the end; None on success, else a sentence about the first failure."""
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
        """A sentence about the process that failed first; the others may have failed because of
        it."""
        time.sleep(_BLAME_SECONDS)
        statuses = {
            i: status for i, process in enumerate(self.processes) if (status := process.poll())
        }

        def innocence(index: int) -> tuple[int, bool]:
            failed_itself = (
                statuses[index] > 0
            )  # survivors may fail too, but a kill comes from outside
            aborted = statuses[index] == -signal.SIGABRT  # by jax, when another process is gone
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
    """Pass on the lines of one process, with its number, until it ends."""
    with stream:
        for line in stream:
            sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stderr.flush()
