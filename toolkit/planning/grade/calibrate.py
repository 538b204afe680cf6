"""The model's constants fitted to a file of measurements.

Every constant has a prior. Only those are fitted that the measurements determine better than the
prior does.

A file has one JSON object per line (or is one JSON list of them), all of one kind of chip:

    {"measured": "matmul", "chips": "h100:8", "flops": 1.1e12, "seconds": 0.0016}
    {"measured": "memory", "chips": "h100:8", "bytes": 1e9, "seconds": 0.00037}
    {"measured": "collective", "chips": "h100:8", "degree": 8, "bytes_sent": 1e8, "seconds": 0.0003}
    {"measured": "step", "chips": "h100:8", "model": "llama-3-8b", "strategy": {"fsdp": 8},
     "batch": 16, "sequence_length": 2048, "seconds": 1.9}

A `model` is a name, or the fields of a `LoopedConfig` as an object. `bytes_sent` is per chip
(`toolkit.measure.collectives` reads it); `inner`, by default 1, is the distance between the chips
of a group.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit._files import bounded_json
from toolkit._kinds import shown
from toolkit.looped import LoopedConfig
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import cluster
from toolkit.planning.division import MOST_CHIPS
from toolkit.planning.grade.fit import (
    BOUNDS,
    NOISE,
    STEP_NOISE,
    Model,
    Row,
    errors,
    fit,
    median_error,
)
from toolkit.planning.models import model_of
from toolkit.planning.predict import predict
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.seconds import Constants, constants_of
from toolkit.planning.time.step import transfer_seconds

MOST_FOLDS = 20  # cross-validation folds, at most
MOST_ROWS, MOST_BYTES = 10_000, 1 << 24


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants that fit measurements.

    Attributes:
        constants: for `predict`, `plan` and `timeline`.
        prior: the chip's constants without these measurements.
        fitted: names of constants that the measurements determine; the others have defaults.
        chip: the chip's name.
        count: number of measurements.
        error_before, error_after: median relative error with the defaults, and with these
            constants.
        error_left_out: median relative error in cross-validation (leave-one-out, or 20 folds for
            many rows); None for one row.

    Example:
        >>> from pathlib import Path
        >>> row = '{"measured": "memory", "chips": "v5e:1", "bytes": 8.1e11, "seconds": 2.0}'
        >>> _ = Path("measured.jsonl").write_text(row)
        >>> found = calibrate("measured.jsonl")
        >>> found.fitted, found.chip, found.count
        (('memory',), 'TPU v5e', 1)
    """

    constants: Constants
    prior: Constants
    fitted: tuple[str, ...]
    chip: str
    count: int
    error_before: float
    error_after: float
    error_left_out: float | None

    def __str__(self) -> str:
        rows = [("constant", "default", "fitted")]
        for name in BOUNDS:
            default = getattr(self.prior, name)
            value = getattr(self.constants, name)
            rows.append((name, f"{default:.3g}", f"{value:.3g}" if name in self.fitted else "–"))
        before, after = (in_words(e, "share") for e in (self.error_before, self.error_after))
        words = f"{before} before, {after} after"
        if self.error_left_out is not None:
            words += f", {in_words(self.error_left_out, 'share')} on rows left out"
            if self.error_left_out > self.error_before:
                words += "; they do not carry over: the defaults are nearer"
        table = text_table(rows, "<>>")
        return f"{self.chip}: {self.count} measurements; median error {words}\n{table}"


@checked
def calibrate(path: str | os.PathLike[str]) -> Calibration:
    """Fit the constants of the model of time to measurements.

        min over constants of sum (log predicted / measured)^2 / noise^2
                            + sum (log constant / default)^2 / spread^2

    Defaults are the chip's, fitted to published step times where there are any. A constant that the
    measurements determine less well than its prior keeps its default.

    Args:
        path: a file of measurements, one JSON object per line;
            `toolkit/planning/grade/calibrate.py` opens with an example of each kind.

    Returns:
        A `Calibration`; pass its `constants` to `predict`, `plan` and `timeline`.

    Source: Bishop, "Pattern Recognition and Machine Learning", 2006, section 3.3 (a Gaussian
        prior); Stone, "Cross-validatory choice and assessment of statistical predictions", 1974.

    Example:
        >>> from pathlib import Path
        >>> row = '{"measured": "matmul", "chips": "v5e:1", "flops": 1.97e14, "seconds": 2.0}'
        >>> _ = Path("measured.jsonl").write_text(row)
        >>> round(calibrate("measured.jsonl").constants.matmul, 2)
        0.5
    """
    chip, prior, rows = _read(Path(path))
    constants, fitted = fit(rows, prior)
    folds = min(len(rows), MOST_FOLDS)
    left_out: list[float] = []
    for fold in range(folds if len(rows) > 1 else 0):
        others, _ = fit([row for at, row in enumerate(rows) if at % folds != fold], prior)
        left_out.extend(errors(rows[fold::folds], others))
    before, after = (median_error(errors(rows, each)) for each in (prior, constants))
    left = median_error(left_out) if left_out else None
    return Calibration(constants, prior, fitted, chip, len(rows), before, after, left)


def _read(path: Path) -> tuple[str, Constants, list[Row]]:
    """Read the chip, its constants so far, and the measurements."""
    chips, found_rows = {}, []
    for where, row in _rows(path):
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
        chips[found.chip.name] = constants_of(found, None)
        noise = STEP_NOISE if kind == "step" else NOISE
        found_rows.append(Row(model, values["seconds"], noise))
    if len(chips) > 1:
        raise ValueError(
            f"path {path}: measurements of one kind of chip; got {', '.join(sorted(chips))}"
        )
    return *chips.popitem(), found_rows


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"path {path}: at most {in_words(MOST_BYTES, 'bytes')}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"path {path}: cannot be read as text ({type(error).__name__})") from None
    if text.lstrip().startswith("["):
        found = bounded_json(text, f"path {path}, the list,")
        rows = [(f"measurement {at}", row) for at, row in enumerate(found, 1)]
    else:
        rows = [
            (f"line {number}", bounded_json(line, f"path {path}, line {number},"))
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
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
    model = row.get("model")
    if not isinstance(model, str | dict):
        raise ValueError(f"model must be a name or an object of fields; got {shown(model)}")
    if not isinstance(row.get("strategy"), dict):
        raise ValueError(f"strategy must be an object of fields; got {shown(row.get('strategy'))}")
    config = model_of(LoopedConfig(**model) if isinstance(model, dict) else model)
    strategy = Strategy(**row["strategy"])
    sizes = {name: int(values[name]) for name in ("batch", "sequence_length")}
    foretold = functools.partial(predict, config, where.name, strategy, **sizes)
    return lambda constants: foretold(constants=constants).step_seconds


# Kind of measurement -> its prediction, its numeric fields, its other fields.
_KINDS: dict[Any, tuple[Callable[..., Model], tuple[str, ...], tuple[str, ...]]] = {
    "matmul": (_matmul, ("flops",), ()),
    "memory": (_memory, ("bytes",), ()),
    "collective": (_collective, ("bytes_sent", "degree"), ("inner",)),
    "step": (_step, ("batch", "sequence_length"), ("model", "strategy")),
}
