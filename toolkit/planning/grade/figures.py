"""Rows of published figures, and the seconds and FLOPs that their figures mean."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# FLOPs per token that a source counts: per parameter of layers, per parameter of the head, and per
# layer, query channel and token of the sequence.
COUNTED = {"6N + 12LDT": (6, 6, 12), "6N + 6LDT": (6, 6, 6), "8N + 16LDT": (8, 6, 16)}


def read_rows(path: Path, figure: Callable[[Mapping[str, Any]], float]) -> list[dict[str, Any]]:
    """The rows of a file of published figures, each above 0."""
    rows: list[dict[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not figure(row) > 0:
                raise ValueError("the figure is not positive")
            rows.append(row)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"path {path}, line {len(rows) + 1}: want what data/planning/README.md says; {error!r}"
        ) from None
    return rows


def published_seconds(row: Mapping[str, Any]) -> float:
    """Seconds of a step from whichever figure was published."""
    if "step_seconds" in row:
        return row["step_seconds"]
    tokens = row["batch"] * row["sequence_length"]
    if "tokens_per_second" in row:
        return tokens / row["tokens_per_second"]
    if "tokens_per_second_per_chip" in row:
        return tokens / row["tokens_per_second_per_chip"] / row["chips"]
    flops = tokens * flops_per_token(row["model"], row["sequence_length"], row["counted"])
    return flops / (row["teraflops_per_chip"] * 1e12 * row["chips"])


def flops_per_token(model: Mapping[str, Any], length: int, counted: str) -> float:
    """FLOPs that a dense model needs per token of a train step, as a source counts them."""
    per_layers, per_head, per_key = COUNTED[counted]
    queries, keys = (model[name] * model["head_size"] for name in ("heads", "key_value_heads"))
    products = 3 if model["gated"] else 2
    numbers = model["width"] * (2 * queries + 2 * keys + products * model["hidden"])
    flops = model["layers"] * (per_layers * numbers + per_key * queries * length)
    return flops + per_head * model["vocabulary"] * model["width"]
