"""Plans graded by the TPU compiler: what the planner says fits, compiled by libtpu, fits.

Each configuration is what `plan` found fastest without pipeline stages. The record keeps the
strategy, so that it stays readable when the planner learns better.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import cluster
from toolkit.planning.grade import Case, predicted, read_rows, record_cases
from toolkit.planning.plan import plan
from toolkit.planning.strategy import Strategy

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3-8b")
TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v6e:4x4", "v5p:2x2x1")
COUNT = 20


def planned_cases() -> Iterator[Case]:
    """The configurations, planned one by one."""
    found = 0
    sizes = ((1, 2048), (4, 4096), (8, 2048))  # sequences per chip, tokens
    for (rows, length), name, model in itertools.product(sizes, TOPOLOGIES, MODELS):
        batch = rows * cluster(name).chips
        try:
            plans = plan(model, name, batch=batch, sequence_length=length)
        except ValueError:  # nothing fits
            continue
        best = next(
            (each for each in (plans.best, *plans.runners_up) if each.strategy.pipeline == 1), None
        )
        if best is not None and found < COUNT:
            found += 1
            yield Case(model, name, best.strategy, batch, length)


def record_plans(path: Path, minutes: float) -> None:
    """Compiles plans that the record does not have yet, for so many minutes."""

    def told() -> Iterator[Case]:
        for case in planned_cases():
            yield case
            rows = read_rows(path)
            if case.key in rows and "strategy" not in rows[case.key]:
                rows[case.key] |= dataclasses.asdict(case)
                path.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))

    record_cases(path, told(), minutes=minutes)


def graded_plans(path: Path) -> list[dict[str, Any]]:
    """Every recorded plan: whether it fits as compiled, and by how much the prediction is off."""
    found = []
    for row in read_rows(path).values():
        if "error" in row:
            found.append({"case": row["case"], "fits": False, "memory": None, "memory_error": None})
            continue
        strategy = Strategy(**row["strategy"])
        case = Case(row["model"], row["topology"], strategy, row["batch"], row["length"])
        held = row["resident_bytes"]
        limit = cluster(case.topology).chip.memory_bytes
        error = predicted(case)[0] / held - 1
        found.append(
            {"case": row["case"], "fits": held <= limit, "memory": held, "memory_error": error}
        )
    return found


def grade_plans(path: Path, minutes: float) -> str:
    """Goes on with a record of plans for so many minutes; its table, and a summary."""
    if not 0 <= minutes <= 10_000:
        raise ValueError(f"minutes must lie in [0, 10000]; got {minutes}")
    if minutes:
        record_plans(path, minutes)
    rows = graded_plans(path)
    table = [("plan", "compiled", "", "predicted")]
    for row in rows:
        is_told = row["memory"] is not None
        held = in_words(row["memory"], "bytes") if is_told else "does not compile"
        error = f"{row['memory_error']:+.1%}" if is_told else ""
        table.append((row["case"], held, "fits" if row["fits"] else "does not fit", error))
    fitting = sum(row["fits"] for row in rows)
    return f"{text_table(table, '<><>')}\n{fitting} of {len(rows)} plans fit as compiled"
