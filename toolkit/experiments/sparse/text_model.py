"""The text model: bytes of code, eight query heads on two key heads, trained in half an hour.

Layers are "conv full full". The convolution gives a key the bytes before it, so that attention can
continue what stood earlier; turned are two channels of sixteen, so that nearly nothing but the
content places a token, and a text may be longer than most of the training. Half of the training's
sequences quote themselves: excerpts of `QUOTE` bytes stand again, later. Made by

    python -m toolkit.experiments.sparse.text_model FILE FOLDER

and resumed by the same command, from the checkpoints in FOLDER.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM, save_model
from toolkit.measure import environment
from toolkit.training import (
    FitOptions,
    evaluation_batches,
    fit,
    load_corpus,
    make_evaluation,
    sample_batch,
)
from toolkit.training.recipe import Recipe, prepare

CONFIG = LoopedConfig(
    vocabulary=256,
    width=128,
    pattern="conv full full",
    loops=1,
    heads=8,
    options={
        "full": {"key_value_heads": 2, "rotary_fraction": 0.125},
        "conv": {"convolution_size": 8},
    },
)
STAGES = ((256, 16, 360, 4e-3), (2048, 2, 16, 1e-3))  # bytes, sequences, updates, learning rate
QUOTE, QUOTES = 48, 3  # bytes of an excerpt, and excerpts in a sequence of 256 bytes
TOGETHER = 4


def quoting(key: Array, rows: Int[Array, "batch time"], quotes: int) -> Int[Array, "batch time"]:
    """Rows in which excerpts of the part before a place stand again at that place."""

    def quote(row: Array, key: Array) -> tuple[Array, None]:
        for_end, for_start = jax.random.split(key)
        end = jax.random.randint(for_end, (), 2 * QUOTE, row.size - QUOTE + 1)
        start = jax.random.randint(for_start, (), 0, end - QUOTE)
        excerpt = jax.lax.dynamic_slice_in_dim(row, start, QUOTE)
        return jax.lax.dynamic_update_slice_in_dim(row, excerpt, end, axis=0), None

    def one_row(row: Array, key: Array) -> Array:
        return jax.lax.scan(quote, row, jax.random.split(key, quotes))[0]

    return jax.vmap(one_row)(rows, jax.random.split(key, len(rows)))


def train(folder: Path, seed: int = 0) -> tuple[LoopedLM, list[float]]:
    """The model of a seed, and its loss on held-out text after each stage."""
    training, held_out = load_corpus("code").split()
    graph, params = nnx.split(LoopedLM(CONFIG, rngs=nnx.Rngs(seed)))
    loss, losses = functools.partial(next_byte_loss, graph), []
    for stage, (time, batch, steps, rate) in enumerate(STAGES):

        def sample(tokens, step, time=time, batch=batch, stage=stage):
            inputs, targets = sample_batch(tokens, step, seed + stage, batch, time)
            rows = jnp.concatenate([inputs, targets[:, -1:]], axis=1)
            key = jax.random.fold_in(jax.random.key(seed + stage + 1_000_003), step)
            quoted = quoting(key, rows[: batch // 2], QUOTES * time // 256)
            rows = jnp.concatenate([quoted, rows[batch // 2 :]])
            return rows[:, :-1], rows[:, 1:]

        recipe = Recipe(steps=steps, learning_rate=rate, weight_decay=0.01)
        state, step = prepare(loss, params, recipe, sample=sample, most_steps=TOGETHER)
        options = FitOptions(
            steps, log_every=TOGETHER, eval_every=steps, checkpoint_every=4 * TOGETHER,
            keep=1, tokens_per_step=batch * time,
        )  # fmt: skip
        result = fit(state, step, jnp.asarray(training), options, directory=folder / str(time))
        if result.stopped_by is not None:
            raise SystemExit(f"stopped by {result.stopped_by}; the same command goes on")
        params = result.state.params
        losses.append(make_evaluation(loss, evaluation_batches(held_out, 2, 1024, 4))(params))
    return nnx.merge(graph, params), losses


def main(path: Path, folder: Path) -> None:
    """Train and write the model of seed 0."""
    model, losses = train(folder)
    save_model(model, path, dtype="float16")
    record = {
        **environment(),
        "command": f"python -m toolkit.experiments.sparse.text_model data/models/{path.name} runs",
        "corpus": {key: x for key, x in load_corpus("code").record().items() if key != "files"},
        "stages": [
            dict(
                zip(
                    ("bytes", "sequences", "updates", "learning rate"),
                    stage,
                    strict=True,
                )
            )
            for stage in STAGES
        ],
        "held-out loss after each stage": [round(loss, 4) for loss in losses],
        "unit": "nats per byte",
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
