"""The inside of a small looped model, loop by loop: forward values and gradients. Pure functions.

The loops of `LoopedLM` are repeated here and keep attention weights, recurrent states and hidden
states. Windows, output gates and the selected token enter as arrays (`Switches`): every softmax
layer of a packaged model is read as a "full" one with a gate, whose window and gate are switches.
So one program of fixed shape serves every slider position and every model of the same kinds of
layers. A test compares the results with the model's.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from toolkit._compat import set_value
from toolkit.attention import MIXERS
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.text import looked_at
from toolkit.lab.mixers.view import norm_of_state
from toolkit.looped import LoopedConfig, LoopedLM, load_model
from toolkit.measure.stored import stored_folder

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


PATTERNS = {
    "two sliding windows": "window window",
    "gated delta net, full attention": "gdn full",
    "full attention twice": "full full",
}
"""Menu entry -> pattern; each was trained with and without output gate."""


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """A trained model of the toolkit's own."""

    config: LoopedConfig  # as it was trained
    model: LoopedLM  # as the reader takes it: "full" for "window", and with output gates
    record: dict[str, Any]  # how it was made: configuration, corpus, environment, result

    def switches(self, window: int, has_residual_gate: bool) -> Switches:
        """The reader's switches for this model, with `window` tokens for its "window" layers."""
        windows = [window if word == "window" else MAX_TOKENS for word in self.config.layers]
        return Switches(
            jnp.asarray(windows),
            jnp.asarray(getattr(self.config, self.config.layers[-1]).output_gate),
            jnp.asarray(has_residual_gate),
        )


@functools.cache
def small_model(pattern: str, has_output_gate: bool) -> SmallModel:
    """A packaged model, cached; `pattern` is a value of `PATTERNS`."""
    name = pattern.replace(" ", "-") + "-gated" * has_output_gate
    path = stored_folder("models") / f"{name}.safetensors"
    trained = load_model(path)
    record = json.loads(path.with_suffix(".json").read_text())
    return SmallModel(trained.config, _as_read(trained), record)


def _as_read(trained: LoopedLM) -> LoopedLM:
    """The same parameters under one configuration; gates that were not trained are zero."""
    pattern = trained.config.pattern.replace("window", "full")
    options = {word: o for word, o in trained.config.options.items() if word in pattern.split()}
    config = dataclasses.replace(trained.config, pattern=pattern, options=options)
    config = config.with_options(full={"output_gate": True})
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    known = dict(nnx.to_flat_state(nnx.state(trained, nnx.Param)))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = known[path][...] if path in known else np.zeros(parameter.shape, np.float32)
        set_value(parameter, jnp.asarray(value))
    return model


STAND_INS = {" ": "␣", "\n": "⏎"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """A text in a model, every loop of `MAX_LOOPS`."""

    small: SmallModel
    config: LoopedConfig  # with the window it was read with
    switches: Switches
    raw: bytes  # those read, at most `MAX_TOKENS`
    seen: Trace
    log_probabilities: np.ndarray  # of every byte after each loop, [loops, time, vocabulary]


@functools.lru_cache(maxsize=32)
def read(text: str, pattern: str, window: int, output_gate: bool, residual_gate: bool) -> Reading:
    """Run a text (at least two bytes) through `MAX_LOOPS` loops of a small model; remembered.

    `window` is what "window" layers see; `output_gate` picks the model that was trained with
    output gates; without `residual_gate` rho of the trained model is zero.
    """
    from scipy.special import log_softmax

    raw = text.encode()[:MAX_TOKENS]
    if len(raw) < 2:
        raise ValueError(f"text: got {text!r}, wanted at least two bytes")
    small = small_model(pattern, output_gate)
    switches = small.switches(window, residual_gate)
    seen = trace(small.model, jnp.asarray(list(raw.ljust(MAX_TOKENS)), jnp.int32), switches)
    logits = np.asarray(seen.logits, np.float64)
    config = small.config.with_options(window={"sliding_window": window})
    return Reading(small, config, switches, raw, seen, log_softmax(logits, axis=-1))


def byte_looked_at(text: str, token: int) -> dict[str, Any]:
    """The fields of a `TextView` of bytes."""
    return looked_at([*map(visible, text.encode())], token, MAX_TOKENS)


def visible(byte: int) -> str:
    """A byte as one character: itself, or a stand-in for blanks and what has no shape."""
    return STAND_INS.get(chr(byte), chr(byte) if 32 < byte < 127 else "·")


TEXT = "The class statement defines a class object. The class"


ON_OFF = {"on": True, "off": False}


class TextPanel(Panel):
    """The controls of both panels: a text, a byte of it, and the model that reads it."""

    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} bytes; press Enter")
    token = Number(
        "Byte", MAX_TOKENS, low=1, high=MAX_TOKENS, maximum=lambda view: len(view.words),
        explanation="Whose prediction is traced",
    )  # fmt: skip
    loops = Number(
        "Loops", 4, low=1, high=MAX_LOOPS, is_continuous=False,
        explanation="How often the layers run; trained with 4",
    )  # fmt: skip
    window = Number(
        "Window (bytes)", 8, low=1, high=MAX_TOKENS,
        explanation="What a window layer sees, itself included; trained with 8",
    )  # fmt: skip
    pattern = Choice("Layers", "window window", PATTERNS, explanation="A model trained for each")
    output_gate = Choice(
        "Output gate", False, ON_OFF, explanation="The model trained with it, or the one without"
    )
    residual_gate = Choice(
        "Residual gate", True, ON_OFF, explanation="rho as trained, or switched off in that model"
    )
