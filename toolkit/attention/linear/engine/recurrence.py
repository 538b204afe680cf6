"""How every linear-time mixer runs: in chunks, token by token, or one step of decoding.

A method's own file checks its arguments and says what its tokens do to the state (a `Rule` of
`chunked.py`); what is common to all of them is here: the dtype of states, grouped values,
documents that share a sequence, and the ways through time.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._checks import check_choice, check_rank
from toolkit.attention._precision import precise_einsum
from toolkit.attention.linear.engine import chunked
from toolkit.attention.linear.engine.chunked import Rule, act
from toolkit.attention.linear.engine.chunks import cut, cut_documents, join

IMPLEMENTATIONS = ("xla", "scan", "pallas")
STEP_IMPLEMENTATIONS = ("xla", "pallas")


class Inputs(NamedTuple):
    """What runs through time. `tokens` are the arrays of the rule's action, the query first."""

    tokens: tuple[Float[Array, "batch time heads *size"], ...]
    g: Float[Array, "batch time heads channels"]  # log-decay; channels is 1 or key


class Poison(NamedTuple):
    """Where values that are not finite must show: in outputs, and in the state after a token."""

    out: Bool[Array, "batch time heads"]
    state: Bool[Array, "batch time heads"]


def state_dtype(x: Array) -> jnp.dtype:
    """Gates and states are float32, whatever the inputs; float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def scaled_queries(q: Array, scale: float | None) -> Array:
    """q times `scale` (key**-0.5 if None), in the dtype of the state."""
    return q.astype(state_dtype(q)) * (q.shape[-1] ** -0.5 if scale is None else scale)


def for_value_heads(x: Array, value_heads: int) -> Array:
    """[batch, time, heads, ...] with every head repeated for the value heads it serves."""
    groups = value_heads // x.shape[2]
    return x if groups == 1 else jnp.repeat(x, groups, axis=2)


def log_decay_channels(g: Array, v: Array) -> Array:
    """[batch, time, heads, channels] in the dtype of the state; one channel for a whole head."""
    return (g if g.ndim == 4 else g[..., None]).astype(state_dtype(v))


def no_decay(v: Array) -> Array:
    """Log-decays 0 [batch, time, heads] of a state that forgets nothing."""
    # zeros_like, so that under `jax.shard_map` the decay varies wherever the values do.
    return jnp.zeros_like(v[..., 0], dtype=state_dtype(v))


def run(
    rule: Rule,
    inputs: Inputs,
    initial_state: Float[Array, "batch heads key value"] | None,
    *,
    sizes: tuple[int, int],
    segment_ids: Int[Array, "batch time"] | None,
    implementation: str | None,
    chunk: int | None,
    usual_chunk: int,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    """Run checked inputs with equal heads: in chunks, token by token, or by a device's kernels."""
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if chunk is not None and (chunk < 16 or chunk & (chunk - 1)):
        raise ValueError(f"chunk must be a power of two and at least 16; got {chunk}.")
    state = initial(inputs, initial_state, sizes)
    starts = poison = None
    if segment_ids is not None:
        starts = document_starts(segment_ids)
        inputs, state, poison = _quarantine(inputs, state, starts)
    if implementation == "scan":
        out, state = _scan_tokens(rule, inputs, state, starts)
    elif implementation == "pallas":
        out, state = _kernels(rule).run_kernels(*inputs, state, starts, chunk)
    else:
        out, state = _scan_chunks(rule, inputs, state, starts, chunk or usual_chunk)
    if poison is not None:
        out = jnp.where(poison.out[..., None], jnp.nan, out)
        state = jnp.where(poison.state[:, -1, :, None, None], jnp.nan, state)
    return out, state


def step(
    rule: Rule, inputs: Inputs, state: Array, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """One token of checked inputs [batch, 1, heads, ...]: one read and one write of the state."""
    check_choice("implementation", implementation, (None, *STEP_IMPLEMENTATIONS))
    state = state.astype(inputs.g.dtype)
    token = jax.tree.map(lambda x: x[:, 0], inputs)
    if implementation == "pallas":
        state, out = _kernels(rule).step_kernels(*token, state)
    else:
        state, out = _update(rule, state, token)
    return out, state


def _kernels(rule: Rule) -> ModuleType:
    """The module that runs kernels, loaded on use: Pallas takes a while to import."""
    if not rule.has_kernels:
        raise ValueError(
            'implementation="pallas" has no kernel for this mixer; "xla" and "scan" run it.'
        )
    return importlib.import_module("toolkit.attention.kernels.dispatch")


def run_equation(
    equation: Callable[..., tuple[Array, Array]],
    inputs: Inputs,
    initial_state: Float[Array, "batch heads key value"] | None,
    *,
    sizes: tuple[int, int],
    segment_ids: Int[Array, "batch time"] | None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    """Run `equation`, (state, g_t, *tokens_t) -> (state, out_t), token by token: the oracle."""
    state = initial(inputs, initial_state, sizes)
    starts = jnp.zeros(inputs.g.shape[:2], bool)
    if segment_ids is not None:
        starts = document_starts(segment_ids)

    def one_token(state, arrays):
        is_start, g_t, tokens_t = arrays
        state = jnp.where(is_start[:, None, None, None], 0, state)
        return equation(state, g_t, *(x.astype(state.dtype) for x in tokens_t))

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (starts, inputs.g, inputs.tokens))
    state, out = lax.scan(one_token, state, by_time)
    return jnp.moveaxis(out, 0, 1), state


def add_time(**tokens: tuple[Array, str]) -> list[Array]:
    """Check the axes of one token's arrays, given as name=(array, axes), and add a time of 1."""
    for name, (array, axes) in tokens.items():
        check_rank(name, array, axes)
    return [array[:, None] for array, _ in tokens.values()]


def initial(inputs: Inputs, initial_state: Array | None, sizes: tuple[int, int]) -> Array:
    """The state before the first token in its dtype; zeros of `sizes` (key, value) if None."""
    dtype = inputs.g.dtype
    if initial_state is not None:
        return initial_state.astype(dtype)
    batch, _, heads = inputs.g.shape[:3]
    # Zeros that vary with every input under `jax.shard_map`, as what is added to them does.
    state = jnp.zeros((batch, heads, *sizes), dtype)
    for x in (*inputs.tokens, inputs.g):
        state += jnp.zeros_like(x, dtype, shape=())
    return state


def document_starts(segment_ids: Int[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """Where the document changes. The first token is no start: the initial state is its own."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def _quarantine(inputs: Inputs, state: Array, starts: Array) -> tuple[Inputs, Array, Poison]:
    """Replace what is not finite by zero, and say where it would have reached.

    Documents share chunks, and 0 * NaN is NaN: masks alone would let one document spoil another.
    """
    tokens, g = inputs
    finite = [jnp.isfinite(x) for x in tokens]
    is_decay = g <= 0  # -inf clears the state, and is welcome
    state_finite = jnp.isfinite(state)

    def whole(x: Array) -> Array:
        return jnp.all(x, axis=tuple(range(3, x.ndim)))

    keeps = whole(is_decay)
    for x in finite[1:]:
        keeps &= whole(x)
    keeps = keeps.at[:, 0].set(keeps[:, 0] & jnp.all(state_finite, (-2, -1)))
    index = jnp.broadcast_to(jnp.arange(keeps.shape[1])[None, :, None], keeps.shape)
    last_fault = lax.cummax(jnp.where(keeps, -1, index), axis=1)
    document_start = lax.cummax(jnp.where(starts[..., None], index, 0), axis=1)
    in_state = last_fault >= document_start
    poison = Poison(in_state | ~whole(finite[0]), in_state)
    tokens = tuple(jnp.where(ok, x, 0) for ok, x in zip(finite, tokens, strict=True))
    inputs = Inputs(tokens, jnp.where(is_decay, g, 0))
    return inputs, jnp.where(state_finite, state, 0), poison


def _update(rule: Rule, state: Array, inputs: Inputs) -> tuple[Array, Array]:
    """One token; where it corrects, all reads meet the old state, so that it is read once."""
    action = act(rule, state.dtype, inputs.tokens)
    correction, addition = action.correction, action.addition
    fade = jnp.exp(inputs.g)
    if addition and not correction:
        # The output reads the new state. Nothing else would make the compiler read the old one
        # before it writes over it, and it would keep a copy.
        state = fade[..., None] * state + addition.key[..., None] * addition.value[..., None, :]
        return state, precise_einsum("bhk,bhkv->bhv", action.query, state)
    readers = [fade * action.query]
    if correction:
        erase = correction.erase
        readers.append(erase if rule.erases_before_fading else fade * erase)
    reads = precise_einsum("bhrk,bhkv->bhrv", jnp.stack(readers, axis=2), state)
    out, state = reads[:, :, 0], fade[..., None] * state
    if correction:
        written = -reads[:, :, 1]
        if correction.value is not None:
            written += correction.value
        if correction.strength is not None:
            written *= correction.strength[..., None]
        out += jnp.sum(action.query * correction.write, axis=-1, keepdims=True) * written
        state += correction.write[..., None] * written[..., None, :]
    if addition:
        out += jnp.sum(action.query * addition.key, axis=-1, keepdims=True) * addition.value
        state += addition.key[..., None] * addition.value[..., None, :]
    return state, out


def _scan_tokens(
    rule: Rule, inputs: Inputs, state: Array, starts: Array | None
) -> tuple[Array, Array]:
    def body(state, xs):
        token, is_start = xs
        if is_start is not None:
            state = jnp.where(is_start[:, None, None, None], 0, state)
        return _update(rule, state, token)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, out = lax.scan(body, state, (by_time, None if starts is None else starts.T))
    return jnp.moveaxis(out, 0, 1), state


def _scan_chunks(
    rule: Rule, inputs: Inputs, state: Array, starts: Array | None, size: int
) -> tuple[Array, Array]:
    batch, time, heads, _ = inputs.g.shape
    documents = None if starts is None else cut_documents(starts, heads, size)
    tokens = tuple(cut(x, size) for x in inputs.tokens)
    pieces = chunked.Inputs(tokens, cut(inputs.g, size), documents)
    rows = state.reshape(-1, *state.shape[2:])
    out, final = cast(tuple[Array, Array], chunked.chunked(rule, pieces, rows))
    return join(out, batch, time), final.reshape(state.shape)
