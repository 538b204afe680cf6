"""Early exits of a looped model trained here: tokens per second against the loss of the text."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.bench.harness import Case, PlannedCase
from toolkit.looped import LoopedConfig, LoopedLM, exit_loss, generate, prefill
from toolkit.looped.decoding.early_exit import append_until_exit, exit_rule
from toolkit.training import (
    TrainState,
    adamw,
    evaluation_batches,
    load_corpus,
    make_train_step,
    sample_batch,
)

CONFIG = LoopedConfig.tiny(
    "full full", 4, width=128, exit_gate=True, norm_every_loop=True, sandwich_norm=True,
    residual_gate=False, tied_embedding=False,
)  # fmt: skip
STEPS, BATCH, TIME, RATE, ENTROPY = 300, 8, 128, 3e-3, 0.5
RULES = ("gate:1", "gate:0.9", "gate:0.7", "gate:0.5", "gate:0.3", "kl:0.003", "kl:0.03", "kl:0.3")
PROMPT, WRITTEN = 32, 128
ALL = "all loops, no rule"


def cases(cores: int) -> Iterator[PlannedCase]:
    """One model, trained first; every rule writes the same number of tokens."""
    yield PlannedCase(f"early exits, {CONFIG.loops} loops, bytes, B=1 float32", _case)


def _case(name: str) -> Case:
    train, held_out = load_corpus().split()
    model = _trained(jnp.asarray(train))
    tokens = jnp.asarray(evaluation_batches(held_out, BATCH, TIME, 1)[0][0])
    write = functools.partial(generate, model, tokens[:1, :PROMPT], WRITTEN)
    contenders: dict[str, Callable[[], Any]] = {ALL: write}
    for rule in RULES:
        contenders[rule] = functools.partial(write, exit=rule)

    def facts() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
        found = {}
        for rule in RULES:
            bits, loops = _quality(model, tokens, exit_rule(rule, model.config))
            found[rule] = {
                "loss of held-out text": (float(bits), "bit/byte", "measured"),
                "loops per token": (float(loops), "1", "measured"),
            }
        return {ALL: found[RULES[0]], **found}

    return Case(
        name=name,
        contenders=contenders,
        check=_same_text,
        ours=ALL,
        note=f"milliseconds for {WRITTEN} bytes; trained here for {STEPS} steps of {BATCH * TIME} "
        "bytes. A rule's loss is that of its own caches",
        facts=facts,
    )


def _trained(data: jax.Array) -> LoopedLM:
    graph, params = nnx.split(LoopedLM(CONFIG, rngs=nnx.Rngs(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        return exit_loss(nnx.merge(graph, params), *batch, entropy_weight=ENTROPY)

    sample = functools.partial(sample_batch, seed=0, batch=BATCH, time=TIME)
    optimizer = adamw(RATE)
    step = make_train_step(loss, optimizer, sample=sample, most_steps=STEPS)
    state, _ = step(TrainState.create(params, optimizer), data, STEPS)
    return nnx.merge(graph, state.params)


@jax.jit
def _quality(model: LoopedLM, tokens: jax.Array, rule: Any) -> tuple[jax.Array, jax.Array]:
    """Bits per byte and loops per byte of a text that is read step by step under a rule."""
    _, cache = prefill(model, tokens[:, :PROMPT], TIME)

    def read(cache: Any, pair: Any) -> tuple[Any, Any]:
        token, target = pair
        logits, cache, loops = append_until_exit(model, token, cache, rule)
        losses = -jax.nn.log_softmax(logits)[jnp.arange(len(target)), target]
        return cache, (losses.mean() / math.log(2), loops.mean())

    pairs = tokens[:, PROMPT:-1].T, tokens[:, PROMPT + 1 :].T
    _, (losses, loops) = jax.lax.scan(read, cache, pairs)
    return losses.mean(), loops.mean()


def _same_text(results: Mapping[str, Any]) -> None:
    """A gate that never opens changes nothing."""
    if not np.array_equal(results[ALL], results[RULES[0]]):
        raise ValueError(f"{RULES[0]!r} wrote another text than the model without a rule")
