"""Eight devices for the lessons on sharding: real ones where there are, else simulated ones."""

import os

import jax
from jax.sharding import Mesh

from toolkit.lab.lessons.outline import WrongAnswer
from toolkit.parallel import make_mesh, simulate_devices

DEVICES = 8


def find_devices() -> str:
    """Make jax show eight devices; says what they are. Call it before the first array."""
    if "TPU_ACCELERATOR_TYPE" not in os.environ:  # Kaggle's TPU machines say it
        simulate_devices(DEVICES)
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{len(devices)} simulated devices: bytes are exact, durations mean nothing"
    return f"{len(devices)} devices: {devices[0].device_kind}"


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the eight devices, or a wrong answer where there are fewer."""
    if len(jax.devices()) < DEVICES:
        raise WrongAnswer(
            f"jax runs with {len(jax.devices())} device(s); restart the kernel and run the first "
            "cell before anything else."
        )
    return make_mesh(axes, devices=jax.devices()[:DEVICES])
