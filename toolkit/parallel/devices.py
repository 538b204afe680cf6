"""Several devices where there is one: the CPU shows itself to jax as many.

Simulated devices run the same programs and the same collectives as real ones, on shares of one
processor. What they compute, communicate and hold is exact; how long they take means nothing.
"""

import jax


def simulate_devices(count: int) -> None:
    """Makes jax show this machine's CPU as `count` devices. Call it before anything else.

    jax fixes its devices the first time it is asked for one (any array does), so the call must
    come before that. The CPU becomes the default platform, also on a machine with a GPU.

    Args:
        count: number of devices wanted, at least 1.

    Raises:
        ValueError: count < 1.
        RuntimeError: jax has already started with another number of devices.

    Example:
        >>> simulate_devices(8)
        >>> len(jax.devices())
        8
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: want an integer of at least 1")
    try:
        # jax refuses this update once its backend runs: the public way to know that it does.
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        devices = jax.devices()
        if len(devices) == count:
            return
        raise RuntimeError(
            f"simulate_devices({count}) came too late: jax already runs with {len(devices)} "
            f"{devices[0].platform} device(s). Call it right after the imports, before the first "
            "array (in a notebook: restart the kernel and run this cell first)."
        ) from error
    jax.config.update("jax_platforms", "cpu")
