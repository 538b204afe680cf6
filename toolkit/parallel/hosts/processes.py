"""The first step of each process of a job: find and count the others."""

import os
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from toolkit._checks import checked
from toolkit._compat import distributed_options
from toolkit.parallel.hosts.chatter import library_output_to
from toolkit.parallel.hosts.meeting import introduce

MOST_PROCESSES = 1_000_000
# How long a process that ends with an error waits for the others.
_SHUTDOWN_SECONDS = 60


@checked
def join_processes(expected: int | None = None) -> int:
    """Join this process to a job of several. Call it before anything else.

    `toolkit launch` provides the addresses. Elsewhere jax asks the cluster (SLURM, Kubernetes, Open
    MPI, Cloud TPU) if `expected` is given. The number found is compared with it, because a wrongly
    configured cluster would train a separate model in each process.

    Args:
        expected: number of processes of the job; None for that of `toolkit launch`, or else one.

    Returns:
        The number of processes.

    Raises:
        RuntimeError: when the others cannot be found.

    Example:
        >>> join_processes()
        1
    """
    if expected is not None and not 1 <= expected <= MOST_PROCESSES:
        raise ValueError(f"expected: got {expected}, wanted 1 to {MOST_PROCESSES}")
    if not jax.distributed.is_initialized():
        launched = os.environ.get("JAX_NUM_PROCESSES")
        if launched is None and expected in (None, 1):
            return 1
        _check(expected, launched)
        _initialize()
    processes = jax.process_count()
    _check(expected, processes)
    return processes


def leave(status: int) -> NoReturn:
    """End this process without waiting for the others, which may wait for this one."""
    if status and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _initialize() -> None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [os.environ.get(name) for name in names]
    options = distributed_options(_SHUTDOWN_SECONDS)  # `fit` needs SIGTERM to save and stop
    # Before the others are met, for which a process waits five minutes.
    if os.environ.get("TOOLKIT_SUPERVISED"):
        threading.Thread(target=_die_with_supervisor, daemon=True).start()
    if folder := os.environ.get("TOOLKIT_LOGS"):
        library_output_to(Path(folder) / f"process-{given[2]}.log")
    try:
        address, processes, index = given
        if address is not None and index == "0":
            _require_free_port(address)
        jax.distributed.initialize(
            address,
            None if processes is None else int(processes),
            None if index is None else int(index),
            # With a complete configuration, the cluster detection would take devices away.
            cluster_detection_method=None if None in given else "deactivate",
            **options,
        )
    except (ValueError, RuntimeError) as error:
        variables = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
        raise RuntimeError(
            f"cannot join the other processes ({str(error).splitlines()[0]}); the environment has "
            f"{variables}"
        ) from error
    introduce()
    sys.excepthook = _leave_with_traceback


def _require_free_port(address: str) -> None:
    """Refuse a port that is in use, on which jax would abort without a message."""
    port = int(address.rpartition(":")[2])
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    is_dual = family == socket.AF_INET6
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        raise RuntimeError(f"port {port} of this host: {error.strerror}") from None


def _check(expected: int | None, found: int | str | None) -> None:
    if expected is not None and found is not None and int(found) != expected:
        raise ValueError(
            f"expected: this job has {found} process(es), wanted {expected}; were all started, "
            "each inside of the cluster's own launcher (srun, an indexed Job, toolkit launch)?"
        )


def _leave_with_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, traceback)
    leave(1)


def _die_with_supervisor() -> None:
    """End this process when its parent dies, which closes the pipe at standard input."""
    while os.read(0, 1024):
        pass
    os._exit(1)
