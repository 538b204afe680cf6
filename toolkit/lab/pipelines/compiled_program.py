"""A schedule compiled as one program on simulated devices, and its permutes counted.

Run as `python -m toolkit.lab.pipelines.compiled_program SCHEDULE DEVICES MICROBATCHES SLOW TIMES`,
in a process of its own because devices are simulated before jax starts; prints JSON. An order that
is to be searched for is searched for first, with a stage TIMES as slow.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.lab.pipelines.pipeline_view import NONE, SEARCHED, schedule_of, searched_table
from toolkit.measure import collectives
from toolkit.parallel import make_mesh, simulate_devices
from toolkit.parallel.pipeline import Pipeline

SEQUENCES, WIDTH = 2, 64


def compiled_facts(
    name: str, devices: int, microbatches: int, slow: int = 0, times: float = 1.0
) -> dict[str, Any]:
    """The fields of `Compiled`, of a chain of matrices and tanh under a schedule of `RULES`."""
    simulate_devices(devices)
    table = searched_table(name, devices, microbatches, slow, times) if name in SEARCHED else ""
    schedule = schedule_of(name, devices, microbatches, NONE, table)
    weights = [np.ones((WIDTH, WIDTH), np.float32)] * schedule.stages
    run = Pipeline(
        lambda w, x, _: jnp.tanh(x @ w), first=lambda _, data: data,
        last=lambda _, x, data: jnp.sum(x**2), weights=weights, schedule=schedule,
        mesh=make_mesh({"stage": devices}, devices=jax.devices()[:devices]),
    )  # fmt: skip
    batch = jnp.ones((microbatches, SEQUENCES, WIDTH))
    placed, start = run.place(weights), time.perf_counter()
    compiled = jax.jit(run).lower(placed, (), batch).compile()
    seconds = time.perf_counter() - start
    sent = [permute for permute in collectives(compiled) if permute.kind == "collective-permute"]
    return {
        "ticks": run.program.length, "channels": len(run.program.channels),
        "permutes": sum(permute.count for permute in sent),
        "bytes_sent": sum(permute.operand_bytes * permute.count for permute in sent),
        "activation": SEQUENCES * WIDTH * 4, "messages": run.program.messages,
        "compiled_with": f"jax {jax.__version__}, {devices} simulated devices", "seconds": seconds,
        "table": table,
    }  # fmt: skip


if __name__ == "__main__":
    _, name, devices, microbatches, slow, times = sys.argv
    found = compiled_facts(name, int(devices), int(microbatches), int(slow), float(times))
    print(json.dumps(found))
