"""The losses of training on text."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit._compat import set_value
from toolkit.experts import balance_loss, pooled_statistics, updated_choice_bias, z_loss
from toolkit.looped.feed_forward import FEED_FORWARDS, RouterState
from toolkit.looped.mixing.streaming import streaming
from toolkit.looped.recursion.loss import ROUTER_WEIGHTS, trained_hidden
from toolkit.looped.scanned import scanned_layers
from toolkit.parallel import streamed_loss


@checked
def next_byte_loss(
    graph: nnx.GraphDef, params: nnx.State, batch: tuple[Int[Array, "batch time"], ...], *,
    chunks: int = 1, block_chunks: int = 1, balance: float = 0.0, router_z: float = 0.0,
    scan_layers: bool = False,
) -> Float[Array, ""]:  # fmt: skip
    """Mean cross-entropy of the next byte, or other token.

        loss = -mean_{b,t} log softmax(logits[b, t])[target[b, t]]
               + mean_l (balance balance_loss_l + router_z z_loss_l)

    Args:
        graph: structure of the model, from `nnx.split`.
        params: its parameters.
        batch: inputs and targets, each `[batch, time]`; or those and segment ids, as
            `pack_documents` makes them: then targets below 0 do not count.
        chunks: parts of time whose logits are computed one after the other, see `streamed_loss`.
        block_chunks: pieces of the text in the backward pass of each block, see
            `toolkit.parallel.sequences.stream_backward`; not for packed documents.
        balance: weight of the `toolkit.experts.balance_loss` of each "moe" layer, of its loads in
            all loops and sequences; above 0 only for models that have some.
        router_z: weight of the `toolkit.experts.z_loss` of each "moe" layer, likewise.
        scan_layers: whether layers that repeat are traced once, see
            `toolkit.looped.scanned_layers`.

    Returns:
        Nats per byte, or per token.

    Cost: One forward pass; in chunks, the gradient computes logits and blocks twice.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> parts = nnx.split(LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0)))
        >>> next_byte_loss(*parts, (jnp.zeros((1, 8), int), jnp.ones((1, 8), int))).shape
        ()
    """
    how = {"chunks": chunks, "block_chunks": block_chunks, "balance": balance}
    how |= {"router_z": router_z, "scan_layers": scan_layers}
    return _loss(nnx.merge(graph, params), batch, **how)[0]


def loss_of_parts(graph: nnx.GraphDef, *parts: Any, **how: Any) -> Float[Array, ""]:
    """`next_byte_loss` of (graph, *states, batch), where a model has one state or several."""
    *states, batch = parts
    return _loss(nnx.merge(graph, *states), batch, **how)[0]


def loss_of_recursion(
    graph: nnx.GraphDef, params: nnx.State, batch: Any, *,
    chunks: int = 1, block_chunks: int = 1, scan_layers: bool = False,
) -> Float[Array, ""]:  # fmt: skip
    """`recursion_loss` of a model with a router of loops, with the arguments of `next_byte_loss`.

    It is the training loss: with "expert" it is not causal, and tells nothing of held-out text.
    """
    model = nnx.merge(graph, params)
    inputs, targets, *packed = batch
    with streaming(block_chunks, model.config), scanned_layers(scan_layers):
        hidden, extra = trained_hidden(model, inputs, packed[0] if packed else None)
    loss = _cross_entropy(model, hidden, targets, packed, chunks)
    return loss + ROUTER_WEIGHTS[model.router.kind] * extra


def loss_and_bias(
    graph: nnx.GraphDef, params: Any, bias: nnx.State, batch: Any, *, bias_rate: float, **how: Any
) -> tuple[Float[Array, ""], nnx.State]:
    """`next_byte_loss` of a model with choice biases, and these after the step.

    Each moves by `bias_rate` towards an even load of its experts, in all loops and sequences; see
    `toolkit.experts.updated_choice_bias`.
    """
    model = nnx.merge(graph, params, bias)
    loss, routing = _loss(model, batch, is_routed=True, **how)
    layers = (block.feed_forward for block in (*model.prelude, *model.blocks, *model.coda))
    mixtures = [layer for layer in layers if isinstance(layer, FEED_FORWARDS["moe"])]
    for layer, statistics in zip(mixtures, routing, strict=True):
        own, loads = layer.router.choice_bias, pooled_statistics(statistics, 2).loads
        if own is None:
            continue
        set_value(own, updated_choice_bias(own[...], jax.lax.stop_gradient(loads), bias_rate))
    return loss, nnx.state(model, RouterState)


def _loss(
    model, batch, *, chunks=1, block_chunks=1, balance=0.0, router_z=0.0, scan_layers=False,
    is_routed=False,
):  # fmt: skip
    inputs, targets, *packed = batch
    segment_ids, routing = packed[0] if packed else None, ()
    with streaming(block_chunks, model.config), scanned_layers(scan_layers):
        if balance or router_z or is_routed:
            hidden, routing = model.with_routing(inputs, segment_ids=segment_ids)
        else:
            hidden = model.last_hidden(inputs, segment_ids=segment_ids)
    loss = _cross_entropy(model, hidden, targets, packed, chunks)
    for statistics in (pooled_statistics(layer, 2) for layer in routing):
        for weight, of_router in ((balance, balance_loss), (router_z, z_loss)):
            if weight:
                loss += weight / len(routing) * of_router(statistics)
    return loss, routing


def _cross_entropy(model, hidden, targets, packed, chunks):
    if chunks != 1:
        for name in ("head_bias", "head_soft_cap"):
            if getattr(model.config, name):
                raise ValueError(f"chunks: got {chunks}, and the model has {name}; wanted 1")
        hidden, table = model.head_inputs(hidden)
        return streamed_loss(hidden, table, targets, chunks=chunks)
    logits = model.head(hidden)
    if not packed:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return losses.mean(where=targets >= 0)
