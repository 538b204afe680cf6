"""Predictions graded by published step times: the rows, what of them is modelled, the scoreboard.

`data/planning/published.jsonl` has one published figure per line; `data/planning/README.md` says
what its columns mean. Rows of one source on one kind of chip form a group. Constants are fitted per
chip, and every group is also predicted with constants to which its own rows did not contribute:
those of the chip's other groups, or, if there are none, of other chips of its kind.
"""

import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from toolkit.looped import LoopedConfig, active_parameter_count
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.grade.figures import flops_per_token, published_seconds, read_rows
from toolkit.planning.grade.fit import STEP_NOISE, Row, fit, median_error
from toolkit.planning.memory.gpus import GIB, gpu_peak
from toolkit.planning.memory.sizes import share_of
from toolkit.planning.models import model_of, nearest_multiple
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.strategy import SCHEDULES, Strategy
from toolkit.planning.time.seconds import Constants, constants_of

# What is computed anew, in the words of `Strategy`. "offload" keeps part of a layer on the host.
RECOMPUTED = {
    "none": "none", "selective": "elementwise", "dots": "elementwise", "full": "layer",
    "offload": "layer",
}  # fmt: skip
# Seconds of a layer's forward pass that programs which are not compiled take at least, on Hopper's
# hosts: chosen on nanotron's rows of 3 billion parameters, and judged by the others.
HOST = {"nanotron": 1.45e-3}
ROBUST, TOLERANCE = "soft_l1", 1e-4
FEW = 5  # rows below which a rank correlation says nothing


class Published(NamedTuple):
    """A published step that the planner models.

    Attributes:
        number: line of the file, from 1.
        row: its columns.
        prediction: of the same step.
        seconds: published.
    """

    number: int
    row: Mapping[str, Any]
    prediction: Prediction
    seconds: float

    @property
    def group(self) -> tuple[str, str]:
        """Source and chip."""
        return self.row["source"], self.prediction.cluster.chip.name

    def predicted(self, constants: Constants) -> float:
        """Seconds of the step with other constants."""
        kernels = self.row.get("attention", constants.attention_kernels)
        host = HOST.get(self.row["source"], constants.host)
        constants = dataclasses.replace(constants, attention_kernels=kernels, host=host)
        return dataclasses.replace(self.prediction, constants=constants).step_seconds

    @property
    def measurement(self) -> Row:
        """The same for `fit`."""
        return Row(self.predicted, self.seconds, STEP_NOISE, self.row["source"])


def read_published(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of published steps."""
    return read_rows(path, published_seconds)


def modelled(row: Mapping[str, Any], number: int = 1) -> Published:
    """A row as the planner models it; a ValueError says why it does not."""
    layout, is_float8 = row["layout"], row["precision"] == "fp8"
    shards, replicas = layout.get("fsdp", 1), layout.get("data", 1)
    if layout.get("zero"):  # gradients are cut, and parameters gathered once per step
        shards, replicas = 1, shards * replicas
    strategy = Strategy(
        data=replicas,
        fsdp=shards,
        tensor=layout.get("tensor", 1),
        pipeline=layout.get("pipeline", 1),
        context=layout.get("context", 1),
        expert=layout.get("expert", 1),
        dispatch=layout.get("dispatch", "all_to_all"),
        overlapped=layout.get("overlapped", ""),
        summed=layout.get("summed", "float32"),
        capacity=1.0,  # none of the sources drops tokens
        products="float8" + "-rows" * ("scaled" in row) if is_float8 else "bfloat16",
        shard_optimizer="zero" in layout,
        recompute=RECOMPUTED[row["recompute"]],
        microbatches=row["microbatches"],
        **_schedule(row),
    )
    config, where = _config(row["model"], strategy.tensor), cluster_of(row)
    square = share_of((((config.width, config.width), None),), strategy)
    if strategy.for_parameters.fsdp > 1 and square.kept == square.used:
        raise ValueError(f"FSDP {strategy.fsdp} divides no dimension")
    if strategy.shard_optimizer and strategy.data > 1 and square.moment == square.kept:
        raise ValueError(f"ZeRO over {strategy.data} divides no dimension")
    sizes = {"batch": row["batch"], "sequence_length": row["sequence_length"]}
    found = predict(config, where, strategy, **sizes)
    return Published(number, row, found, published_seconds(row))


def _schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    """The order of a pipeline's tasks; with fewer chunks if there are fewer layers than stages."""
    pipeline, chunks = row["layout"].get("pipeline", 1), row["layout"].get("virtual", 1)
    if name := row["layout"].get("schedule"):
        return {"schedule": name, "chunks": SCHEDULES[name]}
    if stages := row["layout"].get("stages"):
        return {"stages": tuple(stages)}
    while chunks * pipeline > row["model"]["layers"]:
        chunks //= 2
    return {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}


def _config(model: Mapping[str, Any], tensor: int) -> LoopedConfig:
    if "experts" in model:
        return model_of(model["name"])
    # A layer without a gate has two products, and SwiGLU three, of two thirds the size.
    hidden = (
        model["hidden"] if model["gated"] else nearest_multiple(2 * model["hidden"] / 3, tensor)
    )
    own = {name: model[name] for name in ("key_value_heads", "head_size")}
    return LoopedConfig(
        vocabulary=model["vocabulary"],
        width=model["width"],
        pattern=" ".join(["full"] * model["layers"]),
        heads=model["heads"],
        feed_forward=hidden,
        options={"full": own},
        residual_gate=False,
        tied_embedding=model["tied"],
        dtype="bfloat16",
    )


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """The chips, with the memory and the network that the source names, if not the usual ones."""
    slices = row.get("slices", 1)
    where = cluster(f"{slices}*" * (slices > 1) + f"{row['chip']}:{row['chips'] // slices}")
    chip = where.chip
    if "memory_rate" in row:
        chip = dataclasses.replace(chip, bytes_per_second=row["memory_rate"])
    if "network" in row:
        *near, last = chip.links
        links = (*near, dataclasses.replace(last, bytes_per_second=row["network"]))
        chip = dataclasses.replace(chip, links=links)
    return dataclasses.replace(where, chip=chip)


@functools.cache
def graded_rows(path: Path) -> tuple[tuple[Published, ...], Counter[tuple[str, str, str]]]:
    """The rows that are modelled, and how many of each group are not, by reason."""
    found, refused = [], Counter()
    for number, row in enumerate(read_published(path), 1):
        try:
            found.append(modelled(row, number))
        except ValueError as error:
            chip = cluster(f"{row['chip']}:1").chip.name
            refused[row["source"], chip, str(error).partition(";")[0]] += 1
    return tuple(found), refused


def prior_of(chip: str) -> Constants:
    """Constants of a chip before any row: its matrix unit is kept busier by a TPU's compiler."""
    tpu = Constants(matmul=0.9, grouped=0.8, elementwise=0.8)
    return tpu if chip.startswith("TPU") else Constants()


def fit_chip(rows: Sequence[Published], chip: str, without: str = "") -> Constants:
    """Constants of a chip from its published steps, without one source; from those of other chips
    of its kind if none are left. No row of float8 products, nor of a program whose host is in the
    way, is among them: these judge what the model says of casts and hosts."""
    is_tpu = chip.startswith("TPU")
    rows = [
        each for each in rows if each.row["precision"] != "fp8" and each.row["source"] not in HOST
    ]
    others = [each for each in rows if each.group[1] == chip and each.group[0] != without]
    if not others:
        others = [
            each
            for each in rows
            if each.group[1] != chip and each.group[1].startswith("TPU") == is_tpu
        ]
    measurements = [each.measurement for each in others]
    return fit(measurements, prior_of(chip), loss=ROBUST, tolerance=TOLERANCE)[0]


class Score(NamedTuple):
    """How a group's predictions agree with its published figures.

    Attributes:
        rows: how many.
        error: median relative error of step times.
        rank: Spearman's correlation of predicted and published utilisation; NaN of few rows.
    """

    rows: int
    error: float
    rank: float


def score(rows: Sequence[Published], predicted: Sequence[float]) -> Score:
    """Judge the seconds that any planner predicts for some of `graded_rows`, row by row."""
    from scipy.stats import spearmanr

    misses = [math.log(a / each.seconds) for a, each in zip(predicted, rows, strict=True)]
    rank = math.nan
    if len(rows) >= FEW:
        work = [_work(each) for each in rows]
        ours = [w / a for w, a in zip(work, predicted, strict=True)]
        true = [w / each.seconds for w, each in zip(work, rows, strict=True)]
        rank = float(spearmanr(ours, true).statistic)  # pyright: ignore
    return Score(len(rows), median_error(misses), rank)


def _work(each: Published) -> float:
    """FLOPs of a step per chip, up to a factor that is the same for one kind of chip."""
    model, length = each.row["model"], each.row["sequence_length"]
    if "experts" in model:
        flops = 6.0 * active_parameter_count(each.prediction.config)
    else:
        flops = flops_per_token(model, length, "6N + 6LDT")
    return flops * each.row["batch"] * length / each.row["chips"]


def score_with(rows: Sequence[Published], constants: Constants | None) -> Score:
    """The same of this planner; None: with the constants that users get."""

    def seconds(each: Published) -> float:
        return each.predicted(constants or constants_of(each.prediction.cluster, None))

    return score(rows, list(map(seconds, rows)))


def by_group(rows: Sequence[Published]) -> dict[tuple[str, str], list[Published]]:
    """Rows by source and chip."""
    groups: dict[tuple[str, str], list[Published]] = {}
    for each in rows:
        groups.setdefault(each.group, []).append(each)
    return groups


def peak_errors(rows: Sequence[Published]) -> list[float]:
    """Relative errors of predicted memory, of those rows whose peak was published; without float8,
    of which only the products are modelled."""
    known = [each for each in rows if "memory" in each.row and each.row["precision"] != "fp8"]
    return [_shown(each) / (each.row["memory"]["gib"] * GIB) - 1 for each in known]


def _shown(each: Published) -> int:
    """Bytes that the tool shows by which the row was measured."""
    found, row = each.prediction, each.row
    peak = gpu_peak(
        found.memory, found.config, found.strategy, row["batch"], row["sequence_length"],
        precision=row["precision"], old_kernels=row.get("attention") == "stored",
    )  # fmt: skip
    return peak.total if row["memory"]["measure"] == "nvidia-smi" else peak.reserved


def grade_published(path: Path) -> str:
    """The scoreboard: every group with the constants that users get, and with constants to which
    it did not contribute; then what is not modelled."""
    rows, refused = graded_rows(path)
    table = [("source", "chip", "rows", "error", "rank", "error, held out", "rank, held out")]
    ordered: list[Published] = []
    apart, seconds = list[float](), list[float]()
    for (source, chip), mine in tqdm(by_group(rows).items(), unit="group", disable=None):
        constants = fit_chip(rows, chip, source)
        usual, held_out = score_with(mine, None), score_with(mine, constants)
        apart.append(held_out.error)
        ordered += mine
        seconds += [each.predicted(constants) for each in mine]
        table.append((source, chip, str(len(mine)), *_words(usual), *_words(held_out)))
    whole, left = score_with(rows, None), score(ordered, seconds)
    lines = [
        text_table(table, "<<>>>>>"),
        f"{len(rows)} rows: median error {in_words(whole.error, 'share')}, held out "
        f"{in_words(left.error, 'share')}; {sum(error < 0.1 for error in apart)} of {len(apart)} "
        "groups are below 10% held out",
        "rank: Spearman's correlation of utilisation. Held out: constants fitted to the chip's "
        "other sources, or to other chips of its kind. Modelled; published figures are recorded",
    ]
    for (source, chip), mine in by_group(rows).items():
        if peaks := peak_errors(mine):
            error = in_words(statistics.median(map(abs, peaks)), "share")
            lines.append(f"memory: {len(peaks)} peaks of {source}, {chip}: median error {error}")
    for (source, chip, reason), count in refused.items():
        lines.append(f"not modelled: {count} of {source}, {chip}: {reason}")
    return "\n".join(lines)


def _words(found: Score) -> tuple[str, str]:
    rank = "–" if math.isnan(found.rank) else f"{found.rank:.2f}"
    return in_words(found.error, "share"), rank
