"""Numbers with their provenance.

A number is *measured* (here, now), *recorded* (measured earlier, elsewhere, or published) or
*modelled* (computed from a formula). A `Record` has the kind, device, versions, commit, date and
command.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import numbers
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from toolkit._checks import check_choice, check_fields, checked
from toolkit._files import write_whole
from toolkit.measure.hardware import available_cores, available_memory, cpu_name
from toolkit.measure.timing import ABSENT, PASSED
from toolkit.measure.words import in_words

KINDS = ("measured", "recorded", "modelled")
CHECKS = (PASSED, ABSENT)
# In an archive of the repository, such as GitHub's, git writes the commit here (`.gitattributes`).
_ARCHIVED = "$Format:%H$"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# An absolute path, or one below a home folder: everything up to the last name.
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[\w.+@-]+/)*")


@dataclasses.dataclass(frozen=True)
class Record:
    """One number and its provenance.

    Attributes:
        name: what was measured, such as "decode/gdn/seconds_per_token".
        value: the number.
        unit: its unit, such as "s" or "byte".
        kind: "measured", "recorded" or "modelled".
        device: the hardware in words.
        versions: package -> version.
        commit: git commit of the toolkit, or "unknown".
        date: UTC, ISO 8601.
        command: the command line without folders of the machine.
        samples: the numbers `value` summarises, may be empty.
        check: "passed" if a check of correctness passed before the measurement, else "absent". Only
            the former may be used in a ratio.

    Example:
        >>> found = record("loss", 0.5, "nat", samples=[0.4, 0.6])
        >>> found.kind, found.samples
        ('measured', (0.4, 0.6))
    """

    name: str
    value: float
    unit: str
    kind: str
    device: str
    versions: Mapping[str, str]
    commit: str
    date: str
    command: str
    samples: tuple[float, ...] = ()
    check: str = ABSENT

    def __post_init__(self):
        check_fields(self)
        for name, words in (("kind", KINDS), ("check", CHECKS)):
            check_choice(name, getattr(self, name), words)


@checked
def record(
    name: str, value: float, unit: str, *,
    kind: str = "measured", samples: Iterable[float] = (), device: str | None = None,
    check: str = ABSENT,
) -> Record:  # fmt: skip
    """Make a record with the provenance of this process.

    Args:
        name: what was measured.
        value: the number (numpy and jax scalars are converted).
        unit: its unit.
        kind: "measured", "recorded" or "modelled".
        samples: the numbers `value` summarises.
        device: the hardware in words; None describes the default jax device.
        check: "passed" or "absent": whether correctness was checked before.

    Example:
        >>> record("parameters", 1_000, "1", kind="modelled").value
        1000
    """
    facts = environment()
    return Record(
        name=name,
        value=int(value) if isinstance(value, numbers.Integral) else float(value),
        unit=unit,
        kind=kind,
        device=facts["device"] if device is None else device,
        versions=facts["versions"],
        commit=facts["commit"],
        date=facts["date"],
        command=facts["command"],
        samples=tuple(float(sample) for sample in samples),
        check=check,
    )


@checked
def write_records(path: str | os.PathLike, records: Iterable[Record]) -> None:
    """Write records as JSON, atomically.

    Args:
        path: the file; it is replaced whole or left as it was.
        records: the records, in order.

    Example:
        >>> write_records("results.json", [record("loss", 0.5, "nat")])
        >>> read_records("results.json")[0].value
        0.5
    """
    records = list(records)
    for item in records:
        if not isinstance(item, Record):
            raise TypeError(f"records holds a {type(item).__name__}: want only Record")
    text = json.dumps([dataclasses.asdict(item) for item in records], indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


@checked
def read_records(path: str | os.PathLike) -> list[Record]:
    """Read records written by `write_records`.

    Args:
        path: a JSON file holding a list of records.

    Returns:
        The records, equal to those written.

    Raises:
        ValueError: the file is not a list of records; the message names the entry and its fields.

    Example:
        >>> written = [record("loss", 0.5, "nat")]
        >>> write_records("results.json", written)
        >>> read_records("results.json") == written
        True
    """
    entries = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{Path(path).name} holds a {type(entries).__name__}: want a list")
    wanted = {field.name for field in dataclasses.fields(Record)}
    for index, entry in enumerate(entries):
        # A record that does not say whether anything was checked claims no check.
        differing = wanted ^ {"check", *entry} if isinstance(entry, dict) else wanted
        if differing:
            raise ValueError(
                f"{Path(path).name}, entry {index}: fields {', '.join(sorted(differing))} "
                "missing or unknown"
            )
    return [Record(**{**entry, "samples": tuple(entry["samples"])}) for entry in entries]


def environment() -> dict[str, Any]:
    """Facts about this process for a bug report or a record, nothing private.

    It has no host name, user name or folder. It starts jax's backend, so call `simulate_devices`
    first if needed.

    Returns:
        A dict: device (in words), platform, device_kind, device_count, cpu, cores, memory_bytes,
        system, python, versions (package -> version), commit, date, command.

    Example:
        >>> facts = environment()
        >>> facts["platform"], sorted(facts["versions"])[:3]
        ('...', ['flax', 'jax', 'jaxlib'])
    """
    devices = jax.devices()
    kind, count = devices[0].device_kind, len(devices)
    cpu, cores = cpu_name(), available_cores()
    simulated = f", {count} simulated devices" if count > 1 else ""
    return {
        "device": f"{cpu}, {cores} core{'s' * (cores != 1)}{simulated}"
        if devices[0].platform == "cpu"
        else f"{count} x {kind}",
        "platform": devices[0].platform,
        "device_kind": kind,
        "device_count": count,
        "cpu": cpu,
        "cores": cores,
        "memory_bytes": available_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
    }


def environment_rows() -> list[tuple[str, str]]:
    """`environment` as text, one line per fact.

    Returns:
        (name, text) pairs; versions on one line.

    Example:
        >>> dict(environment_rows())["versions"]
        'python 3..., jax ...'
    """
    facts = environment()
    facts["memory"] = in_words(facts.pop("memory_bytes"), "bytes")
    facts["versions"] = ", ".join(
        f"{name} {version}" for name, version in facts["versions"].items()
    )
    return [(name, str(value)) for name, value in facts.items()]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _commit() -> str:
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        # An installed copy may be inside another repository, so check that it is tracked.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        # Records change nothing that is measured, and several are written one after another.
        code = (":/", ":(top,exclude)data/experiments", ":(top,exclude)data/measurements")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown" if _ARCHIVED.startswith("$") else _ARCHIVED[:12]


def _command(arguments: list[str]) -> str:
    program, *rest = arguments or ["python"]
    if Path(program).name == "__main__.py":
        program = f"python -m {Path(program).parent.name}"
    # Folders go before quotes come, which would hide where a path begins.
    words = [_FOLDERS.sub("", program), *(shlex.quote(_FOLDERS.sub("", word)) for word in rest)]
    line = " ".join(words)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", line)
