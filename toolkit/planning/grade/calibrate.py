"""The model's constants from measurements: what chips and links achieve, fitted to a file.

A file has one JSON object per line (or is one JSON list of them), all of one kind of chip:

    {"measured": "matmul", "chips": "h100:8", "flops": 1.1e12, "seconds": 0.0016}
    {"measured": "memory", "chips": "h100:8", "bytes": 1e9, "seconds": 0.00037}
    {"measured": "collective", "chips": "h100:8", "degree": 8, "bytes_sent": 1e8, "seconds": 0.0003}
    {"measured": "step", "chips": "h100:8", "model": "llama-3-8b", "strategy": {"fsdp": 8},
     "batch": 16, "sequence_length": 2048, "seconds": 1.9}

`bytes_sent` are those that one chip sends (`toolkit.measure.collectives` reads them); `inner`, 1
unless given, is how far apart the chips of a group are.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit._kinds import shown
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import cluster
from toolkit.planning.predict import predict
from toolkit.planning.strategy import MOST_CHIPS, Strategy
from toolkit.planning.time.step import Constants, transfer_seconds

# Name -> the range that is searched.
BOUNDS = {
    "matmul": (1e-3, 1.0),
    "memory": (1e-3, 1.0),
    "link": (1e-3, 1.0),
    "latency": (1e-3, 1e4),
    "slowdown": (1.0, 10.0),
}
MOST_ROWS, MOST_BYTES = 10_000, 1 << 24
# A constant that moves no prediction by a ten-thousandth is not determined.
LEAST_EFFECT = 1e-4

Model = Callable[[Constants], float]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants that fit measurements.

    Attributes:
        constants: for `predict`, `plan` and `timeline`.
        fitted: names of those that the measurements determine; the others are the defaults.
        chip: the chip's name.
        count: measurements.
        error_before, error_after: median relative error with the defaults, and with these.

    Example:
        >>> from pathlib import Path
        >>> row = '{"measured": "memory", "chips": "v5e:1", "bytes": 8.1e11, "seconds": 2.0}'
        >>> _ = Path("measured.jsonl").write_text(row)
        >>> found = calibrate("measured.jsonl")
        >>> found.fitted, found.chip, found.count
        (('memory',), 'TPU v5e', 1)
    """

    constants: Constants
    fitted: tuple[str, ...]
    chip: str
    count: int
    error_before: float
    error_after: float

    def __str__(self) -> str:
        rows = [("constant", "default", "fitted")]
        for name, default in dataclasses.asdict(Constants()).items():
            value = getattr(self.constants, name)
            rows.append((name, f"{default:.3g}", f"{value:.3g}" if name in self.fitted else "–"))
        before, after = (in_words(e, "share") for e in (self.error_before, self.error_after))
        return (
            f"{self.chip}: {self.count} measurements; median error {before} before, {after} after\n"
            f"{text_table(rows, '<>>')}"
        )


@checked
def calibrate(path: str | os.PathLike[str]) -> Calibration:
    """Fits what chips and links achieve to measurements.

        min over constants of sum (log predicted / measured)^2

    Args:
        path: a file of measurements, one JSON object per line;
            `toolkit/planning/grade/calibrate.py` opens with an example of each kind.

    Returns:
        A `Calibration`; its `constants` are what `predict`, `plan` and `timeline` take.

    Raises:
        ValueError: no such file, or a line that is not a measurement; one line that says which.

    Cost:
        Milliseconds per measurement; whole steps are predicted some tens of times each.

    Example:
        >>> from pathlib import Path
        >>> row = '{"measured": "matmul", "chips": "v5e:1", "flops": 1.97e14, "seconds": 2.0}'
        >>> _ = Path("measured.jsonl").write_text(row)
        >>> round(calibrate("measured.jsonl").constants.matmul, 3)
        0.5
    """
    from scipy.optimize import least_squares

    chip, models, measured = _read(Path(path))
    logs = np.log(measured)

    def errors(values, names):
        constants = dataclasses.replace(
            Constants(), **dict(zip(names, np.exp(values), strict=True))
        )
        return np.log([model(constants) for model in models]) - logs

    start = {name: math.log(getattr(Constants(), name)) for name in BOUNDS}
    before = errors([*start.values()], [*start])
    names = [name for name in BOUNDS if _effect(errors, start[name], name, before) > LEAST_EFFECT]
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip([start[name] for name in names], low + 1e-6, high - 1e-6)
    found = least_squares(errors, first, bounds=(low, high), args=(names,), xtol=1e-12, ftol=1e-12)
    values = np.clip(np.exp(found.x), *(np.exp(side) for side in (low, high)))
    constants = dataclasses.replace(
        Constants(), **{name: float(value) for name, value in zip(names, values, strict=True)}
    )
    return Calibration(
        constants, tuple(names), chip, len(models), _median(before), _median(found.fun)
    )


def _effect(errors, start: float, name: str, before) -> float:
    """By how much predictions move when a constant moves by a twentieth."""
    moved = start + (0.05 if name in ("latency", "slowdown") else -0.05)
    return float(np.abs(errors([moved], [name]) - before).max())


def _median(errors) -> float:
    return statistics.median(abs(math.expm1(error)) for error in errors)


def _read(path: Path) -> tuple[str, list[Model], list[float]]:
    """The chip, what predicts each measurement, and the seconds measured."""
    rows = _rows(path)
    chips, models, seconds = set(), [], []
    for where, row in rows:
        kind = row.get("measured")
        if kind not in _KINDS:
            raise ValueError(
                f"{where}: measured must be one of {', '.join(_KINDS)}; got {shown(kind)}"
            )
        build, numbers, others = _KINDS[kind]
        known = {"measured", "chips", "seconds", *numbers, *others}
        if unknown := sorted(set(row) - known):
            raise ValueError(f"{where}: {unknown[0]} is not a field of {kind!r}")
        values = {name: _positive(where, row, name) for name in ("seconds", *numbers)}
        if not isinstance(row.get("chips"), str):
            raise ValueError(
                f"{where}: chips must be such as 'h100:8'; got {shown(row.get('chips'))}"
            )
        try:
            found = cluster(row["chips"])
            model = build(found, row, values)
            model(Constants())
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
        chips.add(found.chip.name)
        models.append(model)
        seconds.append(values["seconds"])
    if len(chips) > 1:
        raise ValueError(
            f"path {path}: measurements of one kind of chip; got {', '.join(sorted(chips))}"
        )
    return chips.pop(), models, seconds


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"path {path}: at most {in_words(MOST_BYTES, 'bytes')}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"path {path}: cannot be read as text ({type(error).__name__})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        if text.lstrip().startswith("["):
            rows = [(f"measurement {at}", row) for at, row in enumerate(json.loads(text), 1)]
        else:
            rows = []
            for number, line in lines:
                rows.append((f"line {number}", json.loads(line)))
    except (ValueError, RecursionError) as error:
        at = f"line {lines[len(rows)][0]}" if not text.lstrip().startswith("[") else "the list"
        raise ValueError(f"path {path}, {at}: not JSON ({str(error).splitlines()[0]})") from None
    if not 1 <= len(rows) <= MOST_ROWS:
        raise ValueError(f"path {path}: want 1 to {MOST_ROWS:,} measurements; got {len(rows):,}")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"path {path}, {where}: want an object; got {shown(row)}")
    return [(f"path {path}, {where}", row) for where, row in rows]


def _positive(where: str, row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ValueError(f"{where}: {name} must be a positive number; got {shown(value)}")
    return float(value)


def _matmul(where, _, values) -> Model:
    alone = values["flops"] / where.chip.flops_per_second
    return lambda constants: alone / constants.matmul


def _memory(where, _, values) -> Model:
    alone = values["bytes"] / where.chip.bytes_per_second
    return lambda constants: alone / constants.memory


def _collective(where, row, values) -> Model:
    degree, inner = values["degree"], row.get("inner", 1)
    for name, value, low in (("degree", degree, 2), ("inner", inner, 1)):
        is_whole = isinstance(value, int | float) and value == value // 1
        if isinstance(value, bool) or not is_whole or not low <= value <= MOST_CHIPS:
            raise ValueError(f"{name} must be a whole number from {low}; got {shown(value)}")
    if degree * inner > where.chips:
        raise ValueError(f"degree {degree:g} x inner {inner:g} is more than {where.chips} chips")
    link = where.link(int(inner), int(degree))
    return lambda constants: transfer_seconds(link, values["bytes_sent"], int(degree), constants)


def _step(where, row, values) -> Model:
    for name, kind in (("model", str), ("strategy", dict)):
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{name} must be a {kind.__name__}; got {shown(row.get(name))}")
    strategy = Strategy(**row["strategy"])
    sizes = {name: int(values[name]) for name in ("batch", "sequence_length")}
    foretold = functools.partial(predict, row["model"], where.name, strategy, **sizes)
    return lambda constants: foretold(constants=constants).step_seconds


# What is measured -> what predicts it, its fields that are numbers, its other fields.
_KINDS: dict[Any, tuple[Callable[..., Model], tuple[str, ...], tuple[str, ...]]] = {
    "matmul": (_matmul, ("flops",), ()),
    "memory": (_memory, ("bytes",), ()),
    "collective": (_collective, ("bytes_sent", "degree"), ("inner",)),
    "step": (_step, ("batch", "sequence_length"), ("model", "strategy")),
}
