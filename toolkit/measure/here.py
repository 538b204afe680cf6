"""Measured rates of this process's devices, in the form of published figures."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from toolkit.measure.chips import Link, Peak
from toolkit.measure.hardware import available_memory, matmul_rate, memory_bandwidth

SMALL, LARGE = 1 << 8, 1 << 20  # numbers per device in the sums that are timed
REPEATS = 7
SOURCE = "measured here"
LEAST_SECONDS = 1e-9  # lower bound of a delay below the noise


@functools.cache
def measured_peak() -> Peak:
    """Measure one of the devices here while all of them work.

    Simulated devices share the cores and the memory of one processor, and so each has a share.
    """
    devices = jax.devices()
    count = len(devices)
    on_cpu = devices[0].platform == "cpu"
    share = count if on_cpu else 1
    statistics = (None if on_cpu else devices[0].memory_stats()) or {}
    return Peak(
        name=f"{devices[0].device_kind}, {SOURCE}",
        flops_per_second=matmul_rate() / share,
        bytes_per_second=memory_bandwidth() / share,
        memory_bytes=float(statistics.get("bytes_limit", available_memory() / share)),
        source=SOURCE,
        links=(_link(count),) if count > 1 else (),
    )


def _link(count: int) -> Link:
    """Delay and rate of sums over all devices, from one of few bytes and one of many."""
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "all"),
            mesh=mesh,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec(),
        )
    )

    def seconds(numbers: int) -> float:
        where = NamedSharding(mesh, PartitionSpec("all"))
        x = jax.device_put(jnp.ones(numbers * count, jnp.float32), where)
        add(x).block_until_ready()
        took = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            add(x).block_until_ready()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    few, many = seconds(SMALL), seconds(LARGE)
    sent = 2 * (count - 1) / count * 4 * (LARGE - SMALL)
    return Link(
        "links here",
        sent / max(many - few, LEAST_SECONDS),
        count,
        max(few / (count - 1), LEAST_SECONDS),
        SOURCE,
    )
