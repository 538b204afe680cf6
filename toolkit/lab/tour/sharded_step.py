"""One train step of a language model on eight simulated devices, as the compiler made it.

Run as `python -m toolkit.lab.tour.sharded_step`, in a process of its own because devices are
simulated before jax starts; prints JSON.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tqdm import tqdm

from toolkit import parallel
from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import collectives

DEVICES = 8
BATCH, WINDOW = 16, 64
TOLERANCE = 1e-6


def sharded_step_facts() -> dict[str, Any]:
    """Compile and run one step under each layout; returns memory and communication per device.

    `difference` is the largest of a parameter from a single device's after the step. It takes
    three compilations.
    """
    config = LoopedConfig.tiny("gdn full", loops=2)
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    # Plain descent keeps rounding as it is; Adam's division would blow up the last bit of a
    # gradient near zero, and it is the layouts that are compared. Moments are held all the same.
    optimizer = optax.sgd(0.1, momentum=0.9)
    loss = partial(next_byte_loss, graph)
    tokens = jax.random.randint(jax.random.key(0), (2, BATCH, WINDOW), 0, 256)
    batch = (tokens[0], tokens[1])

    @jax.jit
    def one_device(params: nnx.State, batch: tuple[jax.Array, jax.Array]) -> optax.Params:
        updates, _ = optimizer.update(jax.grad(loss)(params, batch), optimizer.init(params))
        return optax.apply_updates(params, updates)

    expected = one_device(params, batch)
    mesh = parallel.make_mesh({"data": DEVICES})
    strategies = {"data parallel": parallel.data_parallel, "fully sharded": parallel.fully_sharded}
    layouts = {}
    for name, strategy in tqdm(strategies.items(), desc="layouts", unit="layout"):
        layout = strategy(params, mesh)
        state = layout.apply(params), layout.apply(optimizer.init(params))
        arguments = *state, layout.apply_batch(batch)
        compiled = parallel.sharded_train_step(loss, optimizer, layout).lower(*arguments).compile()
        result, _, _ = compiled(*arguments)
        difference = max(
            float(jnp.max(jnp.abs(a - b)))
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        )
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{name}: parameters differ from one device's by {difference:.1e}, "
                f"wanted at most {TOLERANCE:.0e}"
            )
        found = collectives(compiled)
        layouts[name] = {
            "state_bytes": sum(
                leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
            ),
            "bytes_sent": sum(item.total_bytes_sent for item in found),
            "collectives": _merged(found),
            "difference": difference,
        }
    model = f"{config.pattern!r}, loops {config.loops}, batch {BATCH} x {WINDOW}"
    return {"model": model, "devices": DEVICES, "layouts": layouts}


def _merged(found: list[Any]) -> list[dict[str, Any]]:
    """One row per kind: runs, result bytes and bytes sent over the whole step."""
    rows: dict[str, dict[str, Any]] = {}
    for item in found:
        nothing = {"kind": item.kind, "count": 0, "bytes": 0, "bytes_sent": 0.0}
        row = rows.setdefault(item.kind, nothing)
        row["count"] += item.count
        row["bytes"] += item.bytes * item.count
        row["bytes_sent"] += item.total_bytes_sent
    return list(rows.values())


if __name__ == "__main__":
    # Each program runs once, untimed; what it sends is the same, and XLA takes half as long.
    jax.config.update("jax_disable_most_optimizations", True)
    parallel.simulate_devices(DEVICES)
    json.dump(sharded_step_facts(), sys.stdout)
