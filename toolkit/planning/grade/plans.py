"""Plans of the search graded by the TPU compiler: does what fits as predicted fit as compiled?"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import cluster
from toolkit.planning.grade.by_compiler import predicted, read_rows, record_cases
from toolkit.planning.grade.cases import Case
from toolkit.planning.search.plan import plan
from toolkit.planning.strategy import Strategy

PLANNED = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3-8b")
PLANNED_FOR = ("v5e:2x2", "v5e:4x4", "v6e:4x4", "v5p:2x2x1")
PLANS = 20


def planned_cases() -> Iterator[Case]:
    """The configurations, planned one by one."""
    found = 0
    sizes = ((1, 2048), (4, 4096), (8, 2048))  # sequences per chip, tokens
    for (rows, length), name, model in itertools.product(sizes, PLANNED_FOR, PLANNED):
        batch = rows * cluster(name).chips
        try:
            plans = plan(model, name, batch=batch, sequence_length=length)
        except ValueError:  # nothing fits
            continue
        best = next(
            (each for each in (plans.best, *plans.runners_up) if each.strategy.pipeline == 1), None
        )
        if best is not None and found < PLANS:
            found += 1
            yield Case(model, name, best.strategy, batch, length)


def record_plans(path: Path, minutes: float) -> None:
    """Compile missing plans of the record for some minutes."""

    def missing() -> Iterator[Case]:
        for case in planned_cases():
            yield case
            rows = read_rows(path)
            if case.key in rows and "strategy" not in rows[case.key]:
                rows[case.key] |= dataclasses.asdict(case)
                path.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))

    record_cases(path, missing(), minutes=minutes)


def graded_plans(path: Path) -> list[dict[str, Any]]:
    """Every recorded plan: whether it fits as predicted now and as compiled, and the prediction's
    error. Plans that do not fit as predicted now were made by an earlier model."""
    found = []
    for row in read_rows(path, ("peak_bytes", "strategy", "model", "topology")).values():
        if "error" in row:
            outcome = {"fits": False, "memory": None, "memory_error": None}
            found.append({"case": row["case"], "is_planned": True, **outcome})
            continue
        strategy = Strategy(**row["strategy"])
        case = Case(row["model"], row["topology"], strategy, row["batch"], row["length"])
        peak, expected = row["peak_bytes"], predicted(case)[0]
        limit = cluster(case.topology).chip.memory_bytes
        found.append(
            {
                "case": row["case"],
                "is_planned": expected <= limit,
                "fits": peak <= limit,
                "memory": peak,
                "memory_error": expected / peak - 1,
            }
        )
    return found


def grade_plans(path: Path, minutes: float) -> str:
    """Continue a record of plans for some minutes; returns its table and a summary."""
    if minutes:
        record_plans(path, minutes)
    rows = graded_plans(path)
    table = [("plan", "compiled", "", "predicted", "")]
    verdict = {True: "fits", False: "does not fit"}
    for row in rows:
        is_told = row["memory"] is not None
        peak = in_words(row["memory"], "bytes") if is_told else "does not compile"
        error = f"{row['memory_error']:+.1%}" if is_told else ""
        table.append((row["case"], peak, verdict[row["fits"]], error, verdict[row["is_planned"]]))
    planned = [row["fits"] for row in rows if row["is_planned"]]
    return (
        f"{text_table(table, '<><><')}\n"
        f"{sum(planned)} of {len(planned)} plans that fit as predicted fit as compiled"
    )
