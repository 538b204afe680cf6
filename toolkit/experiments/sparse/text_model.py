"""The text models: bytes of code, eight query heads on two key heads or on one, made in minutes.

Layers are "conv full full", and half of the query heads of the first softmax layer begin as
induction heads, which models of this size otherwise do not learn in so short a time: the
convolution sums the `LOOK` bytes up to a place and, in other channels, those before it; a query is
the former, a key the latter, so that a key is the query of the place before; the value is the byte.

    ask_t = sum_(i < LOOK) s_i * (R e_(t-i))     answer_t = ask_(t-1)     s_i: signs, drawn
    q_t = P ask_t     k_t = P answer_t     v_t = e_t     what was read says the next byte

So a byte is continued as it was where the same bytes stood before. All of it is trained further.
Half of the training's sequences quote themselves: excerpts of `QUOTE` bytes stand again, later. Of
a head's channels, one in eight turns with the position. Made by

    python -m toolkit.experiments.sparse.text_model FILE FOLDER

and resumed by the same command, from the checkpoints in FOLDER.

Source: Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv:2209.11895; Trockman
and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023, arXiv:2305.09828.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from toolkit.experiments.sparse.model import FILE as RETRIEVAL
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

LOOK, PART = 7, 32  # bytes that a query compares; channels of each of the stream's four parts
CONFIG = LoopedConfig(
    vocabulary=256,
    width=4 * PART,
    pattern="conv full full",
    heads=8,
    feed_forward=256,
    residual_gate=False,
    tied_embedding=False,
    options={
        "full": {"key_value_heads": 2, "head_size": PART, "rotary_fraction": 0.125},
        "conv": {"convolution_size": LOOK + 1, "biases": True},
    },
)
FILES = {4: RETRIEVAL.with_name("text.safetensors"), 8: RETRIEVAL.with_name("text-8.safetensors")}
DECAY, SPREAD, SHARPNESS, QUIET = 0.85, 4.0, 32.0, 0.1  # see `initial`
# Bytes, sequences, updates, learning rate.
STAGES = ((256, 16, 120, 3e-3), (1024, 4, 60, 2e-3), (2048, 2, 40, 1e-3))
QUOTE, QUOTES = 48, 3  # bytes of an excerpt, and excerpts in a sequence of 256 bytes
TOGETHER = 4


def initial(seed: int, group: int = 4) -> LoopedLM:
    """The model before its training, with so many query heads per key head.

    The stream has four parts: the byte at a length of `SPREAD`, what was read, asks and answers. In
    these the weight of a byte falls by `DECAY` per place; a key with the same bytes has a score of
    about `SHARPNESS`. What else adds to the stream begins at `QUIET` of its usual size.
    """
    key_heads = CONFIG.heads // group
    model = LoopedLM(CONFIG.with_options(full={"key_value_heads": key_heads}), rngs=nnx.Rngs(seed))
    draw, width = np.random.default_rng(seed), CONFIG.width
    byte, read, ask, answer = (slice(i * PART, (i + 1) * PART) for i in range(4))
    turn = lambda: np.linalg.qr(draw.normal(size=(PART, PART)))[0]  # noqa: E731

    def write(param: Any, *changes: tuple[Any, np.ndarray | float], keep: float) -> None:
        new = keep * np.array(param[...])
        for place, values in changes:
            new[place] += values
        param[...] = jnp.asarray(new, jnp.float32)

    codes = draw.normal(size=(256, PART))
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    write(model.embedding.embedding, (np.s_[:, byte], SPREAD * codes), keep=0)
    write(model.unembedding, (np.s_[:, read], codes), keep=QUIET)
    for block in model.blocks:
        write(block.feed_forward.down.kernel, keep=QUIET)

    conv, mixed = model.blocks[0].mixer, turn()
    asks, answers = (slice(2 * width + part.start, 2 * width + part.stop) for part in (ask, answer))
    write(conv.input.kernel, ((byte, asks), mixed), ((byte, answers), mixed), keep=0)
    write(conv.input.bias, (np.s_[: 2 * width], 1), keep=0)  # both gates are open
    weights = DECAY ** np.arange(LOOK)[::-1, None]
    signs = weights * draw.choice([-1, 1], (LOOK, PART))
    lagged = (np.s_[1:, ask], signs), (np.s_[:-1, answer], signs)
    write(conv.convolution.kernel, *lagged, keep=0)
    write(conv.convolution.bias, keep=0)
    length = np.linalg.norm(weights) * width**0.5 / SPREAD  # a norm precedes the projection
    write(conv.output.kernel, (np.s_[ask.start :, ask.start :], np.eye(2 * PART) / length), keep=0)

    first, second = (block.mixer for block in model.blocks[1:])
    scale = (SHARPNESS * PART**0.5 * 3 / width) ** 0.5
    for name in ("query", "key", "value", "output"):
        write(getattr(first, name).kernel, keep=QUIET)
    write(second.output.kernel, keep=QUIET)
    for key_head in range(key_heads):
        of_key = slice(key_head * PART, (key_head + 1) * PART)
        compared = scale * turn()
        compared[:, : round(first.rotary_fraction * PART)] = 0  # where a match depends on distance
        write(first.key.kernel, ((answer, of_key), compared), keep=1)
        write(first.value.kernel, ((byte, of_key), np.eye(PART)), keep=1)
        for head in range(key_head * group, key_head * group + group // 2):
            of_head = slice(head * PART, (head + 1) * PART)
            write(first.query.kernel, ((ask, of_head), compared), keep=1)
            share = np.eye(PART) * SPREAD * (3 / width) ** 0.5 * 2 / CONFIG.heads
            write(first.output.kernel, ((of_head, read), share), keep=1)
    return model


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


def train(folder: Path, group: int = 4, seed: int = 0) -> tuple[LoopedLM, list[float]]:
    """The model of a seed, and its loss on held-out text after each stage."""
    training, held_out = load_corpus("code").split()
    graph, params = nnx.split(initial(seed, group))
    loss, losses = functools.partial(next_byte_loss, graph), []
    for stage, (length, batch, steps, rate) in enumerate(STAGES):

        def sample(tokens, step, length=length, batch=batch, stage=stage):
            inputs, targets = sample_batch(tokens, step, seed + stage, batch, length)
            rows = jnp.concatenate([inputs, targets[:, -1:]], axis=1)
            key = jax.random.fold_in(jax.random.key(seed + stage + 1_000_003), step)
            quoted = quoting(key, rows[: batch // 2], QUOTES * length // 256)
            rows = jnp.concatenate([quoted, rows[batch // 2 :]])
            return rows[:, :-1], rows[:, 1:]

        recipe = Recipe(steps=steps, learning_rate=rate, weight_decay=0.01)
        state, step = prepare(loss, params, recipe, sample=sample, most_steps=TOGETHER)
        options = FitOptions(
            steps, log_every=TOGETHER, eval_every=steps, checkpoint_every=4 * TOGETHER,
            keep=1, tokens_per_step=batch * length,
        )  # fmt: skip
        result = fit(state, step, jnp.asarray(training), options, directory=folder / str(length))
        if result.stopped_by is not None:
            raise SystemExit(f"stopped by {result.stopped_by}; the same command goes on")
        params = result.state.params
        losses.append(make_evaluation(loss, evaluation_batches(held_out, 2, 1024, 4))(params))
    return nnx.merge(graph, params), losses


def main(path: Path, folder: Path) -> None:
    """Train and write the model of seed 0."""
    begun, used = time.perf_counter(), time.process_time()
    group = next(group for group, file in FILES.items() if file.name == path.name)
    model, losses = train(folder, group)
    save_model(model, path, dtype="float16")
    record = {
        **environment(),
        "command": f"python -m toolkit.experiments.sparse.text_model data/models/{path.name} runs",
        "query heads per key head": group,
        "seconds": round(time.perf_counter() - begun, 1),
        "processor seconds": round(time.process_time() - used, 1),
        "corpus": {key: x for key, x in load_corpus("code").record().items() if key != "files"},
        "stages (bytes, sequences, updates, learning rate)": STAGES,
        "held-out loss after each stage": [round(loss, 4) for loss in losses],
        "unit": "nats per byte",
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
