"""Eight devices for the lessons on sharding: real ones where there are, else simulated ones."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from toolkit.lab.lessons.outline import WrongAnswer
from toolkit.measure import collectives, in_words, time_contenders
from toolkit.parallel import make_mesh, simulate_devices

DEVICES = 8
MODELLED = "v5e:8"  # what Kaggle lends


def find_devices() -> str:
    """Make jax show eight devices; says what they are. Call it before the first array."""
    if "TPU_ACCELERATOR_TYPE" not in os.environ:  # Kaggle's TPU machines say it
        simulate_devices(DEVICES)
    return described(jax.devices())


def described(devices: Sequence[Any]) -> str:
    """What the devices are, and whether times on them are measured."""
    if devices[0].platform == "cpu":
        return f"{len(devices)} simulated devices: bytes are exact, times are modelled"
    return f"{len(devices)} devices, {devices[0].device_kind}: times are measured"


def how_long(program: Any, device: Any = None) -> str:
    """The time of a compiled program: measured on real devices, modelled for TPUs elsewhere."""
    device = jax.devices()[0] if device is None else device
    if device.platform != "cpu":
        arguments = jax.tree.map(_ones, program.args_info[0], program.input_shardings[0])
        timing = time_contenders({"it": lambda: program(*arguments)}, rounds=9)["it"]
        return f"{in_words(timing.median, 'seconds')} (measured; {device.device_kind})"
    from toolkit.planning import Constants, cluster
    from toolkit.planning.time.step import transfer_seconds

    where, constants = cluster(MODELLED), Constants()
    messages = sum(
        each.count * transfer_seconds(
            where.link(1, each.group_size), each.total_bytes_sent / each.count, each.group_size,
            constants,
        )
        for each in collectives(program)
    )  # fmt: skip
    # The published rate is that of bfloat16, in which TPUs multiply float32 unless told otherwise.
    products = program.cost_analysis()["flops"] / (where.chip.flops_per_second * constants.matmul)
    parts = f"{in_words(products, 'seconds')} of products, {in_words(messages, 'seconds')} of"
    return f"{in_words(products + messages, 'seconds')} (modelled for {MODELLED}: {parts} messages)"


def _ones(argument: Any, sharding: Any) -> jax.Array:
    make = jax.jit(lambda: jnp.ones(argument.shape, argument.dtype), out_shardings=sharding)
    return make()


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the eight devices, or a wrong answer where there are fewer."""
    if len(jax.devices()) < DEVICES:
        raise WrongAnswer(
            f"jax runs with {len(jax.devices())} device(s); restart the kernel and run the first "
            "cell before anything else."
        )
    return make_mesh(axes, devices=jax.devices()[:DEVICES])
