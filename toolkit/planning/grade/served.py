"""Predictions of decoding graded by published deployments.

`data/planning/served.jsonl` has one published figure per line; `data/planning/README.md` says what
its columns mean. The rates of kernels are those that their authors publish; the time that a layer
takes beside them and what overlapping loses are fitted to the deployments, and every source is also
predicted with constants to which its own rows did not contribute.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import Cluster
from toolkit.planning.decode.cuts import pure_degrees
from toolkit.planning.decode.latent import decode_cost
from toolkit.planning.decode.mixtures import MixtureCost, mixture_cost
from toolkit.planning.decode.rates import SERVED
from toolkit.planning.grade.figures import read_rows
from toolkit.planning.grade.fit import median_error
from toolkit.planning.grade.published import cluster_of
from toolkit.planning.models import model_of
from toolkit.planning.time.seconds import Constants

MOST_ROWS = 1 << 16  # of a chip, where the batch is what a speed allows


class Served(NamedTuple):
    """A published deployment.

    Attributes:
        row: its columns.
        figure: tokens per second and chip, or a ratio of two throughputs.
    """

    row: Mapping[str, Any]
    figure: float

    def predicted(self, rates: Constants) -> float:
        """The same figure, as modelled."""
        if "speedup" in self.row:
            tokens = [_latent_throughput(self.row, *way) for way in (("replicate", 1), ("tpla", 0))]
            return tokens[1] / tokens[0]
        if "batch_per_chip" in self.row:
            return _step(self.row, self.row["batch_per_chip"], rates).tokens_per_second / _chips(
                self.row
            )
        wanted = self.row["tokens_per_second_per_row"]

        def per_row(batch: int) -> float:
            return _step(self.row, batch, rates).tokens_per_second / _chips(self.row) / batch

        low, high = 1, MOST_ROWS  # rows of a chip: fewer get more
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if per_row(middle) >= wanted else (low, middle)
        return low * wanted


def _chips(row: Mapping[str, Any]) -> int:
    return _where(row).chips


def _where(row: Mapping[str, Any]) -> Cluster:
    kind, _, count = row["chips"].partition(":")
    return cluster_of({**row, "chip": kind, "chips": int(count), "slices": 1})  # theirs: of latents


def _step(row: Mapping[str, Any], batch_per_chip: int, rates: Constants) -> MixtureCost:
    """One step of a deployment that cuts attention by rows and spreads experts over all chips."""
    where = _where(row)
    how = {name: row[name] for name in ("drafted", "accepted") if name in row}
    return mixture_cost(
        model_of(row["model"]), batch_per_chip * where.chips, row["context"], where,
        scheme="data", slices=1, degrees=pure_degrees("data", where.chips),
        redundant=row["redundant"], overlap=row["overlap"], weights=row["weights"],
        cache=row["cache"], rates=rates, **how,
    )  # fmt: skip


def _latent_throughput(row: Mapping[str, Any], scheme: str, slices: int) -> float:
    """Tokens per second of attention alone with the most rows that fit."""
    how: dict[str, Any] = {"scheme": scheme, "slices": slices or row["slices"]}
    how |= {"other_parameters": 0.0}
    single = decode_cost(row["model"], 1, row["context"], row["chips"], **how)
    memory = _where(row).chip.memory_bytes
    layers = single.memory_bytes / (single.weight_bytes + single.cache_bytes)
    batch = int((memory / layers - single.weight_bytes) / single.cache_bytes)
    return batch / decode_cost(row["model"], batch, row["context"], row["chips"], **how).seconds


def served_rows(path: Path) -> list[Served]:
    """The rows of a file of published deployments."""

    def figure(row: Mapping[str, Any]) -> float:
        return row["speedup"] if "speedup" in row else row["tokens_per_second_per_chip"]

    return [Served(row, figure(row)) for row in read_rows(path, figure)]


def fit_served(rows: Sequence[Served], without: str = "") -> Constants:
    """What layers take beside their kernels and what overlapping loses, from all sources but one;
    every source weighs the same."""
    from scipy.optimize import least_squares

    mine = [each for each in rows if "speedup" not in each.row and each.row["source"] != without]
    count = {each.row["source"]: 0 for each in mine}
    for each in mine:
        count[each.row["source"]] += 1

    def constants(values: Sequence[float]) -> Constants:
        return dataclasses.replace(SERVED, launch=values[0] * 1e-3, slowdown=values[1])

    def misses(values: Sequence[float]) -> list[float]:
        rates = constants(values)
        return [
            math.log(each.predicted(rates) / each.figure) / math.sqrt(count[each.row["source"]])
            for each in mine
        ]

    start = [SERVED.launch * 1e3, SERVED.slowdown]
    found = least_squares(misses, start, bounds=([0, 1], [10, 2]), diff_step=1e-2)
    return constants(found.x.tolist())


def grade_served(path: Path) -> str:
    """Every row with the constants that users get, and with constants to which its source did not
    contribute; then the errors by source."""
    rows = served_rows(path)
    table = [("source", "where", "published", "predicted", "error", "held out")]
    apart: dict[str, list[float]] = {}
    for source in dict.fromkeys(each.row["source"] for each in rows):
        own = [each for each in rows if each.row["source"] == source]
        rates = fit_served(rows, source)
        for each in own:
            usual, left = each.predicted(SERVED), each.predicted(rates)
            apart.setdefault(source, []).append(math.log(left / each.figure))
            table.append((
                source, each.row["where"][:44], f"{each.figure:.4g}", f"{usual:.4g}",
                f"{usual / each.figure - 1:+.1%}", f"{left / each.figure - 1:+.1%}",
            ))  # fmt: skip
    lines = [text_table(table, "<<>>>>")]
    lines += [
        f"{source}: {len(errors)} rows, median error {in_words(median_error(errors), 'share')} "
        "held out"
        for source, errors in apart.items()
    ]
    lines.append(
        "tokens/s per chip, or a ratio of two throughputs. Held out: constants fitted to the other "
        "sources. Modelled; published figures are recorded"
    )
    return "\n".join(lines)
