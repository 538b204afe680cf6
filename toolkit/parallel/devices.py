"""Simulated devices: jax sees one CPU as several devices.

Simulated devices run the same programs and collectives as real ones on one processor. Results,
communication and memory are exact; times mean nothing unless each has its own core.
"""

import jax

from toolkit._checks import checked
from toolkit.attention.execution.cores import set_cores
from toolkit.measure import available_cores


@checked
def use_cores(count: int | None = None) -> int:
    """Let token mixers use all cores of a CPU. Call it before anything else.

    XLA's CPU backend spreads large products over cores, but runs a scan, and so a mixer, on one.
    After this call every core is a jax device, and a mixer divides its sequences, or else its
    heads, among them if their number allows it; inside and outside `jax.jit`, values and gradients.
    Programs with their own shardings (under `jax.set_mesh` or in `jax.shard_map`) and everything on
    GPUs and TPUs are unchanged.

    Args:
        count: cores to use; None for all physical cores of this process, 1 to return to one core.

    Returns:
        The number of cores that mixers now use; 1 if jax's default device is not a CPU.

    Raises:
        RuntimeError: when jax has already started with fewer devices.

    Cost: Small calls take a few tenths of a millisecond longer. jax refuses arrays that were put on
        one device by name (`jax.device_put(x, device)`). Results of a program with mixers are on
        all cores, so a training step that takes its state in again is compiled twice, unless the
        state began there: `data_parallel(params, make_mesh({"data": cores})).apply(state)`.

    Example:
        >>> use_cores() >= 1
        True
    """
    count = available_cores() if count is None else count
    _show_cpu_as(count, "use_cores")
    is_cpu = jax.default_backend() == "cpu"
    set_cores(jax.local_devices()[:count] if is_cpu else None)
    return count if is_cpu else 1


@checked
def simulate_devices(count: int) -> None:
    """Make jax show this machine's CPU as `count` devices. Call it before anything else.

    jax fixes its devices when the first array is made, so the call must come before that. The CPU
    becomes the default platform, even on a machine with a GPU.

    Args:
        count: number of devices wanted, at least 1.

    Raises:
        RuntimeError: when jax has already started with another number of devices.

    Example:
        >>> simulate_devices(8)
        >>> len(jax.devices())
        8
    """
    if _show_cpu_as(count, "simulate_devices", is_exact=True):
        jax.config.update("jax_platforms", "cpu")


def _show_cpu_as(count: int, caller: str, *, is_exact: bool = False) -> bool:
    """Set the number of CPU devices; False if jax already runs with as many or more."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: want an integer of at least 1")
    try:
        # jax refuses this update once its backend runs, which is the public way to find out.
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        devices = jax.devices()
        if len(devices) == count or (len(devices) > count and not is_exact):
            return False
        raise RuntimeError(
            f"{caller}({count}) came too late: jax already runs with {len(devices)} "
            f"{devices[0].platform} device(s). Call it right after the imports, before the first "
            "array (in a notebook: restart the kernel and run this cell first)."
        ) from error
    return True
