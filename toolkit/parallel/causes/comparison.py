"""The communication of one program under several layouts."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from toolkit._checks import checked
from toolkit.measure import collectives, in_words, program_cost
from toolkit.measure.tables import text_table
from toolkit.parallel.layout import Layout


@checked
def compare_layouts(
    loss_fn: Callable, params: Any, batch: Any, layouts: Mapping[str, Layout | None]
) -> str:
    """Tabulate the compiled collectives of a loss and its gradients under each layout.

    Args:
        loss_fn: (params, batch) -> scalar loss.
        params: pytree of arrays or ShapeDtypeStructs.
        batch: pytree of arrays or ShapeDtypeStructs [batch, ...].
        layouts: name -> layout, such as `auto_layout`'s beside `redco_layout`'s. None is the
            compiler's own: it knows the batch's sharding, on the first layout's mesh, and chooses
            those of parameters and results.

    Returns:
        A line per layout: count of each kind of collective, and per device FLOPs (a loop's body
        counts once), bytes in memory while it runs, bytes sent, and bytes of parameters.

    Cost: One compilation per layout; nothing runs.

    Example:
        >>> params, x = {"w": jnp.ones((64, 64))}, jnp.ones((8, 64))
        >>> mesh = make_mesh({"data": 8})  # eight devices, real or simulated
        >>> layouts = {"data": data_parallel(params, mesh), "zero3": fully_sharded(params, mesh)}
        >>> table = compare_layouts(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x, layouts)
    """
    if not layouts:
        raise ValueError("layouts is empty: want name -> layout")
    first = next((layout for layout in layouts.values() if layout is not None), None)
    if first is None:
        raise ValueError("layouts: all are None; want a Layout, whose mesh the compiler's has too")
    compiled = {
        name: compiled_gradient(loss_fn, params, batch, layout or first, is_free=layout is None)
        for name, layout in layouts.items()
    }
    runs: dict[str, Counter[str]] = {name: Counter() for name in compiled}
    sent = dict.fromkeys(compiled, 0.0)
    for name, program in compiled.items():
        for collective in collectives(program):
            runs[name][collective.kind] += collective.count
            sent[name] += collective.total_bytes_sent
    kinds = sorted({kind for counts in runs.values() for kind in counts})
    rows: list[tuple[str, ...]] = [("layout", *kinds, "FLOPs", "memory", "sent", "parameters held")]
    for name, program in compiled.items():
        cost, places = program_cost(program), jax.tree.leaves(program.input_shardings[0][0])
        stored = sum(
            math.prod(place.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize
            for leaf, place in zip(jax.tree.leaves(params), places, strict=True)
        )
        sizes = (in_words(size, "bytes") for size in (cost.resident_bytes, sent[name], stored))
        counts = (str(runs[name][kind]) for kind in kinds)
        rows.append((name, *counts, f"{cost.flops:.3g}", *sizes))
    return text_table(rows, "<" + ">" * (len(kinds) + 4))


def compiled_gradient(
    loss_fn: Callable, params: Any, batch: Any, layout: Layout, *, is_free: bool = False
) -> jax.stages.Compiled:
    """A loss and its gradients compiled under a layout; `is_free`: under the batch's sharding."""
    rows = jax.tree.map(lambda _: layout.batch_sharding, batch)
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, batch))
    if is_free:
        step = jax.jit(jax.value_and_grad(loss_fn), in_shardings=(None, rows))
        return step.lower(*given).compile()
    places = layout.shardings(params)
    loss = NamedSharding(layout.mesh, PartitionSpec())
    step = jax.jit(
        jax.value_and_grad(layout.bind(loss_fn)),
        in_shardings=(places, rows),
        out_shardings=(loss, places),
    )
    return step.lower(*given).compile()
