"""Another planner on the published step times: mlsysim 0.3, an analytical model for teaching.

Rows are mapped onto its `DistributedModel`: this project's figures of chips and links, the row's
sizes, ZeRO-3 for FSDP, its usual overlap of gradients, microbatches as accumulation where there is
no pipeline. It is judged twice: with the efficiency that its users get, 0.5, and with the
efficiency per chip that brings these same rows nearest. It models dense models; mixtures are left
out.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from toolkit.looped import parameter_count
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.grade.published import (
    Published,
    Score,
    by_group,
    graded_rows,
    read_rows,
    score,
    score_with,
)

EFFICIENCY = 0.5  # by default
EFFICIENCIES = tuple(each / 100 for each in range(10, 101, 5))


def mlsysim_seconds(each: Published, efficiency: float) -> float:
    """Seconds of a step as mlsysim predicts them; needs the package mlsysim."""
    from mlsysim.core.units import ureg  # pyright: ignore
    from mlsysim.hardware.types import ComputeCore, HardwareNode, MemoryHierarchy  # pyright: ignore
    from mlsysim.models.types import TransformerWorkload  # pyright: ignore
    from mlsysim.solvers import DistributedModel  # pyright: ignore
    from mlsysim.systems.types import Fleet, NetworkFabric, Node  # pyright: ignore

    row, model, found = each.row, each.row["model"], each.prediction
    strategy, chip, chips = found.strategy, found.cluster.chip, row["chips"]
    flops, rate = chip.flops_per_second * ureg.flop / ureg.second, ureg.byte / ureg.second
    device = HardwareNode(
        name=chip.name,
        release_year=2020,
        compute=ComputeCore(peak_flops=flops, precision_flops={"fp16": flops}),
        memory=MemoryHierarchy(
            capacity=chip.memory_bytes * ureg.byte, bandwidth=chip.bytes_per_second * rate
        ),
    )
    near, far = chip.links[0], chip.links[-1]
    per_node = min(near.chips, chips)
    node = Node(
        name="node", accelerator=device, accelerators_per_node=per_node,
        intra_node_bw=near.bytes_per_second * rate,
    )  # fmt: skip
    fabric = NetworkFabric(
        name=far.name, bandwidth=far.bytes_per_second * rate, latency=far.seconds * ureg.second
    )
    workload = TransformerWorkload(
        name=model["name"], architecture="transformer", layers=model["layers"],
        parameters=parameter_count(found.config) * ureg.count, hidden_dim=model["width"],
        heads=model["heads"], kv_heads=model["key_value_heads"], head_dim=model["head_size"],
        vocab_size=model["vocabulary"],
    )  # fmt: skip
    is_pipeline = strategy.pipeline > 1
    solved = DistributedModel().solve(
        workload, Fleet(name="fleet", node=node, count=chips // per_node, fabric=fabric),
        batch_size=row["batch"], seq_len=row["sequence_length"], precision="fp16",
        efficiency=efficiency, tp_size=strategy.tensor, pp_size=strategy.pipeline,
        v_stages=row["layout"].get("virtual", 1), overlap_comm=True,
        microbatch_count=row["microbatches"] if is_pipeline else 1,
        gradient_accumulation_steps=1 if is_pipeline else row["microbatches"],
        zero_stage=3 if strategy.fsdp > 1 else row["layout"].get("zero", 0),
        activation_recomputation=row["recompute"] in ("full", "offload"),
    )  # fmt: skip
    return float(solved.step_latency_total.to("second").magnitude)


def record_peer(path: Path, rows: Sequence[Published]) -> None:
    """Write what mlsysim predicts for dense rows: one line each, with its number."""
    dense = [each for each in rows if "experts" not in each.row["model"]]
    with path.open("w", encoding="utf-8") as file:
        for chip in dict.fromkeys(each.group[1] for each in dense):
            mine = [each for each in dense if each.group[1] == chip]
            ways = {
                efficiency: [mlsysim_seconds(each, efficiency) for each in mine]
                for efficiency in EFFICIENCIES
            }

            def error(efficiency: float, ways=ways, mine=mine) -> float:
                return score(mine, ways[efficiency]).error

            best = min(EFFICIENCIES, key=error)
            for each, usual, fitted in zip(mine, ways[EFFICIENCY], ways[best], strict=True):
                line = {"number": each.number, "seconds": usual, "efficiency": best}
                file.write(json.dumps(line | {"fitted_seconds": fitted}) + "\n")


def beside_peer(published: Path, peer: Path) -> dict[tuple[str, str], tuple[Score, ...]]:
    """By source and chip: this planner, mlsysim as users get it, and mlsysim fitted per chip."""
    found = {row["number"]: row for row in read_rows(peer, lambda row: row["seconds"])}
    rows = [each for each in graded_rows(published)[0] if each.number in found]
    scores = {}
    for group, mine in by_group(rows).items():
        usual, fitted = (
            score(mine, [found[each.number][name] for each in mine])
            for name in ("seconds", "fitted_seconds")
        )
        scores[group] = score_with(mine, None), usual, fitted
    return scores


def table_beside_peer(published: Path, peer: Path) -> str:
    """The scores side by side, and their medians over groups."""
    table = [("source", "chip", "rows", "here", "rank", "mlsysim", "rank", "fitted")]
    scores = beside_peer(published, peer)
    for (source, chip), (ours, usual, fitted) in scores.items():
        errors = [in_words(each.error, "share") for each in (ours, usual, fitted)]
        table.append((
            source, chip, str(ours.rows), errors[0], f"{ours.rank:.2f}", errors[1],
            f"{usual.rank:.2f}", errors[2],
        ))  # fmt: skip
    medians = [
        in_words(statistics.median(each[way].error for each in scores.values()), "share")
        for way in range(3)
    ]
    return (
        f"{text_table(table, '<<>>>>>>')}\nmedian of the groups: {medians[0]} here, {medians[1]} "
        f"mlsysim 0.3, {medians[2]} with an efficiency per chip fitted to these rows"
    )
