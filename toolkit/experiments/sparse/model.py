"""The retrieval model: two small layers that find needles, trained within two minutes.

    x_t = W [e_t, e_(t-1)]        twice: x += W_o attention(norm x);  x += W_2 gelu(W_1 norm x)

A token is joined with the one before it (the shift), so that one layer of attention can match a
requested key with the token after it. There are no positions, so that texts may be longer than in
training. Two key heads have one or four query heads each (`FILES`). Made by
`python -m toolkit.experiments.sparse.model FILE`.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from toolkit.attention import softmax_attention
from toolkit.experiments.tasks import Retrieval
from toolkit.looped.layers import normalised
from toolkit.measure import environment

WIDTH, HEADS, LAYERS = 64, 2, 2  # heads of keys
SIZE = WIDTH // HEADS
TASK = Retrieval(pairs=16, length=128, queries=16)
EPSILON = 1e-6
STEPS, BATCH, RATE, WARMUP, TOGETHER = 400, 32, 3e-3, 50, 50
FILE = Path(__file__).parents[3] / "data/models/retrieval.safetensors"
FILES = {1: FILE, 4: FILE.with_stem("retrieval-4")}  # by query heads per key head

Params = dict[str, Array]


class Seen(NamedTuple):
    """Queries, keys and values of one layer.

    Attributes:
        q, k, v: [batch, time, heads, size].
    """

    q: Float[Array, "batch time heads size"]
    k: Float[Array, "batch time heads size"]
    v: Float[Array, "batch time heads size"]


def initial(seed: int, group: int = 1) -> Params:
    """Parameters drawn at 1 / sqrt of what they multiply; the embedding at 1."""
    vocabulary, inner = TASK.vocabulary, 2 * WIDTH
    shapes: dict[str, tuple[int, int]] = {"shift": (2 * WIDTH, WIDTH), "head": (WIDTH, vocabulary)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.query": (WIDTH, group * WIDTH)}
        shapes |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in ("key", "value")}
        shapes |= {f"{layer}.out": (group * WIDTH, WIDTH)}
        shapes |= {f"{layer}.up": (WIDTH, inner), f"{layer}.down": (inner, WIDTH)}
    drawn = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    params = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(drawn[1:], shapes.items(), strict=True)
    }
    return {"embedding": jax.random.normal(drawn[0], (vocabulary, WIDTH)), **params}


def start(params: Params, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time width"]:
    """Each token beside the one before it."""
    e = params["embedding"][tokens]
    earlier = jnp.pad(e, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([e, earlier], axis=-1) @ params["shift"]


def project(params: Params, layer: int, x: Float[Array, "batch time width"]) -> Seen:
    """Queries, keys and values of a layer."""
    x = normalised(x, EPSILON)
    rows = (x @ params[f"{layer}.{name}"] for name in ("query", "key", "value"))
    return Seen(*(y.reshape(*x.shape[:2], -1, SIZE) for y in rows))


def finish(params: Params, layer: int, x: Array, out: Array) -> Array:
    """The stream after a layer whose attention gave `out` [batch, time, heads, size]."""
    x = x + out.reshape(*x.shape[:2], -1) @ params[f"{layer}.out"]
    return x + jax.nn.gelu(normalised(x, EPSILON) @ params[f"{layer}.up"]) @ params[f"{layer}.down"]


def logits(params: Params, x: Float[Array, "... width"]) -> Float[Array, "... vocabulary"]:
    """What comes next."""
    return normalised(x, EPSILON) @ params["head"]


def forward(params: Params, tokens: Int[Array, "batch time"]) -> tuple[Array, list[Seen]]:
    """Logits [batch, time, vocabulary], and what the layers' attention worked on."""
    x, seen = start(params, tokens), []
    for layer in range(LAYERS):
        seen.append(project(params, layer, x))
        x = finish(params, layer, x, softmax_attention(*seen[-1])[0])
    return logits(params, x), seen


def train(group: int = 1, seed: int = 0, steps: int = STEPS) -> tuple[Params, list[float]]:
    """The model of a seed, and its loss every `TOGETHER` steps."""

    def loss(params, key):
        batch = TASK.draw(key, BATCH)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            forward(params, batch.tokens)[0], batch.targets
        )
        return jnp.where(batch.mask, losses, 0).sum() / batch.mask.sum()

    schedule = optax.linear_schedule(0.0, RATE, WARMUP)
    params, losses = descend(loss, initial(seed, group), schedule, seed, steps, TOGETHER)
    return params, losses[TOGETHER - 1 :: TOGETHER].tolist()


def descend(
    loss: Callable[[Params, Array], Array],
    params: Params,
    schedule: optax.Schedule,
    seed: int,
    steps: int,
    together: int,
) -> tuple[Params, Float[np.ndarray, "steps"]]:
    """Adam on a loss of (parameters, key), `together` steps per call; and the loss of each."""
    optimizer = optax.adam(schedule)

    def update(state, step):
        params, moments = state
        key = jax.random.fold_in(jax.random.key(seed), step)
        value, gradient = jax.value_and_grad(loss)(params, key)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    run = jax.jit(lambda state, steps: jax.lax.scan(update, state, steps))
    state, losses = (params, optimizer.init(params)), []
    for first in range(0, steps, together):
        state, values = run(state, first + jnp.arange(together))
        losses.append(values)
    return state[0], np.concatenate(losses)


def accuracy(params: Params, task: Retrieval, seed: int, batch: int = 64) -> float:
    """Share of right answers on fresh sequences."""
    drawn = task.draw(jax.random.key(seed + 1_000_003), batch)
    found = jax.jit(forward)(params, drawn.tokens)[0].argmax(axis=-1)
    return float(((found == drawn.targets) & drawn.mask).sum() / drawn.mask.sum())


def save(params: Params, path: Path, record: dict[str, Any]) -> None:
    """Write the parameters in float16, and beside them how they were made."""
    from safetensors.flax import save_file

    save_file({name: x.astype(jnp.float16) for name, x in sorted(params.items())}, path)
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def load(path: Path = FILE) -> Params:
    """The parameters in a file, in float32."""
    from safetensors.numpy import load_file

    # Converted in NumPy, which compiles no program per shape.
    return {name: jnp.asarray(x.astype(np.float32)) for name, x in load_file(path).items()}


def main(path: Path) -> None:
    """Train and write the model of seed 0."""
    begun = time.perf_counter()
    group = next(group for group, file in FILES.items() if file.name == path.name)
    params, losses = train(group)
    seconds = time.perf_counter() - begun
    record = {
        **environment(),
        "command": f"python -m toolkit.experiments.sparse.model data/models/{path.name}",
        "query heads per key head": group,
        "steps": STEPS,
        "seconds": round(seconds, 1),
        "loss": [round(loss, 4) for loss in losses],
        "accuracy": accuracy(params, TASK, 0),
        "accuracy at 1024 tokens, 64 pairs": accuracy(params, Retrieval(64, 1024, 32), 0, batch=4),
    }
    save(params, path, record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
