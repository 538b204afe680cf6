"""Random plans of tiny looped, hybrid, latent and routed models, drawn by their number.

Every plan that `check_model` and `train_program` accept must be one that libtpu compiles. Chance
finds combinations that nobody wrote down; numbers 0, 1, 2, ... are always the same plans.
"""

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import cluster
from toolkit.planning.grade.by_compiler import read_rows, record_cases
from toolkit.planning.grade.cases import Case
from toolkit.planning.grade.program import check_built
from toolkit.planning.model_checks import check_model
from toolkit.planning.search.divisions import bases_of
from toolkit.planning.search.weigh import ORDERS
from toolkit.planning.strategy import RECOMPUTE, Strategy

COUNT = 200
KINDS = ("looped", "hybrid", "latent", "routed")
_CHIPS = ("v5e:2x2", "v5e:2x4")
_PATTERNS = {
    "looped": ("full full", "full", "window full", "window window"),
    "hybrid": ("gdn window", "gdn full", "gdn gdn full", "kda full", "linear window"),
    "latent": ("mla", "mla mla", "mla mla mla"),
    "routed": ("full full", "window full", "full", "mla mla"),
}
_LENGTH, _WIDTH = 256, 256


@dataclasses.dataclass(frozen=True)
class Drawn(Case):
    """A case whose model was drawn, and is named after its number."""

    number: int

    @property
    def config(self) -> LoopedConfig:
        """The model."""
        return _config(self.number)


@functools.cache
def drawn_cases(count: int = COUNT) -> tuple[Drawn, ...]:
    """The first plans, a quarter of each of `KINDS`."""
    return tuple(map(_drawn, range(count)))


def _drawn(number: int) -> Drawn:
    chance, config = random.Random(f"plan {number}"), _config(number)
    chips = chance.choice(_CHIPS)
    while True:
        batch = cluster(chips).chips * chance.choice((1, 2, 4))
        bases = [*bases_of(config, cluster(chips), batch, _LENGTH, chance.choice((1.25, 2.0)))]
        strategy = chance.choice(bases).changed(**_changes(chance, config))
        try:
            strategy = Strategy(**vars(strategy))
            check_model(config, strategy, batch, _LENGTH)
            check_built(config, strategy)
        except ValueError:
            continue
        return Drawn(f"drawn {number}: {_words(config)}", chips, strategy, batch, _LENGTH, number)


def _changes(chance: random.Random, config: LoopedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "recompute": chance.choice(RECOMPUTE),
        "microbatches": chance.choice((1, 1, 2, 4)),
        "shard_optimizer": chance.random() < 0.5,
        "head_chunks": chance.choice((1, 2, 4)),
    }
    if found["recompute"] == "layer" and chance.random() < 0.3:
        found["block_chunks"] = chance.choice((2, 4))
    if config.loops == 1 and chance.random() < 0.5:
        found["schedule"], found["chunks"], _ = chance.choice((*ORDERS, ("gpipe", 1, 1)))
    if "moe" in config.feed_forward_words:
        found["dispatch"] = chance.choice(("all_to_all", "gather", "ragged"))
    return found


@functools.cache
def _config(number: int) -> LoopedConfig:
    chance, kind = random.Random(f"model {number}"), KINDS[number % len(KINDS)]
    loops = chance.choice((2, 3, 4) if kind == "looped" else (1, 1, 2))
    options: dict[str, Any] = {}
    pattern = chance.choice(_PATTERNS[kind])
    if "window" in pattern:
        options["window"] = {"sliding_window": chance.choice((64, 128))}
    if "full" in pattern:
        options["full"] = {"key_value_heads": chance.choice((None, 2, 1))}
    if kind == "routed":
        options["moe"] = {
            "experts": chance.choice((4, 8, 16)), "chosen": chance.choice((2, 3)),
            "hidden": 256, "shared_hidden": chance.choice((None, 256)),
            "scores": chance.choice(("softmax", "sigmoid")),
        }  # fmt: skip
    return LoopedConfig(
        vocabulary=512,
        width=_WIDTH,
        pattern=pattern,
        loops=loops,
        heads=4,
        feed_forward=512,
        feed_forwards="moe" if kind == "routed" else "swiglu",
        residual_gate=chance.random() < 0.5,
        norm_every_loop=loops > 1 and chance.random() < 0.3,
        tied_embedding=chance.random() < 0.5,
        dtype="bfloat16",
        options=options,
    )


def _words(config: LoopedConfig) -> str:
    routed = " with experts" if "moe" in config.feed_forward_words else ""
    return f"{config.pattern}{routed}, {config.loops} loop{'s' * (config.loops > 1)}"


def grade_drawn(path: Path, minutes: float) -> str:
    """Continue a record of drawn plans for some minutes; says which of them libtpu refused."""
    record_cases(path, drawn_cases(), minutes=minutes)
    rows = read_rows(path, ("peak_bytes",))
    mine = [rows[case.key] for case in drawn_cases() if case.key in rows]
    refused = [f"{row['case']}: {row['error']}" for row in mine if "error" in row]
    return "\n".join([*refused, f"{len(refused)} of {len(mine)} drawn plans refused by libtpu"])
