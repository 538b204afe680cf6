"""The tables of docs/sharding.md in which layouts are compared: `python docs/layouts.py`.

Programs are compiled for eight simulated devices; what is counted is theirs, and nothing runs. With
google-parallax installed (`pip install google-parallax`) its rows are made too.
"""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from toolkit.measure import program_cost
from toolkit.parallel import (
    Layout,
    auto_layout,
    compare_layouts,
    logical_layout,
    make_mesh,
    redco_layout,
    simulate_devices,
)
from toolkit.parallel.causes.comparison import compiled_gradient
from toolkit.parallel.dataflow.flow import RANKING
from toolkit.parallel.layout import placements_of

PAGE = Path(__file__).parent / "sharding.md"
PLACE = re.compile(r"(?<=<!-- python docs/layouts\.py -->\n\n).*?(?=\n\n<!-- end -->)", re.S)
KEY = 16
MESH = {"data": 2, "model": 4}
BUDGET = 0.95  # of what the layout found first needs
PARALLAX = {"google-parallax 0.0.2, `AUTO`": "auto_shard", "google-parallax 0.0.2, `FSDP`": "fsdp"}
LOGICAL = {
    "[qkv]/kernel": ("embed", "heads"),
    "o/kernel": ("heads", "embed"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
}


def block(x: Any, p: Any) -> tuple[Any, None]:
    """Attention with grouped keys and a feed-forward layer, as einsums."""
    w = {name: one["kernel"] for part in p.values() for name, one in part.items()}
    q, k, v = (jnp.einsum("btd,dc->btc", x, w[name]) for name in "qkv")
    q = q.reshape(*q.shape[:2], k.shape[-1] // KEY, -1, KEY)
    k, v = (one.reshape(*one.shape[:2], -1, KEY) for one in (k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhgk,bthk->bhgqt", q, k) / KEY**0.5)
    out = jnp.einsum("bhgqt,bthk->bqhgk", scores, v).reshape(*x.shape[:2], -1)
    x = x + jnp.einsum("btc,cd->btd", out, w["o"])
    inner = jax.nn.gelu(jnp.einsum("btd,df->btf", x, w["up"]))
    return x + jnp.einsum("btf,fd->btd", inner, w["down"]), None


def one_block(params: Any, x: Any) -> Any:
    return jnp.mean(block(x, params)[0] ** 2)


def four_blocks(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)


def shapes(width: int, hidden: int, heads: int, grouped: int, layers: tuple[int, ...]) -> Any:
    attention = {
        "q": (width, heads * KEY),
        "k": (width, grouped * KEY),
        "v": (width, grouped * KEY),
        "o": (heads * KEY, width),
    }
    feed_forward = {"up": (width, hidden), "down": (hidden, width)}
    params = {
        part: {
            name: {"kernel": jax.ShapeDtypeStruct((*layers, *size), jnp.float32)}
            for name, size in sizes.items()
        }
        for part, sizes in (("attention", attention), ("mlp", feed_forward))
    }
    return params, jax.ShapeDtypeStruct((8, 32, width), jnp.float32)


def parallax_layout(params: Any, x: Any, mesh: Mesh, module: str) -> Layout:
    """What google-parallax chooses, as a layout."""
    chooser = importlib.import_module(f"parallax.sharding.{module}")
    arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (params, x))
    with jax.set_mesh(mesh):
        (found, *_), _ = chooser.get_shardings(one_block, *arrays)
    specs = [_spec(one) for one in jax.tree.leaves(found, is_leaf=_is_place)]
    rows = placements_of(params, lambda shape: (PartitionSpec(), ""))
    rows = (dataclasses.replace(row, spec=spec) for row, spec in zip(rows, specs, strict=True))
    return Layout(mesh, tuple(rows), PartitionSpec("data"))


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, NamedSharding | PartitionSpec)


def _spec(place: Any) -> PartitionSpec:
    return place.spec if isinstance(place, NamedSharding) else place


def searched() -> str:
    """One block under layouts of different origin."""
    mesh, (params, x) = make_mesh(MESH), shapes(64, 256, 4, 2, ())
    rules = (("heads", "model"), ("mlp", "model"), ("embed", None))
    layouts: dict[str, Any] = {
        "`auto_layout`": auto_layout(one_block, params, x, mesh, machine=RANKING),
        "`redco_layout`": redco_layout(params, mesh),
        "`logical_layout`": logical_layout(params, mesh, LOGICAL, rules),
    }
    if importlib.util.find_spec("parallax"):
        for name, module in PARALLAX.items():
            layouts[name] = parallax_layout(params, x, mesh, module)
    return in_markdown(compare_layouts(one_block, params, x, layouts))


def budgeted() -> str:
    """Four blocks in one scan, without and with a budget of memory."""
    mesh, (params, x) = make_mesh(MESH), shapes(128, 512, 8, 4, (4,))
    first = auto_layout(four_blocks, params, x, mesh, machine=RANKING)
    compiled = compiled_gradient(four_blocks, params, x, first)
    memory = round(BUDGET * program_cost(compiled).resident_bytes)
    layouts = {
        "`auto_layout`": first,
        f"`auto_layout`, `memory={memory}`": auto_layout(
            four_blocks, params, x, mesh, machine=RANKING, memory=memory
        ),
        "`redco_layout`": redco_layout(params, mesh),
        "the compiler's": None,
    }
    return in_markdown(compare_layouts(four_blocks, params, x, layouts))


def in_markdown(table: str) -> str:
    """The lines of a table of text, whose columns are two spaces apart."""
    head, *rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def with_tables(text: str) -> str:
    """The page's text with its tables as they are now; rows of google-parallax stay without it."""
    tables = [searched, budgeted]
    texts = PLACE.findall(text)
    assert len(texts) == len(tables), f"found {len(texts)} places for {len(tables)} tables"
    made = iter(
        make() + "".join(f"\n{line}" for line in old.splitlines() if is_theirs(line))
        for make, old in zip(tables, texts, strict=True)
    )
    return PLACE.sub(lambda _: next(made), text)


def is_theirs(line: str) -> bool:
    return "google-parallax" in line and not importlib.util.find_spec("parallax")


if __name__ == "__main__":
    simulate_devices(8)
    PAGE.write_text(with_tables(PAGE.read_text()))
