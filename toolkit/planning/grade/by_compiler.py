"""Predictions graded by the TPU compiler: configurations, their record, their errors.

`libtpu` compiles for TPUs on any machine. Its figures for memory and bytes sent are compared with
those of `predict`. They are recorded one by one, so that an interrupted run resumes.
"""

import dataclasses
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from toolkit._files import json_object
from toolkit.looped import LoopedConfig
from toolkit.measure import collectives, in_words, program_cost
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import cluster
from toolkit.planning.grade.cases import COUNT, Case, cases, looped_cases, mixture_cases
from toolkit.planning.grade.program import train_program
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.search.plan import Plan
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.compiled_work import compiled_work
from toolkit.planning.time.timeline import timeline

# Collectives whose bytes depend on the data: compilers see full buffers, predictions an even load.
INEXACT = ("ragged-all-to-all",)
_NEEDED = re.compile(r"(?:required for [\w ]*\(|Used )(\d+(?:\.\d+)?)([KMG])")


def compiled(case: Case) -> dict[str, Any]:
    """Bytes of memory and bytes sent per chip, as compiled by libtpu."""
    start, config = time.perf_counter(), case.config
    devices = cluster(case.topology).devices()
    try:
        done = quickly_compiled(config, case.strategy, case.batch, case.length, devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return {"case": case.key, "error": str(error).splitlines()[0][:300]}
    cost, runs = program_cost(done), Counter()
    for found in collectives(done):
        runs[found.kind, found.group_size, found.bytes_sent] += found.count
    return {
        "case": case.key,
        "argument_bytes": cost.argument_bytes,
        "temporary_bytes": cost.temp_bytes,
        "resident_bytes": cost.resident_bytes,
        "peak_bytes": peak_bytes(done),
        "collectives": [[*kind, count] for kind, count in runs.items()],
        "seconds": round(time.perf_counter() - start, 1),
    }


def quickly_compiled(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, devices: list[Any]
) -> jax.stages.Compiled:
    """Compile a step without optimisation for speed: six times faster, with the same
    collectives."""
    program = train_program(config, strategy, batch=batch, sequence_length=length, devices=devices)
    effort = jax.config.jax_exec_time_optimization_effort  # pyright: ignore
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    try:
        return program.compile()
    finally:
        jax.config.update("jax_exec_time_optimization_effort", effort)


def peak_bytes(done: jax.stages.Compiled) -> int:
    """Peak memory of one chip. libtpu's temporaries do not all exist at once, and it refuses a
    program whose peak exceeds the chip's memory."""
    analysis: Any = done.memory_analysis()
    return analysis.peak_memory_in_bytes


def compile_plan(found: Plan) -> str:
    """Compile a plan's fastest strategy without stages for its TPUs and report both figures."""
    best = next((p for p in (found.best, *found.runners_up) if p.strategy.pipeline == 1), None)
    if best is None or not best.cluster.chip.name.startswith("TPU"):
        raise ValueError(
            f"chips: nothing to compile for {best.cluster.name if best else 'pipelines'}; want a "
            "TPU topology such as v5e:4x4, and a plan without pipeline stages"
        )
    peak, done = _compiled_peak(best, best.cluster.devices())
    verdict = "fits" if peak <= best.cluster.chip.memory_bytes else "does not fit"
    words = (
        f"compiled for {best.cluster.name}, {best.strategy}: {in_words(peak, 'bytes')} per chip, "
        f"{verdict}; predicted {in_words(best.memory.total, 'bytes')} "
        f"({best.memory.total / peak - 1:+.1%})"
    )
    if done is None:
        return f"{words}\nlibtpu refuses it; --verify compiles others until it finds what fits"
    work, chips = compiled_work(done), best.cluster.name
    half = in_words(timeline(work, chips, link_speed=0.5).step_seconds, "seconds")
    timed = f"its instructions in time, {timeline(work, chips)}"
    return f"{words}\n{timed}\nstep on links half as fast: {half}"


def _compiled_peak(found: Prediction, devices: list[Any]) -> tuple[int, jax.stages.Compiled | None]:
    """Peak memory of a plan's step as compiled, and the program; None where libtpu refuses it and
    says how much it would need."""
    try:
        done = quickly_compiled(
            found.config, found.strategy, found.batch, found.sequence_length, devices
        )
    except jax.errors.JaxRuntimeError as error:
        return needed_bytes(str(error)), None
    return peak_bytes(done), done


def needed_bytes(message: str) -> int:
    """Bytes that a program needs, from libtpu's message that a chip has fewer."""
    found = _NEEDED.search(message) if "RESOURCE_EXHAUSTED" in message else None
    if found is None:
        raise RuntimeError(f"libtpu does not compile it: {message.splitlines()[0][:300]}")
    return round(float(found[1]) * 2 ** (10 * (1 + "KMG".index(found[2]))))


def verify_plan(found: Plan, most: int = 3) -> str:
    """Compile a plan's fastest strategies without stages for their TPUs, and say which is fastest
    of those that fit as compiled; if none does, compile what computes more anew or takes the batch
    in more parts."""
    everyone = [each for each in (found.best, *found.runners_up) if each.strategy.pipeline == 1]
    if not everyone or not everyone[0].cluster.chip.name.startswith("TPU"):
        raise ValueError(
            "chips: nothing to compile; want a TPU topology, and a plan without stages"
        )
    devices, tried = everyone[0].cluster.devices(), []
    table = [("strategy", "predicted", "compiled", "error", "", "step")]

    def fits(each: Prediction) -> bool:
        peak, _ = _compiled_peak(each, devices)
        tried.append(each)
        is_held = peak <= each.cluster.chip.memory_bytes
        table.append((
            str(each.strategy), in_words(each.memory.total, "bytes"), in_words(peak, "bytes"),
            f"{each.memory.total / peak - 1:+.1%}", "fits" if is_held else "does not fit",
            in_words(each.step_seconds, "seconds"),
        ))  # fmt: skip
        return is_held

    fitting = [each for each in everyone[:most] if fits(each)]
    words = "as planned" if fitting[:1] == everyone[:1] else "re-ranked: faster ones do not fit"
    smaller = everyone[0]
    while not fitting and len(tried) < 2 * most:
        words = "repaired: none of the plans fits"
        if (smaller := _repaired(smaller)) is None:
            break
        fitting = [smaller] if fits(smaller) else []
    verdict = f"{fitting[0].strategy}, {words}" if fitting else "nothing fits as compiled"
    return f"{text_table(table, '<>>>>>')}\ncompiled for {devices_words(everyone[0])}: {verdict}"


def devices_words(found: Prediction) -> str:
    """The chips, with the memory that each has."""
    return f"{found.cluster.name} ({in_words(found.cluster.chip.memory_bytes, 'bytes')} per chip)"


def _repaired(found: Prediction) -> Prediction | None:
    """The same with more computed anew, or the batch in twice as many parts; None if there is no
    such plan."""
    strategy = found.strategy
    if strategy.recompute != "layer":
        changes: dict[str, Any] = {"recompute": "layer"}
    elif found.batch % (strategy.batch_shards * strategy.microbatches * 2) == 0:
        changes = {"microbatches": 2 * strategy.microbatches}
    else:
        return None
    changed = dataclasses.replace(strategy, **changes)
    sizes = {"batch": found.batch, "sequence_length": found.sequence_length}
    return predict(found.config, found.cluster, changed, constants=found.constants, **sizes)


def record_cases(path: Path, given: Iterable[Case], *, minutes: float) -> int:
    """Compile missing cases of the record for some minutes; returns the number of recorded
    cases."""
    if not 0 <= minutes <= 10_000:
        raise ValueError(f"minutes must lie in [0, 10000]; got {minutes}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(path)
    end = time.monotonic() + 60 * minutes
    for case in given:
        if case.key in rows or time.monotonic() > end:
            continue
        rows[case.key] = compiled(case)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[case.key]) + "\n")
    return len(rows)


def read_rows(path: Path, needed: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The record by case; empty if there is none."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            row = json_object(line, "the line")
            if missing := {"case", *needed} - {*row} - {*(needed if "error" in row else ())}:
                raise ValueError(f"no {', '.join(sorted(missing))}")
            found[row["case"]] = row
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"record {path}, line {len(found) + 1}: want what data/planning/README.md says; {error}"
        ) from None
    return found


def graded(path: Path, given: Sequence[Case] | None = None) -> list[dict[str, Any]]:
    """Every recorded case of those given (None: dense models), with the prediction and its
    error."""
    recorded, found = read_rows(path, ("peak_bytes", "collectives", "seconds")), []
    for case in cases() if given is None else given:
        row = recorded.get(case.key)
        if row is None or "error" in row:
            continue
        memory, sent = predicted(case)
        peak = row["peak_bytes"]
        compiled_sent = sum(
            sent * count for kind, _, sent, count in row["collectives"] if kind not in INEXACT
        )
        found.append(
            {
                "case": case.key,
                "memory": peak,
                "memory_error": memory / peak - 1,
                "sent": compiled_sent,
                "sent_error": sent / compiled_sent - 1 if compiled_sent else 0.0,
                "seconds": row["seconds"],
            }
        )
    return found


def predicted(case: Case) -> tuple[int, float]:
    """Bytes of memory and bytes sent, per chip, without those of `INEXACT` kinds."""
    found = predict(
        case.config, case.topology, case.strategy, batch=case.batch, sequence_length=case.length
    )
    sent = sum(each.total for each in found.transfers if each.kind not in INEXACT)
    return found.memory.total, sent


def score_memory(path: Path, bytes_of: Callable[[Case], float]) -> tuple[int, float]:
    """Judge the bytes per chip that any planner predicts for the compiled configurations of a
    record: how many, and the median of the relative errors."""
    rows = read_rows(path, ("peak_bytes",))
    given = (*cases(), *looped_cases(), *mixture_cases())
    errors = [
        abs(bytes_of(case) / rows[case.key]["peak_bytes"] - 1)
        for case in given
        if case.key in rows and "error" not in rows[case.key]
    ]
    return len(errors), statistics.median(errors)


def summary(rows: list[dict[str, Any]], count: int = COUNT) -> str:
    """Median and 95th percentile of the errors, in words."""
    lines = [f"{len(rows)} of {count} configurations compiled"]
    for what in ("memory", "sent"):
        errors = sorted(abs(row[f"{what}_error"]) for row in rows)
        if errors:
            high = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
            lines.append(
                f"{what}: median error {in_words(statistics.median(errors), 'share')}, "
                f"95th percentile {in_words(high, 'share')}"
            )
    return "\n".join(lines)


def grade_record(
    path: Path, minutes: float, *, cases_of: Callable[[], Sequence[Case]] = cases
) -> str:
    """Continue a record for some minutes; returns the table of errors and their summary."""
    given = cases_of()
    record_cases(path, given, minutes=minutes)
    start = time.perf_counter()
    rows = graded(path, given)
    each = (time.perf_counter() - start) / max(1, len(rows))
    table = [("configuration", "compiled", "memory", "sent")]
    for row in rows:
        errors = f"{row['memory_error']:+.1%}", f"{row['sent_error']:+.1%}"
        table.append((row["case"], in_words(row["memory"], "bytes"), *errors))
    words = f"{text_table(table, '<>>>')}\n{summary(rows, len(given))}"
    if not rows:
        return words
    took = statistics.median(row["seconds"] for row in rows)
    return (
        f"{words}\na prediction took {in_words(each, 'seconds')}, compiling "
        f"{in_words(took, 'seconds')} (median): {took / each:,.0f} times as long"
    )
