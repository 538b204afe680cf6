"""The subcommand `toolkit plan-collective`: the best trees of a collective on a network."""

import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def plan_collective(
    topology: Annotated[str, tyro.conf.Positional],
    op: Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce"] = "all-reduce",
    size: str = "1GB",
    root: int = 0,
    trees: int | None = None,
    msccl: Path | None = None,
) -> None:
    """Find the best trees of a collective on a network, and the cut that allows no better ones.

    Args:
        topology: such as a100:2x8, h100:16, mi250:2x16, v5e:4x4, 2*v5e:4x4, dgx1, gb200:72,
            torus:4x4, fat-tree:4 or FILE.json.
        op: the collective.
        size: bytes of the whole array, such as 1GB or 64MB.
        root: the rank that sends in a broadcast, or receives in a reduce.
        trees: trees per root, if the optimum's are too many.
        msccl: also write the schedule to this file, as MSCCL XML.
    """
    from toolkit.schedules import collectives

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", size.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ValueError(f"size must be a number of bytes, such as 64MB or 1GB; got {size!r}")
    wanted = float(found[1]) * _UNITS[found[2].upper()]
    if root and op not in ("broadcast", "reduce"):
        raise ValueError(f"root: got {root} with {op}, in which all ranks do the same; wanted none")
    network = collectives.named_topology(topology)
    report = collectives.plan_report(network, op, wanted, root=root, trees_per_root=trees)
    print(report)
    if msccl is not None:
        forest = collectives.best_forest(network, op, wanted, root, trees)
        msccl.write_text(collectives.to_msccl(collectives.to_program(forest)), encoding="utf-8")
        print(f"\nMSCCL XML: {msccl}")
