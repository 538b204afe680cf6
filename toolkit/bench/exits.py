"""Fewer loops for some tokens: tokens per second against the loss of the text, trained here.

Early exits stop a model that was trained to loop for all tokens; Mixture-of-Recursions trains a
router that decides how many loops each token takes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from toolkit.bench.harness import Case, PlannedCase
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    exit_loss,
    generate,
    prefill,
    recursion_depths,
    recursion_loss,
)
from toolkit.looped.decoding.early_exit import append_until_exit, exit_rule
from toolkit.looped.decoding.steps import append
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
TIE = 1e-3
"""Logits that are nearer to each other differ only by rounding."""
ALL = "all loops, no rule"
ROUTED = LoopedConfig.tiny(
    "full full", 3, width=128, prelude="full", coda="full", residual_gate=False,
    tied_embedding=False,
)  # fmt: skip
NO_ROUTER = "all loops, no router"


def cases(cores: int) -> Iterator[PlannedCase]:
    """One model, trained first; every rule writes the same number of tokens. The rows of a batch
    stop after different loops."""
    for batch in (1, BATCH):
        name = f"early exits, {CONFIG.loops} loops, bytes, B={batch} float32"
        yield PlannedCase(name, functools.partial(exits_case, batch=batch))
    routed = f"mixture of recursions, {ROUTED.loops} loops, bytes, B=1 float32"
    yield PlannedCase(routed, recursion_case)


def exits_case(name: str, *, batch: int, config: LoopedConfig = CONFIG, steps: int = STEPS) -> Case:
    """Texts of a batch of rows by one model, by rule."""
    model, tokens = _gated(config, steps), _held_out()
    write = functools.partial(generate, model, tokens[:batch, :PROMPT], WRITTEN)
    contenders: dict[str, Callable[[], Any]] = {ALL: write}
    for rule in RULES:
        contenders[rule] = functools.partial(write, exit=rule)

    def facts() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
        found = {}
        for rule in RULES:
            bits, loops = _quality(model, tokens, exit_rule(rule, model.config))
            longest = loops.reshape(len(loops), -1, batch).max(-1)
            found[rule] = {
                "loss of held-out text": (float(bits), "bit/byte", "measured"),
                "loops per token": (float(loops.mean()), "1", "measured"),
                "loops of a step's longest row": (float(longest.mean()), "1", "measured"),
            }
        return {ALL: found[RULES[0]], **found}

    return Case(
        name=name,
        contenders=contenders,
        check=_same_text,
        ours=ALL,
        note=f"milliseconds for {batch * WRITTEN} bytes; trained here for {steps} steps of "
        f"{BATCH * TIME} bytes. A rule's loss is that of its own caches",
        facts=facts,
    )


@functools.cache
def _gated(config: LoopedConfig, steps: int) -> LoopedLM:
    def loss(model: LoopedLM, *batch: Any) -> jax.Array:
        return exit_loss(model, *batch, entropy_weight=ENTROPY)

    return _trained(config, loss, jnp.asarray(load_corpus().split()[0]), steps)


def _held_out() -> jax.Array:
    _, held_out = load_corpus().split()
    return jnp.asarray(evaluation_batches(held_out, BATCH, TIME, 1)[0][0])


def recursion_case(name: str, base: LoopedConfig = ROUTED, steps: int = STEPS) -> Case:
    """The same model with and without a router, each trained on the same batches."""
    data, tokens = jnp.asarray(load_corpus().split()[0]), _held_out()
    models = {NO_ROUTER: _trained(base, _plain_loss, data, steps)}
    for kind in ("expert", "token"):
        config = dataclasses.replace(base, recursion=kind)
        models[kind] = _trained(config, recursion_loss, data, steps)
    prompt = tokens[:1, :PROMPT]
    contenders: dict[str, Callable[[], Any]] = {
        kind: functools.partial(generate, model, prompt, WRITTEN) for kind, model in models.items()
    }

    def facts() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
        found = {}
        for kind, model in models.items():
            loops = float(base.loops)
            if kind != NO_ROUTER:
                loops = float(recursion_depths(model, tokens)[:, PROMPT:-1].mean())
            found[kind] = {
                "loss of held-out text": (float(_bits(model, tokens)), "bit/byte", "measured"),
                "loops per token": (loops, "1", "measured"),
            }
        return found

    def check(results: Mapping[str, Any]) -> None:
        for kind, model in models.items():
            _check_written(kind, model, prompt, results[kind])

    return Case(
        name=name,
        contenders=contenders,
        check=check,
        ours=NO_ROUTER,
        note=f"milliseconds for {WRITTEN} bytes; three models, trained here for {steps} steps of "
        f"{BATCH * TIME} bytes. Training is not causal with 'expert'; what is timed and read is",
        facts=facts,
    )


def _plain_loss(model: LoopedLM, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
    return losses.mean()


def _check_written(kind: str, model: LoopedLM, prompt: jax.Array, written: jax.Array) -> None:
    """The text is the likeliest by the model's parallel form, except for ties."""
    logits = model(jnp.concatenate([prompt, written], axis=1))[:, PROMPT - 1 : -1]
    chosen = jnp.take_along_axis(logits, written[..., None], axis=-1)[..., 0]
    if not (chosen >= logits.max(-1) - TIE).all():
        raise ValueError(f"{kind!r} wrote another text than the parallel form of its model")


def _trained(
    config: LoopedConfig, of: Callable[..., jax.Array], data: jax.Array, steps: int = STEPS
) -> LoopedLM:
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        return of(nnx.merge(graph, params), *batch)

    sample = functools.partial(sample_batch, seed=0, batch=BATCH, time=TIME)
    optimizer = adamw(RATE)
    step = make_train_step(loss, optimizer, sample=sample, most_steps=steps)
    state, _ = step(TrainState.create(params, optimizer), data, steps)
    return nnx.merge(graph, state.params)


@jax.jit
def _quality(model: LoopedLM, tokens: jax.Array, rule: Any) -> tuple[jax.Array, jax.Array]:
    """Bits per byte, and loops [time, row], of a text that is read step by step under a rule."""
    _, cache = prefill(model, tokens[:, :PROMPT], TIME)

    def read(cache: Any, pair: Any) -> tuple[Any, Any]:
        token, target = pair
        logits, cache, loops = append_until_exit(model, token, cache, rule)
        losses = -jax.nn.log_softmax(logits)[jnp.arange(len(target)), target]
        return cache, (losses.mean() / math.log(2), loops)

    pairs = tokens[:, PROMPT:-1].T, tokens[:, PROMPT + 1 :].T
    _, (losses, loops) = jax.lax.scan(read, cache, pairs)
    return losses.mean(), loops


@jax.jit
def _bits(model: LoopedLM, tokens: jax.Array) -> jax.Array:
    """Bits per byte of a text that is read step by step."""
    _, cache = prefill(model, tokens[:, :PROMPT], TIME)

    def read(cache: Any, pair: Any) -> tuple[Any, Any]:
        logits, cache = append(model, pair[0], cache)
        return cache, -jax.nn.log_softmax(logits)[jnp.arange(BATCH), pair[1]].mean()

    pairs = tokens[:, PROMPT:-1].T, tokens[:, PROMPT + 1 :].T
    return jax.lax.scan(read, cache, pairs)[1].mean() / math.log(2)


def _same_text(results: Mapping[str, Any]) -> None:
    """A gate that never opens changes nothing."""
    if not np.array_equal(results[ALL], results[RULES[0]]):
        raise ValueError(f"{RULES[0]!r} wrote another text than the model without a rule")
