"""A train step so small that each of its arrays can be drawn: one block, on eight devices.

    h = x + gelu(norm(x) up) down,   loss = mean (h - y)^2,   and Adam

From shapes alone: nothing runs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from toolkit.parallel import (
    Blame,
    Layout,
    blame,
    layout,
    make_mesh,
    partitioned_train_step,
)

DEVICES = 8
BATCH, WIDTH, HIDDEN = 1024, 64, 256
MESHES = ("1x8", "2x4", "4x2", "8x1")
SCHEMES = ("data", "zero1", "zero2", "zero3", "tensor", "zero3+tensor")
BLOCK: Any = {
    "norm": {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)},
    "feed_forward": {
        "up": {"kernel": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32)},
        "down": {"kernel": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32)},
    },
}


def axes_of_mesh(mesh: str, scheme: str) -> dict[str, int]:
    """Axes of "2x4": rows are data parallel; columns too, unless the scheme has tensor."""
    rows, columns = map(int, mesh.split("x"))
    names = ("data", "model") if "tensor" in scheme else ("node", "data")
    return dict(zip(names, (rows, columns), strict=True))


def block_layout(mesh: str, scheme: str) -> Layout:
    """The layout of the block on the first eight devices."""
    axes = axes_of_mesh(mesh, scheme)
    return layout(BLOCK, make_mesh(axes, devices=jax.devices()[:DEVICES]), scheme)


def block_loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean squared distance of the block's output from the target; both [batch, width]."""
    x, target = batch
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(variance + 1e-6) * params["norm"]["scale"][None]
    feed_forward = params["feed_forward"]
    hidden = jax.nn.gelu(normed @ feed_forward["up"]["kernel"])
    output = x + hidden @ feed_forward["down"]["kernel"]
    return jnp.mean(jnp.square(output - target))


def step_arguments(found: Layout, optimizer: optax.GradientTransformation) -> tuple[Any, ...]:
    """Shapes of parameters, optimiser's state and batch, placed as a layout says."""
    placed = (
        jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            tree,
            found.shardings(tree),
        )
        for tree in (BLOCK, jax.eval_shape(optimizer.init, BLOCK))
    )
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=found.batch_sharding)
    return *placed, (x, x)


def blame_step(found: Layout) -> Blame:
    """The compiled step under a layout: each collective, its cause, and what would remove it."""
    optimizer = optax.adam(1e-3)
    step = partitioned_train_step(block_loss, optimizer, found)
    arguments = step_arguments(found, optimizer)
    return blame(step.__wrapped__, arguments, results=results_of(found, arguments))


def results_of(found: Layout, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shardings of a step's results: parameters and optimiser state as before, and the loss."""
    state = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    return *state, jax.NamedSharding(found.mesh, jax.P())
