r"""A small diffusion transformer on video of moving digits, to test AdaSpa.

    x_t = (1 - t) x + t n        v(x_t, t) ~ n - x        (rectified flow; t = 1 is noise alone)

A digit of seven segments moves at a constant speed and turns at the edges. A token is a patch of
one frame, and every token sees all of them. `trajectory` draws a video in a few steps of Euler's
method and keeps what attention worked on in each; `python -m toolkit.experiments.sparse.video PATH`
trains the model.

Source: Liu et al. (2022), arXiv:2209.03003; Peebles and Xie (2022), arXiv:2212.09748, for adaLN.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from toolkit.experiments.sparse.model import EPSILON, Params, Seen, descend, save
from toolkit.experiments.sparse.model import FILE as RETRIEVAL
from toolkit.looped.layers import normalised
from toolkit.measure import environment

FRAMES, SIDE, PATCH = 8, 16, 2
ROWS = SIDE // PATCH
TOKENS = FRAMES * ROWS * ROWS
WIDTH, HEADS, LAYERS = 64, 4, 3
STEPS, BATCH, RATE, WARMUP, TOGETHER = 300, 8, 3e-3, 30, 25
DENOISING = 12  # steps of a trajectory
FILE = RETRIEVAL.with_name("video.safetensors")

# Of a digit's segments (top, middle, bottom; left and right above, left and right below), which
# are lit.
_LIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
_HIGH, _WIDE = 7, 5
_PLACES = {
    "a": np.s_[0, :], "g": np.s_[3, :], "d": np.s_[6, :],
    "f": np.s_[:4, 0], "b": np.s_[:4, -1], "e": np.s_[3:, 0], "c": np.s_[3:, -1],
}  # fmt: skip


def _digits() -> np.ndarray:
    bitmaps = np.full((len(_LIT), _HIGH, _WIDE), -1, np.float32)
    for bitmap, lit in zip(bitmaps, _LIT, strict=True):
        for segment in lit:
            bitmap[_PLACES[segment]] = 1
    return bitmaps


class Trajectory(NamedTuple):
    """A video drawn from noise, and the inputs of attention in every step.

    Attributes:
        seen: queries, keys and values [steps, layers, tokens, heads, size].
        video: [frames, side, side], -1 to 1.
    """

    seen: Seen
    video: Float[Array, "frames side side"]


def videos(key: Array, batch: int) -> Float[Array, "batch frames side side"]:
    """Digits that move and turn at the edges, 1 on -1."""
    which, where, speed = jax.random.split(key, 3)
    digit = jax.random.randint(which, (batch, 1, 1, 1), 0, len(_LIT))
    room = jnp.array([[[SIDE - _HIGH, SIDE - _WIDE]]], jnp.float32)
    first = jax.random.uniform(where, (batch, 1, 2)) * room
    step = jax.random.uniform(speed, (batch, 1, 2), minval=-2.0, maxval=2.0)
    place = first + step * jnp.arange(FRAMES, dtype=jnp.float32)[None, :, None]
    place = room - jnp.abs(place % (2 * room) - room)
    corner = jnp.round(place).astype(jnp.int32)[..., None, None, :]
    pixel = jnp.arange(SIDE)
    row = pixel[None, None, :, None] - corner[..., 0]
    column = pixel[None, None, None] - corner[..., 1]
    inside = (row >= 0) & (row < _HIGH) & (column >= 0) & (column < _WIDE)
    return jnp.where(inside, jnp.asarray(_digits())[digit, row, column], -1)


def patches(x: Float[Array, "batch frames side side"]) -> Float[Array, "batch tokens pixels"]:
    """A video as tokens, frame by frame and row by row."""
    x = x.reshape(-1, FRAMES, ROWS, PATCH, ROWS, PATCH)
    return jnp.moveaxis(x, 3, 4).reshape(-1, TOKENS, PATCH**2)


def unpatched(x: Float[Array, "batch tokens pixels"]) -> Float[Array, "batch frames side side"]:
    """Tokens as a video."""
    x = jnp.moveaxis(x.reshape(-1, FRAMES, ROWS, ROWS, PATCH, PATCH), 4, 3)
    return x.reshape(-1, FRAMES, SIDE, SIDE)


def initial(seed: int) -> Params:
    """Parameters drawn at 1 / sqrt of what they multiply; what a block adds begins at nothing."""
    shapes = {"patch": (PATCH**2, WIDTH), "time": (WIDTH, WIDTH), "head": (WIDTH, PATCH**2)}
    shapes |= {name: (size, WIDTH) for name, size in _AXES.items()}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        shapes |= {f"{layer}.up": (WIDTH, 2 * WIDTH), f"{layer}.down": (2 * WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {f"{n}.modulation": jnp.zeros((WIDTH, 6 * WIDTH)) for n in range(LAYERS)}


_AXES = {"frame": FRAMES, "row": ROWS, "column": ROWS}


def forward(
    params: Params, x: Float[Array, "batch tokens pixels"], t: Float[Array, "batch"]
) -> tuple[Float[Array, "batch tokens pixels"], list[Seen]]:
    """The velocity at time t, and what the layers' attention worked on."""
    waves = t[:, None] * 100 * 0.01 ** jnp.linspace(0, 1, WIDTH // 2)[None]
    known = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=1)
    known = jax.nn.silu(known @ params["time"])
    place = (params["row"][:, None] + params["column"][None])[None]
    place = params["frame"][:, None, None] + place
    x, seen = x @ params["patch"] + place.reshape(1, TOKENS, WIDTH), []
    for n in range(LAYERS):
        changes = jnp.split((known @ params[f"{n}.modulation"])[:, None], 6, axis=-1)
        shift, scale, gate, shift_2, scale_2, gate_2 = changes
        y = normalised(x, EPSILON) * (1 + scale) + shift
        rows = (y @ params[f"{n}.{name}"] for name in ("query", "key", "value"))
        seen.append(Seen(*(r.reshape(*r.shape[:2], HEADS, -1) for r in rows)))
        out = jax.nn.dot_product_attention(*seen[-1]).reshape(x.shape)
        x = x + gate * (out @ params[f"{n}.out"])
        y = normalised(x, EPSILON) * (1 + scale_2) + shift_2
        x = x + gate_2 * (jax.nn.gelu(y @ params[f"{n}.up"]) @ params[f"{n}.down"])
    return normalised(x, EPSILON) @ params["head"], seen


@partial(jax.jit, static_argnums=2)
def trajectory(params: Params, key: Array, steps: int = DENOISING) -> Trajectory:
    """A video from noise, in equal steps of Euler's method from t = 1 to 0."""

    def step(x, t):
        v, seen = forward(params, x, t[None])
        return x - v / steps, jax.tree.map(lambda *rows: jnp.concatenate(rows), *seen)

    noise = jax.random.normal(key, (1, TOKENS, PATCH**2))
    x, seen = jax.lax.scan(step, noise, 1 - jnp.arange(steps, dtype=jnp.float32) / steps)
    return Trajectory(seen, unpatched(x)[0])


def train(seed: int = 0, steps: int = STEPS) -> tuple[Params, list[float]]:
    """The model of a seed, and its mean loss in every `TOGETHER` steps."""

    def loss(params, key):
        for_video, for_time, for_noise = jax.random.split(key, 3)
        x = patches(videos(for_video, BATCH))
        t, noise = jax.random.uniform(for_time, (BATCH,)), jax.random.normal(for_noise, x.shape)
        mixed = x + t[:, None, None] * (noise - x)
        return jnp.mean(jnp.square(forward(params, mixed, t)[0] - (noise - x)))

    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, steps)
    params, losses = descend(loss, initial(seed), schedule, seed, steps, TOGETHER)
    return params, losses.reshape(-1, TOGETHER).mean(axis=1).tolist()


def main(path: Path) -> None:
    """Train and write the model of seed 0."""
    begun, used = time.perf_counter(), time.process_time()
    params, losses = train()
    record = {
        **environment(),
        "command": f"python -m toolkit.experiments.sparse.video data/models/{path.name}",
        "steps": STEPS,
        "seconds": round(time.perf_counter() - begun, 1),
        "processor seconds": round(time.process_time() - used, 1),
        "loss": [round(loss, 4) for loss in losses],
    }
    save(params, path, record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
