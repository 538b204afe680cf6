"""The communication of one program under several layouts."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from toolkit._checks import checked
from toolkit.measure import collectives, in_words
from toolkit.measure.tables import text_table
from toolkit.parallel.layout import Layout


@checked
def compare_layouts(
    loss_fn: Callable, params: Any, batch: Any, layouts: Mapping[str, Layout]
) -> str:
    """Tabulate the compiled collectives of a loss and its gradients under each layout.

    Args:
        loss_fn: (params, batch) -> scalar loss.
        params: pytree of arrays or ShapeDtypeStructs.
        batch: pytree of arrays or ShapeDtypeStructs [batch, ...].
        layouts: name -> layout, such as `auto_layout`'s beside `redco_layout`'s.

    Returns:
        A line per layout: count of each kind of collective, bytes sent per device, and bytes of
        parameters per device.

    Cost: One compilation per layout; nothing runs.

    Example:
        >>> params, x = {"w": jnp.ones((64, 64))}, jnp.ones((8, 64))
        >>> mesh = make_mesh({"data": 8})  # eight devices, real or simulated
        >>> layouts = {"data": data_parallel(params, mesh), "zero3": fully_sharded(params, mesh)}
        >>> table = compare_layouts(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x, layouts)
    """
    if not layouts:
        raise ValueError("layouts is empty: want name -> layout")
    counted = {name: _count(loss_fn, params, batch, found) for name, found in layouts.items()}
    kinds = sorted({kind for runs, _ in counted.values() for kind in runs})
    rows = [("layout", *kinds, "sent", "parameters held")]
    for name, (runs, sent) in counted.items():
        stored = in_words(layouts[name].bytes_per_device, "bytes")
        rows.append((name, *(str(runs[kind]) for kind in kinds), in_words(sent, "bytes"), stored))
    return text_table(rows, "<" + ">" * (len(kinds) + 2))


def _count(
    loss_fn: Callable, params: Any, batch: Any, layout: Layout
) -> tuple[Counter[str], float]:
    places = layout.shardings(params)
    rows = jax.tree.map(lambda _: layout.batch_sharding, batch)
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, batch))
    loss = NamedSharding(layout.mesh, PartitionSpec())
    step = jax.jit(
        jax.value_and_grad(loss_fn), in_shardings=(places, rows), out_shardings=(loss, places)
    )
    found = collectives(step.lower(*given).compile())
    runs: Counter[str] = Counter()
    for collective in found:
        runs[collective.kind] += collective.count
    return runs, sum(collective.total_bytes_sent for collective in found)
