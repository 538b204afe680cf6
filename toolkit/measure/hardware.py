"""This machine: its description, published peaks and measured rates.

Published peaks (`chips.py`) are *recorded*. `matmul_rate` and `memory_bandwidth` are *measured
here*; their quotient is the ridge of this machine's roofline.
"""

import contextlib
import functools
import math
import os
import platform
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from toolkit._checks import checked
from toolkit.measure.chips import Peak, published_peak
from toolkit.measure.timing import time_contenders

_CGROUP = Path("/sys/fs/cgroup")
# Larger than any last-level cache in use, small enough for a laptop.
_CPU_BANDWIDTH_BYTES = 1 << 27
_ACCELERATOR_BANDWIDTH_BYTES = 1 << 31
_BANDWIDTH_PASSES = 8


@dataclass(frozen=True)
class Hardware:
    """The machine under this process.

    Attributes:
        name: name of the accelerator, or else of the processor.
        platform: "cpu", "gpu" or "tpu".
        device_count: jax devices (simulated ones counted).
        cores: physical cores this process may use.
        memory_bytes: main memory this process may use.
        peak: published peak (recorded), or None.
        matmul_flops_per_second: measured here, or None when not asked for.
        memory_bytes_per_second: measured here, or None when not asked for.

    Example:
        >>> machine = hardware()
        >>> f"{machine.name}, {machine.cores} cores"
        '..., ... cores'
    """

    name: str
    platform: str
    device_count: int
    cores: int
    memory_bytes: int
    peak: Peak | None
    matmul_flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None


@checked
def hardware(*, measure: bool = False) -> Hardware:
    """Describe the machine; on request also measure it.

    Args:
        measure: whether to measure the matmul rate and the memory bandwidth (a second or two).

    Example:
        >>> machine = hardware()
        >>> machine.cores >= 1, machine.matmul_flops_per_second  # not asked for
        (True, None)
    """
    device = jax.devices()[0]
    found = Hardware(
        name=cpu_name() if device.platform == "cpu" else device.device_kind,
        platform=device.platform,
        device_count=len(jax.devices()),
        cores=available_cores(),
        memory_bytes=available_memory(),
        peak=published_peak(device.device_kind),
    )
    if not measure:
        return found
    return replace(
        found, matmul_flops_per_second=matmul_rate(), memory_bytes_per_second=memory_bandwidth()
    )


@checked
def matmul_rate(size: int | None = None, dtype: jnp.dtype | None = None) -> float:
    """FLOP/s of a square matrix product on the default device, measured here: 2 n^3 / seconds.

    Args:
        size: n; None takes 1024 on a CPU and 8192 elsewhere.
        dtype: None takes float32 on a CPU and bfloat16 elsewhere.

    Returns:
        Floating point operations per second, from the median of seven samples.

    Cost: 2 n^3 FLOPs per call; about half a second.

    Example:
        >>> matmul_rate(64) > 0
        True
    """
    on_cpu = jax.devices()[0].platform == "cpu"
    size = (1024 if on_cpu else 8192) if size is None else size
    if size < 1:
        raise ValueError(f"size={size}: want at least 1")
    dtype = (jnp.float32 if on_cpu else jnp.bfloat16) if dtype is None else dtype
    left = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    timing = time_contenders({"matmul": lambda: product(left, left)})["matmul"]
    return 2.0 * size**3 / timing.median


@checked
def memory_bandwidth(array_bytes: int | None = None) -> float:
    """Bytes/s between the default device and its memory, measured here.

    Eight passes of x <- a x + b over one array in one program: every pass reads and writes each
    byte once, in place, so that no page fault is timed.

    Args:
        array_bytes: size of the array; it must exceed the last-level cache. None takes 128 MiB on
            a CPU and 2 GiB elsewhere.

    Returns:
        Bytes read plus bytes written per second, from the median of seven samples.

    Cost: 16 times array_bytes of memory traffic a call; twice array_bytes of memory.

    Source: McCalpin, "Memory bandwidth and machine balance", 1995 (STREAM, the scale kernel).

    Example:
        >>> memory_bandwidth(1 << 20) > 0  # fits a cache: too small for an honest figure
        True
    """
    on_cpu = jax.devices()[0].platform == "cpu"
    if array_bytes is None:
        array_bytes = _CPU_BANDWIDTH_BYTES if on_cpu else _ACCELERATOR_BANDWIDTH_BYTES
    if array_bytes < 4:
        raise ValueError(f"array_bytes={array_bytes}: want at least 4")
    count = array_bytes // 4

    def passes(values):
        return jax.lax.fori_loop(0, _BANDWIDTH_PASSES, lambda _, x: 0.5 * x + 1.0, values)

    program = jax.jit(passes, donate_argnums=0)
    donated = [jnp.zeros(count, jnp.float32)]

    def call():
        donated[0] = program(donated[0])
        return donated[0]

    timing = time_contenders({"passes": call})["passes"]
    return 2.0 * 4.0 * count * _BANDWIDTH_PASSES / timing.median


@functools.cache
def cpu_name() -> str:
    """The processor's model name.

    Returns:
        Such as "AMD EPYC 9654", or the architecture if the model is unknown.

    Example:
        >>> cpu_name()
        '...'
    """
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if platform.system() == "Darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        if answer:
            return answer
    return platform.machine()


def available_cores() -> int:
    """Physical cores this process may use: affinity and container quota respected.

    Returns:
        At least 1. Two hyper-threads of one core count once.

    Example:
        >>> available_cores() >= 1
        True
    """
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        physical = min(physical, len({_core_of(cpu) for cpu in os.sched_getaffinity(0)}))
    for limit in _cgroup_values("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit():
            physical = min(physical, math.ceil(int(quota) / int(period)))
    return max(1, physical)


def available_memory() -> int:
    """Main memory this process may use, in bytes: the container's limit respected.

    Returns:
        The smaller of the machine's memory and the limit of the control group (v2 or v1).

    Example:
        >>> available_memory() > 2**20
        True
    """
    total = psutil.virtual_memory().total
    limits = _cgroup_values("memory.max") + _cgroup_values("memory/memory.limit_in_bytes")
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _core_of(cpu: int) -> tuple[str, str]:
    """The physical core of a logical one; itself if unknown."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return "logical", str(cpu)


def _cgroup_values(name: str) -> list[str]:
    """Values of a control-group file in this process's group and all its parents, each of which may
    limit."""
    own, found = Path("/proc/self/cgroup"), []
    group = _CGROUP
    if own.exists():
        for line in own.read_text().splitlines():
            if line.startswith("0::"):
                group = _CGROUP / line[3:].lstrip("/")
    while group.is_relative_to(_CGROUP):
        with contextlib.suppress(OSError):
            found.append((group / name).read_text().strip())
        group = group.parent
    return found
