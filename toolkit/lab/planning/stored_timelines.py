"""The compiled steps that `TimelinePanel` lays out in time, stored: compiling takes minutes.

`python -m toolkit.lab.planning.stored_timelines` compiles them anew, by libtpu; with names of
layouts, those only.
"""

import functools
import json
import sys
from typing import Any

import jax

from toolkit.lab.kit.stored import stored_folder
from toolkit.planning import Strategy, cluster, train_program
from toolkit.planning.models import model_of
from toolkit.planning.time.compiled_work import (
    CompiledWork,
    Compute,
    Loop,
    Send,
    Wait,
    compiled_work,
)

FILE = "timelines.json"
MODEL, TOPOLOGY, BATCH, LENGTH = "llama-3.2-1b", "v5e:4x4", 32, 2048
STRATEGIES = {
    "FSDP 16": Strategy(fsdp=16, recompute="layer", head_chunks=8),
    "FSDP 4 x tensor 4": Strategy(fsdp=4, tensor=4, recompute="layer", head_chunks=8),
}
_ITEMS = (Compute, Send, Wait, Loop)


@functools.cache
def stored_work(layout: str) -> CompiledWork:
    """What the compiled step does under a layout of `STRATEGIES`."""
    found = _stored()["layouts"][layout]
    return CompiledWork(_items(found["items"]), found["unknown_loops"])


def compiled_with() -> str:
    """What compiled them."""
    return _stored()["compiled_with"]


def _items(rows: list[Any]) -> tuple[Any, ...]:
    """Rows [number of the kind, fields ...] as items."""
    found = []
    for kind, *fields in rows:
        if _ITEMS[kind] is Loop:
            fields[1] = _items(fields[1])
        found.append(_ITEMS[kind](*fields))
    return tuple(found)


def _rows(items: tuple[Any, ...]) -> list[Any]:
    def plain(field: Any) -> Any:
        return _rows(field) if isinstance(field, tuple) else field

    return [[_ITEMS.index(type(item)), *map(plain, item)] for item in items]


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads((stored_folder("planning") / FILE).read_text())


def main(names: list[str]) -> None:
    """Writes the file anew, one layout after the other: minutes each."""
    path = stored_folder("planning") / FILE
    layouts = _stored()["layouts"] if path.exists() else {}
    for name in names or STRATEGIES:
        program = train_program(
            model_of(MODEL), STRATEGIES[name], batch=BATCH, sequence_length=LENGTH,
            devices=cluster(TOPOLOGY).devices(),
        )  # fmt: skip
        work = compiled_work(program.compile())
        layouts[name] = {"unknown_loops": work.unknown_loops, "items": _rows(work.items)}
        import libtpu

        made_by = f"jax {jax.__version__}, libtpu {libtpu.__version__}, {TOPOLOGY}"
        text = json.dumps({"compiled_with": made_by, "layouts": layouts})
        path.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
