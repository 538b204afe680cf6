"""The inside of a looped model, loop by loop: forward values and gradients. Pure functions.

The loops of `LoopedLM` are repeated here and keep attention weights, recurrent states and hidden
states. Windows, gates and the selected token enter as arrays, so that one program of fixed shape
serves every slider position. A test compares the results with the model's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention import MIXERS
from toolkit.lab.mixers.view import norm_of_state
from toolkit.looped import LoopedLM

MAX_TOKENS = 64
MAX_LOOPS = 8


class Switches(NamedTuple):
    """Settings that change without recompiling."""

    windows: Int[Array, "layers"]  # tokens each layer sees; recurrent ones have no use for theirs
    has_output_gate: Bool[Array, ""]  # whether the gates of softmax layers act
    has_residual_gate: Bool[Array, ""]  # whether rho acts; False sets it to zero


class Inside(NamedTuple):
    """Observed values of one layer or, with leading axes, of every layer in every loop."""

    first: Float[Array, "... time"]  # attention weight of the first token, mean over heads; or NaN
    state: Float[Array, "... time"]  # norm of the recurrent state after each token; or NaN


class Trace(NamedTuple):
    """One text read in `MAX_LOOPS` loops."""

    hidden: Float[Array, "loops+1 time width"]  # the embedding, then the state after each loop
    logits: Float[Array, "loops time vocabulary"]  # what the head makes of that
    inside: Inside  # per loop and layer, [loops, layers, time]


@jax.jit
def trace(model: LoopedLM, tokens: Int[Array, "time"], switches: Switches) -> Trace:
    """Read a text, padded at the end, and keep the values of each loop.

    The model has no prelude, coda, injection and ladder, and gates on its softmax layers; loops
    beyond its own take the last one's rho.
    """

    def body(h, rho):
        out, inside = _loop(model, h, rho, switches, _recurrent_by_steps)
        return out, (out, inside)

    start = model.embedding(tokens[None])
    _, (hidden, inside) = jax.lax.scan(body, start, loop_gates(model, switches.has_residual_gate))
    hidden = jnp.concatenate([start[None], hidden])[:, 0]
    return Trace(hidden, model.head(hidden[1:]), inside)


@jax.jit
def influence(
    model: LoopedLM, seen: Trace, token: Int[Array, ""], loops: Int[Array, ""], switches: Switches
) -> Float[Array, "loops time"]:
    r"""The influence of each token on the selected one's prediction after each loop.

        influence[tau, s] = | d logit_best(h_t^(tau)) / d h_s^(0) |

    with h^(0) the embeddings and `best` the likeliest byte after loop tau, for the first `loops`
    loops: [MAX_LOOPS, time], exactly zero where no path leads. The gradients of all loops are
    carried back together, one loop at a time.
    """
    best = jnp.argmax(seen.logits[:, token], axis=-1)
    own = jax.vmap(jax.grad(lambda h_t, index: model.head(h_t)[index]))(
        seen.hidden[1:, token], best
    )

    rho = loop_gates(model, switches.has_residual_gate)

    def back(step, gradients):
        tau = loops - 1 - step
        gradients = gradients.at[tau, token].set(own[tau])  # those of later loops are on their way

        def forward(h):
            return _loop(model, h[None], rho[tau], switches, _recurrent)[0][0]

        _, pull = jax.vjp(forward, seen.hidden[tau])

        def carry(pair, gradients):  # two at a time: earlier loops' gradients are still zero
            two = jax.lax.dynamic_slice_in_dim(gradients, 2 * pair, 2)
            two = jax.vmap(lambda gradient: pull(gradient)[0])(two)
            return jax.lax.dynamic_update_slice_in_dim(gradients, two, 2 * pair, 0)

        return jax.lax.fori_loop(tau // 2, (loops + 1) // 2, carry, gradients)

    nothing = jnp.zeros((MAX_LOOPS, *seen.hidden.shape[1:]))
    return jnp.linalg.norm(jax.lax.fori_loop(0, loops, back, nothing), axis=-1)


def loop_gates(
    model: LoopedLM, has_residual_gate: Bool[Array, ""] | bool = True
) -> Float[Array, "loops width"]:
    """The residual gates rho of `MAX_LOOPS` loops, [loops, width]: its own, then the last one's."""
    if model.rho is None:
        return jnp.zeros((MAX_LOOPS, model.config.width))
    own = model.rho[...]
    rows = np.minimum(np.arange(MAX_LOOPS), own.shape[0] - 1)
    return jnp.where(has_residual_gate, own[rows], 0.0)


def _loop(
    model: LoopedLM, h: Array, rho: Array, switches: Switches, recurrent: Callable
) -> tuple[Array, Inside]:
    """`LoopedLM.loop`, and what its layers let be seen."""
    if model.config.ladder_residual:
        raise ValueError("model has a ladder_residual; the reader wants one without.")
    start, seen = h, []
    for block, window in zip(model.blocks, switches.windows, strict=True):
        x = block.mixer_norm(h)
        if block.mixer.is_recurrent:
            mixed, inside = recurrent(block.mixer, x)
        else:
            mixed, inside = _softmax(block.mixer, x, window, switches.has_output_gate)
        h = h + mixed
        h = h + block.feed_forward(block.feed_forward_norm(h))
        seen.append(inside)
    return h + rho * start, Inside(*(jnp.stack(parts) for parts in zip(*seen, strict=True)))


def _softmax(layer, x, window, has_output_gate) -> tuple[Array, Inside]:
    """`AttentionLayer`, its weights written out: the window is an array, and they are looked at."""
    time = x.shape[1]
    positions = jnp.arange(time)
    q, k, v = (
        project(x).reshape(1, time, -1, layer.head_size)
        for project in (layer.query, layer.key, layer.value)
    )
    q, k = (layer.turn(a, positions) for a in (q, k))
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    distance = positions[:, None] - positions
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * layer.head_size**-0.5
    scores = jnp.where((distance >= 0) & (distance < window), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhts,bshv->bthv", weights, v).reshape(1, time, -1)
    out = jnp.where(has_output_gate, jax.nn.sigmoid(layer.gate(x)), 1.0) * out
    return layer.output(out), Inside(weights[0, :, :, 0].mean(0), jnp.full(time, jnp.nan))


def _recurrent(layer, x) -> tuple[Array, Inside]:
    """The layer as it is, in chunks: its gradient is quicker than that of steps."""
    nothing = jnp.full(x.shape[1], jnp.nan)
    return layer(x)[0], Inside(nothing, nothing)


def _recurrent_by_steps(layer, x) -> tuple[Array, Inside]:
    """The layer token by token, which shows its state after each."""
    inputs, _, aside = layer.project(x, None, None)
    row, shape = MIXERS[layer.word], layer.sizes

    def read(state, inputs_t):
        out_t, state = row.step(*inputs_t, state)
        return state, (out_t, jnp.linalg.norm(norm_of_state(state)))

    empty = row.empty_state(1, *shape[1:], x.shape[1], x.dtype)
    _, (out, norms) = jax.lax.scan(read, empty, tuple(jnp.moveaxis(a, 1, 0) for a in inputs))
    out = layer.finish(x, jnp.moveaxis(out, 0, 1), aside)
    return out, Inside(jnp.full(x.shape[1], jnp.nan), norms)
