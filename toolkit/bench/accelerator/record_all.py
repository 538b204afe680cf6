"""One command for an accelerator: its kernels checked, then timed beside peers, in one file.

    toolkit bench --all --record h100.json

It can be stopped and run again: what the file holds is not done again. The work is done in a
process of its own, so that a kernel that ends the process ends no more than itself.
"""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from toolkit._checks import checked
from toolkit.attention.kernels.dispatch import interpreted
from toolkit.bench.accelerator.checks import LARGE, SMALL, KernelCheck, kernel_checks
from toolkit.bench.harness import PlannedCase, run_case
from toolkit.bench.mixers import gpu
from toolkit.bench.mixers import steps as mixer_steps
from toolkit.bench.mixers.suite import recurrent_rows
from toolkit.bench.softmax import accelerator_cases
from toolkit.measure import Record, read_records, record, write_records

FAILED, ERROR = " | failed: ", " | relative error"
STEPPED = ("mamba2", "gdn", "kda")  # without a delta rule, with one, with a decay per channel
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}


class Item(NamedTuple):
    """One check or one comparison: the beginning of its records' names, and what makes them."""

    name: str
    run: Callable[[], list[Record]]


@checked
def record_all(
    path: Path, *, minutes: float = 30.0, rounds: int = 7, only: str = "", interpret: str = ""
) -> list[Record]:
    """Check every kernel of the accelerator here, then time ours and peers, into one JSON file.

    On a CPU, `interpret` names the platform whose kernels are interpreted, as a rehearsal.
    """
    # The process that measures needs the memory, and torch shares it with jax there.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = PLATFORMS.get(jax.default_backend())
    if platform is None and not interpret:
        raise RuntimeError(
            "jax finds no GPU or TPU here: wanted a machine or a runtime with one, or --interpret "
            "cuda or --interpret tpu, which rehearses on a CPU"
        )
    if interpret and (platform is not None or interpret not in PLATFORMS.values()):
        raise ValueError(
            f"interpret: got {interpret!r} on platform {jax.default_backend()!r}, wanted one of "
            f"{', '.join(PLATFORMS.values())} on a CPU, and none on a GPU or TPU"
        )
    end = time.time() + 60 * minutes
    names = [
        item.name for item in _items(platform or interpret, bool(interpret)) if only in item.name
    ]
    records = _read(path)
    with tqdm(total=len(names), unit="item", file=sys.stderr) as bar:
        while left := [name for name in names if not _is_done(name, records)]:
            bar.update(len(names) - len(left) - bar.n)
            if time.time() > end:
                break
            how = [str(path), str(rounds), str(end), only, interpret]
            with Popen([sys.executable, "-m", __name__, *how], stdin=PIPE) as child:
                ended = _watched(child, path, names, bar)
            records = _read(path)
            if ended and not _is_done(left[0], records):
                following = [name for name in left if not _is_done(name, records)]
                records.append(_failure(following[0], f"the process ended with {ended}"))
                write_records(path, records)
        bar.update(len(names) - len(left) - bar.n)
    if left:
        how = f"{len(left)} of {len(names)} were not begun in {minutes:g} minutes"
        print(f"{how}; the same command goes on with them", file=sys.stderr)
    if not records:
        raise RuntimeError(f"minutes: got {minutes:g}, in which nothing could be begun")
    return records


def record_here(path: Path, rounds: int, end: float, only: str, interpret: str) -> None:
    """Do what the file lacks, in this process; the file is written after every item."""
    platform = interpret or PLATFORMS[jax.default_backend()]
    records = _read(path)
    with interpreted(interpret) if interpret else nullcontext():
        for item in _items(platform, bool(interpret), rounds):
            if only not in item.name or _is_done(item.name, records):
                continue
            if time.time() > end:
                return
            print(f"\n{item.name}", flush=True)
            try:
                records += item.run()
            except Exception as fault:  # whatever a kernel, a compiler or a peer may raise
                message = f"{type(fault).__name__}: {fault}".splitlines()[0][:300]
                print(f"  failed: {message}", flush=True)
                records.append(_failure(item.name, message))
                if "CUDA_ERROR" in str(fault):  # after which nothing works in this process
                    write_records(path, records)
                    sys.exit(1)
            write_records(path, records)
            jax.clear_caches()


def _watched(child: Popen, path: Path, names: list[str], bar: Any, seconds: float = 2) -> int:
    """The exit status of the process, whose records move the bar as they come."""
    while True:
        try:
            return child.wait(seconds)
        except TimeoutExpired:
            records = _read(path)
            bar.update(sum(_is_done(name, records) for name in names) - bar.n)


def _read(path: Path) -> list[Record]:
    return read_records(path) if path.exists() else []


def _end_with_parent() -> None:
    """End this process when its parent has ended: a second one would write the same file."""
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: it returns at the end of the pipe
    os._exit(1)


def _is_done(name: str, records: list[Record]) -> bool:
    return any(entry.name.startswith(f"{name} |") for entry in records)


def _failure(name: str, reason: str) -> Record:
    return record(f"{name}{FAILED}{reason}", 1.0, "failure")


def _items(platform: str, is_rehearsal: bool, rounds: int = 7) -> Iterator[Item]:
    for check in kernel_checks(platform, SMALL if is_rehearsal else LARGE):
        name = f"kernel {platform} {check.name}"
        yield Item(name, lambda check=check, name=name: _checked_kernel(check, name))
    for case in _cases(platform, is_rehearsal):
        yield Item(
            case.name, lambda case=case: run_case(case.build(case.name), rounds=rounds, cores=1)
        )


def _checked_kernel(check: KernelCheck, name: str) -> list[Record]:
    error = check.error()
    print(f"  relative error {error:.2e}, at most {check.most:g}", flush=True)
    if not error <= check.most:
        raise ValueError(f"relative error {error:.2e}, wanted at most {check.most:g}")
    return [record(name + ERROR, error, "1", check="passed")]


def _cases(platform: str, is_rehearsal: bool) -> Iterator[PlannedCase]:
    """What is timed, the widest first: one shape of every mixer, softmax, then steps."""
    if is_rehearsal:
        yield from mixer_steps.shard_cases()
        return
    with_kernels = [row for row in recurrent_rows() if "pallas" in row.implementations]
    yield from gpu.cases(with_kernels, gpu.SHAPES[:1])
    stepped = [row for row in with_kernels if row.name in STEPPED]
    yield from mixer_steps.cases(stepped, [mixer_steps.ON_A_CHIP])
    yield from accelerator_cases()
    if platform == "cuda":
        yield from mixer_steps.shard_cases(((8, 32768),))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "implementation=.pallas. is experimental")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    path, rounds, end, only, interpret = sys.argv[1:]
    # What a user types to have the same again: records quote the command line.
    sys.argv = ["toolkit", "bench", "--all", "--record", Path(path).name]
    record_here(Path(path), int(rounds), float(end), only, interpret)
