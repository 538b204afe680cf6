"""Tensor parallelism over slow links: a star of messages, and weights that pass through a window.

Where a message's delay outweighs its bytes, fewer hops win: TPI-LLM sends every part to one device
and the sum back, two hops instead of a ring's 2 (n - 1). Weights that do not fit are loaded while
others compute: a window of two blocks hides the loading as far as computing takes, and a wider one
helps only where times vary.
"""

import math
from typing import Annotated, Literal

import jax
from jaxtyping import Array, Float

from toolkit._annotations import AtLeast, Positive
from toolkit._checks import checked
from toolkit.parallel.axes import devices_along


@checked
def all_reduce_seconds(
    size: float, devices: int, delay: float, rate: float, *, shape: Literal["star", "ring", "tree"]
) -> float:
    """Seconds of an all-reduce whose root, in a star, takes messages one after another (modelled).

        star  2 (a + (n - 1) M / b)
        ring  2 (n - 1) (a + M / (n b))
        tree  2 ceil(log2 n) (a + M / b)

    Args:
        size: M, bytes of the sum.
        devices: n.
        delay: a, seconds per message.
        rate: b, bytes per second of a link.
        shape: who sends to whom.

    Returns:
        Seconds.

    Source: TPI-LLM, 2024 (arXiv:2410.00531), section on the star; ours lets the root's link carry
        one message at a time.

    Example:
        >>> round(1e3 * all_reduce_seconds(32768, 4, 1e-3, 37.5e6, shape="star"), 3)
        7.243
    """
    if devices < 1 or min(size, delay) < 0 or rate <= 0:
        raise ValueError(
            f"size, devices, delay, rate: got {size}, {devices}, {delay} and {rate}; wanted at "
            "least 0, 1, 0 and more than 0"
        )
    if devices == 1:
        return 0.0
    return {
        "star": 2 * (delay + (devices - 1) * size / rate),
        "ring": 2 * (devices - 1) * (delay + size / (devices * rate)),
        "tree": 2 * math.ceil(math.log2(devices)) * (delay + size / rate),
    }[shape]


@checked
def window_seconds(
    blocks: Annotated[int, AtLeast(1)], loading: Annotated[float, Positive()],
    computing: Annotated[float, Positive()], window: Annotated[int, AtLeast(1)],
) -> float:  # fmt: skip
    """Seconds per token of a model whose blocks pass through a window of memory (modelled).

    blocks max(loading, computing) for a window of at least two, which holds that many blocks;
    blocks (loading + computing) for one; blocks computing if the window holds all.

    Args:
        blocks: of the model.
        loading, computing: seconds of a block.
        window: blocks in memory.

    Returns:
        Seconds.

    Source: TPI-LLM, 2024 (arXiv:2410.00531), section on the sliding window of weights.

    Example:
        >>> round(window_seconds(80, 0.03, 0.02, 2), 3), round(window_seconds(80, 0.03, 0.02, 1), 3)
        (2.4, 4.0)
    """
    if window >= blocks:
        return blocks * computing
    return blocks * (max(loading, computing) if window > 1 else loading + computing)


@checked
def window_bytes(
    blocks: Annotated[int, AtLeast(1)], block: Annotated[float, Positive()],
    window: Annotated[int, AtLeast(1)], cache: float = 0.0,
) -> float:  # fmt: skip
    """Bytes in memory of a model whose blocks pass through a window: window blocks and the cache.

    Args:
        blocks: of the model.
        block: bytes of one, of a device's share.
        window: blocks in memory.
        cache: bytes of keys and values, of a device's share.

    Returns:
        Bytes (modelled), without embeddings and buffers.

    Source: TPI-LLM, 2024 (arXiv:2410.00531), which reports 3.1 GB per device for 70B.

    Example:
        >>> window_bytes(80, 0.4e9, 2, cache=0.1e9) / 1e9
        0.9
    """
    return min(window, blocks) * block + cache


@checked
def star_all_reduce(x: Float[Array, "..."], axis: str) -> Float[Array, "..."]:
    """The sum over an axis of the mesh by way of its first device, inside `shard_map`.

    Every other device sends its part there, parts are added in order, and the sum is sent back: the
    result is the same to the bit on every device.

    Args:
        x: this device's part.
        axis: of the mesh.

    Returns:
        The sum.

    Cost: 2 (n - 1) messages of the size of x through the first device's link.

    Source: TPI-LLM, 2024 (arXiv:2410.00531).

    Example:
        >>> star = lambda x: star_all_reduce(x, "device")  # of a single device
        >>> jax.vmap(star, axis_name="device")(jnp.ones(1)).tolist()
        [1.0]
    """
    count, total = devices_along(axis), x
    for other in range(1, count):
        total = total + jax.lax.ppermute(x, axis, [(other, 0)])
    found = total
    for other in range(1, count):
        sent = jax.lax.ppermute(total, axis, [(0, other)])
        found = jax.numpy.where(jax.lax.axis_index(axis) == other, sent, found)
    return found
