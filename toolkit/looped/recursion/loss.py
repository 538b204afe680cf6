"""Training of models with a router of loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.looped.blocks import run_blocks
from toolkit.looped.loops.rows import row_of
from toolkit.looped.model import LoopedLM
from toolkit.looped.recursion.routing import Recursing
from toolkit.looped.sequences import check_sequences

ROUTER_WEIGHTS = {"expert": 0.001, "token": 0.1}
"""Weights of the routers' losses in the paper."""


@checked
def recursion_loss(
    model: LoopedLM, tokens: Int[Array, "batch time"], targets: Int[Array, "batch time"], *,
    router_weight: float | None = None, segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, ""]:  # fmt: skip
    """Cross-entropy of a model whose tokens take different numbers of loops, and its router's loss.

        cross-entropy + router_weight * L
        "expert"   L = sum over loops of the binary cross-entropy between sigmoid(theta_r . h) and
                   whether loop r = 0..T-1 chose the token: the best (T - r) / T of the sequence
        "token"    L = loops * sum_i f_i P_i:  f_i the share of tokens with depth i, P_i the mean of
                   their probability; 1 if all depths are as frequent

    With "expert" the loops choose among all tokens of a row, later ones and other documents
    included: training is not causal. The model itself, and decoding, take every token whose score
    exceeds 1/2, which L teaches to be the same ones, and which is causal.

    Args:
        model: a model with `recursion`.
        tokens: whole numbers below the vocabulary.
        targets: the token that follows each position.
        router_weight: weight of the router's loss (None: the paper's, 0.001 for "expert" and 0.1
            for "token").
        segment_ids: document of each position of a packed sequence.

    Returns:
        The loss, float32 scalar.

    Cost: with "expert" loop r runs (T - r) / T of the tokens, and loops are unrolled; with "token"
        every loop runs all of them.

    Source: Bae et al., "Mixture-of-Recursions", 2025, arXiv:2507.10524, section 2.2.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(width=16, heads=2, recursion="expert", residual_gate=False)
        >>> model, tokens = LoopedLM(config, rngs=nnx.Rngs(0)), jnp.zeros((1, 5), int)
        >>> recursion_loss(model, tokens, tokens, router_weight=0.001).shape
        ()
    """
    if targets.shape != tokens.shape:
        raise ValueError(f"targets have shape {targets.shape}, tokens {tokens.shape}: unequal.")
    h, extra = trained_hidden(model, tokens, segment_ids)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.head(h), targets)
    weight = ROUTER_WEIGHTS[model.router.kind] if router_weight is None else router_weight
    return losses.mean() + weight * extra


def trained_hidden(
    model: LoopedLM,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time width"], Float[Array, ""]]:
    """The head's input in training, and the router's loss."""
    injected = _before(model, tokens, segment_ids)
    if model.router.kind == "expert":
        h, extra = _chosen_loops(model, injected, segment_ids)
    else:
        state = _loops(model, injected, segment_ids)
        h, loops = state.h, model.config.loops
        shares = jax.nn.softmax(model.router.logits(injected), axis=-1)
        often = jax.nn.one_hot(state.depth, loops, dtype=shares.dtype)
        extra = loops * jnp.sum(often.mean((0, 1)) * shares.mean((0, 1)))
    return run_blocks(model.coda, model.leave(h, injected), segment_ids=segment_ids)[0], extra


@checked
def recursion_depths(
    model: LoopedLM,
    tokens: Int[Array, "batch time"],
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Int[Array, "batch time"]:
    """How many loops each token takes in a model with `recursion`.

    Args:
        model: the model.
        tokens: whole numbers below the vocabulary.
        segment_ids: document of each position of a packed sequence.

    Returns:
        int32 numbers from 1 to the model's loops.

    Cost: a forward pass without coda and head.

    Source: Bae et al., "Mixture-of-Recursions", 2025, arXiv:2507.10524.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(width=16, heads=2, recursion="token", residual_gate=False)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> recursion_depths(model, jnp.zeros((1, 5), int)).shape
        (1, 5)
    """
    return _loops(model, _before(model, tokens, segment_ids), segment_ids).count


def _before(model: LoopedLM, tokens: Array, segment_ids: Array | None) -> Array:
    if model.config.recursion is None:
        raise ValueError('the model has no router of loops; configure recursion="expert" or so.')
    check_sequences(model.config, tokens, segment_ids)
    return run_blocks(model.prelude, model.embedding(tokens), segment_ids=segment_ids)[0]


def _loops(model: LoopedLM, injected: Array, segment_ids: Array | None) -> Recursing:
    def body(tau: int, h: Any, row: Any) -> Any:
        return model.loop(h, *row, tau=tau, injected=injected, segment_ids=segment_ids)[0], None

    return model.run_loops(body, model.start(injected), remat=model.config.remat)[0]


def _chosen_loops(
    model: LoopedLM, injected: Array, segment_ids: Array | None
) -> tuple[Array, Array]:
    """The states after loops that choose their tokens, and the loss of the router's scores."""
    router, rows, loops = model.router, model.loop_rows(), model.config.loops
    (batch, time), state = injected.shape[:2], router.start(injected)
    places = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    extra = jnp.zeros((), router.logits(injected).dtype)
    for tau in range(loops):
        logits = jnp.take_along_axis(router.logits(state.h)[..., tau], places, axis=1)
        if tau:
            most = max(1, time * (loops - tau) // loops)
            _, best = jax.lax.top_k(logits, most)
            best = jnp.sort(best, axis=1)
            chosen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch)[:, None], best].set(True)
            extra += optax.sigmoid_binary_cross_entropy(logits, chosen).mean()
            places, logits = (jnp.take_along_axis(x, best, axis=1) for x in (places, logits))
        take = lambda x, at=places: jnp.take_along_axis(x, at, axis=1)  # noqa: E731
        documents = None if segment_ids is None else take(segment_ids)

        def run(h: Array, tau: int = tau, at: Array = places, documents: Any = documents) -> Array:
            h = model.loop_input(h, row_of(rows, tau).embedding, None)
            how = {"windows": model.config.loop_windows[tau], "residual": model.group_residual}
            return run_blocks(model.blocks, h, segment_ids=documents, positions=at, **how)[0]

        run = jax.checkpoint(run) if model.config.remat else run
        mine = dataclasses.replace(state, h=jnp.take_along_axis(state.h, places[..., None], 1))
        every = jnp.ones(places.shape, bool)
        mine = dataclasses.replace(mine, count=jnp.zeros(places.shape, jnp.int32))
        after = router.after(mine, run(mine.h), every, jax.nn.sigmoid(logits))
        h = state.h.at[jnp.arange(batch)[:, None], places].set(after.h)
        state = dataclasses.replace(state, h=h)
    return state.h, extra
