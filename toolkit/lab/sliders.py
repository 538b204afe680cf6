"""The latency of a moved slider: view, drawing and PNG of every panel, warm."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.bench.harness import Case, Suite

# Below it a reaction feels instantaneous (Card, Robertson, Mackinlay, "The information visualizer",
# CHI 1991).
LIMIT_SECONDS = 0.1

SUITE = Suite(f"{__name__}:cases", (2,), "a warm slider update of every panel, drawn to PNG")


def cases(cores: int) -> Iterator[Case]:
    """One case a panel and control, moved to and fro between two values."""
    del cores  # drawing uses one
    from toolkit.lab import CostPanel, LoopPanel, LoopStatePanel, MemoryPanel, ReadingPanel

    for panel, control, values in (
        (CostPanel(), "context_length", (1000, 200_000)),
        (ReadingPanel(), "token", (3, 12)),
        (ReadingPanel(), "keep", (0.8, 0.95)),
        (MemoryPanel(), "context_length", (1000, 200_000)),
        (LoopPanel(), "token", (20, 50)),
        (LoopPanel(), "window", (4, 16)),
        (LoopStatePanel(), "loops", (3, 6)),
    ):
        name = f"{type(panel).__name__}.{control}"
        yield Case(
            name=f"{name}, warm update",
            contenders={name: _move(panel, control, values)},
            check=_is_png,
            ours=name,
            limit=LIMIT_SECONDS,
        )


def _move(panel: Any, control: str, values: tuple[float, float]) -> Callable[[], bytes]:
    turn = itertools.cycle(values)

    def update() -> bytes:
        setattr(panel, control, next(turn))
        return panel.png

    return update


def _is_png(results: Mapping[str, Any]) -> None:
    for name, picture in results.items():
        if not picture.startswith(b"\x89PNG"):
            raise ValueError(f"{name!r} drew no picture")
