"""The rules of the arena of carried rates: a model and an optimiser for each, at any size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from toolkit.experiments.lr.sources import (
    Workload,
    characters,
    cross_entropy,
    draw_windows,
    windows,
)
from toolkit.experiments.lr.training import LaneTrainer
from toolkit.lr import Transfer, transfer, transferred_weights

SMALL = (64, 2)  # width, layers
STANDARD, MUP, COUPLED, LONG = "standard", "muP", "muP, coupled", "long warm-up"
SPHERE = "hypersphere"
RULES = (STANDARD, MUP, COUPLED, LONG, SPHERE)
BATCH, SEQUENCE = 8, 64
DECAY = 0.3  # times the rate; over a run it takes most of a weight at the higher rates
HEAD = 32
HELD_OUT = 256  # windows


@functools.lru_cache(maxsize=1)
def rule_trainer(rule: str, width: int, layers: int) -> LaneTrainer:
    """One model and rule; a rate multiplies the optimiser's updates."""
    text, vocabulary, sha256 = characters()
    cut = windows(text, SEQUENCE)
    small = _weights(_config(SMALL[0], layers, vocabulary), jax.random.key(0))
    shapes = jax.eval_shape(lambda: _weights(_config(width, layers, vocabulary), jax.random.key(0)))
    is_scaled = rule in (MUP, COUPLED)
    moved = transfer(small, shapes, width=width / SMALL[0], depth=layers / SMALL[1])
    changes = {"head_scale": moved.logits} if is_scaled else {}
    if is_scaled or rule == SPHERE:
        changes["residual_scale"] = moved.residual
    config = _config(width, layers, vocabulary, **changes)
    model = _abstract(config)

    def init(key: Array) -> Any:
        weights = _weights(config, key)
        own = _weights(_config(SMALL[0], layers, vocabulary), key)
        return transferred_weights(own, weights) if is_scaled else weights

    norms = jax.tree.map(jnp.linalg.norm, init(jax.random.key(0))) if rule == SPHERE else None

    def loss(params: Any, batch: Array) -> Array:
        if rule == SPHERE:
            params = jax.tree.map(on_sphere, params, moved.roles, norms)
        graph, state = model
        state = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state)(batch[:, :-1]), batch[:, 1:])

    problem = Workload(
        "transfer", "characters", BATCH, init, loss, cut["training"],
        functools.partial(draw_windows, length=SEQUENCE, batch_size=BATCH),
        cut["validation"][:HELD_OUT], cut["test"][:HELD_OUT], sha256,
    )  # fmt: skip
    return LaneTrainer(problem, rule_optimizer(rule, moved))


def _config(width: int, layers: int, vocabulary: int, **changes: float) -> Any:
    from toolkit.looped import LoopedConfig

    return LoopedConfig.tiny(
        " ".join(["full"] * layers), loops=1, vocabulary=vocabulary, width=width,
        heads=width // HEAD, feed_forward=2 * width, residual_gate=False,
        embedding_std=0.1, **changes,
    )  # fmt: skip


def _abstract(config: Any) -> tuple[Any, Any]:
    from toolkit.looped import LoopedLM

    return nnx.split(nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0))))


def _weights(config: Any, key: Array) -> Any:
    from toolkit.looped import LoopedLM

    return nnx.to_pure_dict(nnx.split(LoopedLM(config, rngs=nnx.Rngs(key)))[1])


def on_sphere(weight: Array, role: str, norm: Array) -> Array:
    """A hidden weight at that Frobenius norm; other weights as they are."""
    return weight * norm / jnp.linalg.norm(weight) if role == "hidden" else weight


def rule_optimizer(rule: str, moved: Transfer) -> optax.GradientTransformation:
    """With rate 1, as for this size."""
    if rule == SPHERE:
        # A step turns a matrix by the angle `rate`, whatever its size.
        # Muon takes the axes of all weights by default, and here some are another group's.
        every = lambda updates: jax.tree.map(lambda _: MuonDimensionNumbers(), updates)  # noqa: E731
        muon = optax.contrib.scale_by_muon(weight_dimension_numbers=every)
        turning = optax.chain(muon, optax.stateless(_as_long_as_weights))
        parts = {role: optax.scale_by_adam() for role in ("fixed", "input", "output")}
        groups = optax.partition({**parts, "hidden": turning}, moved.roles)
        return optax.chain(groups, optax.scale(-1.0))
    if rule in (MUP, COUPLED):
        adam = optax.scale_by_adam(eps=1e-8 * moved.epsilon)
        decay = moved.add_decayed_weights(DECAY)
        if rule == COUPLED:
            decay = optax.add_decayed_weights(DECAY)
        return optax.chain(adam, decay, moved.scale_rates(), optax.scale(-1.0))
    return optax.adamw(1.0, weight_decay=DECAY)


def _as_long_as_weights(updates: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda u, w: u * jnp.linalg.norm(w) / (jnp.linalg.norm(u) + 1e-12), updates, params
    )
