"""How every linear-time mixer runs: in chunks, token by token, or as one step of decoding.

A method's own file has its signatures, its equation and what its tokens do to the state (a `Rule`
of `rule.py`). This file has what all methods share: the dtype of states, grouped values, documents
that share a sequence, the scale of outputs, and the ways through time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from toolkit.attention._shapes import (
    Form,
    Output,
    Outputs,
    Queries,
    SegmentIds,
    State,
    StepForm,
    Values,
    known,
)
from toolkit.attention.best_known import in_best_form
from toolkit.attention.execution.cores import free_cores, over_cores
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.kernels.dispatch import run_kernels, step_kernels
from toolkit.attention.linear.engine.chunked import Chunks, Gates, chunked
from toolkit.attention.linear.engine.chunks import cut, cut_documents, join
from toolkit.attention.linear.engine.quarantine import quarantine
from toolkit.attention.linear.engine.reading import read_state
from toolkit.attention.linear.engine.rule import Rule, act
from toolkit.attention.linear.engine.tokens import Tokens, for_value_heads, own_keys
from toolkit.attention.linear.gates import unit_length


def run(
    rule: Rule, tokens: Tokens,
    initial_state: State | None, segment_ids: SegmentIds | None,
    implementation: Form | None, chunk: int | None,
) -> Outputs:  # fmt: skip
    """Run checked tokens, inside a `compiled` function: in chunks, one by one, or by kernels."""
    form = lambda implementation: partial(_run_share, rule, implementation, chunk)  # noqa: E731
    share = partial(in_best_form, "recurrent", implementation, form)
    return spread(share, tokens, initial_state, segment_ids)


def spread(
    share: Callable[..., tuple[Array, Any]],
    tokens: Tokens,
    initial_state: Any,
    segment_ids: SegmentIds | None,
) -> tuple[Array, Any]:
    """share(tokens, state, segment_ids) on the share of each core, if there are several."""
    cores, arrays = free_cores(), (tokens, initial_state, segment_ids)
    if cores is not None:  # heads that share keys can go to different cores
        arrays = (own_keys(tokens), *arrays[1:])
    return over_cores(cores, share, arrays, heads=(2, 1, None), heads_out=(2, 1))


def _run_share(
    rule: Rule,
    implementation: str, chunk: int | None, tokens: Tokens,
    initial_state: State | None, segment_ids: SegmentIds | None,
) -> Outputs:  # fmt: skip
    if implementation != "pallas":  # the kernels read the key of a head wherever it is shared
        tokens = own_keys(tokens)
    _, k, v, *_ = tokens.arrays
    empty = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), tokens.g.dtype)
    state = first_state((*tokens.arrays, tokens.g), initial_state, empty)
    starts = None if segment_ids is None else document_starts(segment_ids)
    tokens, state, poison = quarantine(tokens, state, initial_state is not None, starts)
    if implementation == "scan":
        out, state = _scan_rule(rule, tokens, state, starts)
    elif implementation == "pallas":
        _check_kernels(rule)
        out, state = run_kernels(rule, tokens, state, starts, chunk)
    else:
        out, state = _scan_chunks(rule, chunk, tokens.arrays, tokens.g, state, starts)
    out, state = poison.shown(_scaled(out, tokens.scale), state)
    return without_transpose((out.astype(v.dtype), state))


def step(
    rule: Rule, token: Tokens, state: State,
    implementation: StepForm | None = None, *,
    again: Sequence[Tokens] = (),
) -> Output:  # fmt: skip
    """Run one checked token: one read and one write of the state.

    With rules that only correct, a token may correct `again`, each time without decay; the query
    reads the state after the last correction.
    """
    state = state.astype(token.g.dtype)
    token, *again = map(own_keys, (token, *again))
    token = token._replace(g=log_decays(token.g))
    if implementation == "pallas":
        _check_kernels(rule)
        state, out = step_kernels(rule, token, state)
        for correction in again:
            state, out = step_kernels(rule, correction, state)
    else:
        state, out = _update(rule, state, token, again)
    return _scaled(out, token.scale).astype(token.arrays[2].dtype), state


def _scaled(out: Array, scale: Array) -> Array:
    return out * scale.astype(out.dtype)


def log_decays(g: Array) -> Array:
    """g, and NaN where it is above 0, which only `toolkit.checking()` refuses."""
    return jnp.where(g <= 0, g, jnp.nan)


def scan_tokens(
    token: Callable[..., tuple[Any, Array]],
    initial_state: Any, segment_ids: SegmentIds | None, scale: float | None,
    normalize_qk: bool = False, empty_state: Callable[..., Any] | None = None, /, *,
    q: Queries, v: Values, **others: Array,
) -> tuple[Values, Any]:  # fmt: skip
    """Run an equation, `token(S, q, v, ...) -> (S, o)` of one head, over sequences: the oracle.

    S is a matrix [key, value], zero without an initial state, or what `empty_state` of the row
    makes. The outputs are multiplied by `scale` (key**-0.5 if None).
    """
    of_outputs = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = accumulator(v.dtype)
    if "g" in others:
        others["g"] = log_decays(others["g"])
    inputs = {"q": q, "v": v, **others}
    inputs = {name: for_value_heads(x, v.shape[2]).astype(dtype) for name, x in inputs.items()}
    if normalize_qk:
        inputs |= {name: unit_length(inputs[name]) for name in ("q", "k")}
    sizes = v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]
    empty = empty_state(*sizes, 0, dtype) if empty_state else jnp.zeros(sizes, dtype)
    state = first_state(tuple(inputs.values()), initial_state, empty)
    starts = jnp.zeros(v.shape[:2], bool)
    if segment_ids is not None:
        starts = document_starts(segment_ids)
    every_head = jax.vmap(jax.vmap(lambda state, inputs_t: token(state, **inputs_t)))

    def one_token(state, arrays):
        is_start, inputs_t = arrays
        return every_head(cleared(state, is_start), inputs_t)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (starts, inputs))
    with jax.default_matmul_precision("highest"):
        state, out = lax.scan(one_token, state, by_time)
    return (of_outputs * jnp.moveaxis(out, 0, 1)).astype(v.dtype), state


def _check_kernels(rule: Rule) -> None:
    if not rule.has_kernels:
        raise ValueError(
            'implementation="pallas" has no kernel for this mixer; "xla" and "scan" run it.'
        )


def first_state(inputs: tuple[Array, ...], initial_state: Any, empty: Any) -> Any:
    """The state before the first token, in the dtype of the last input; `empty` if None."""
    dtype = inputs[-1].dtype
    if initial_state is not None:
        return jax.tree.map(partial(_in_sums, dtype), initial_state)
    # Zeros that vary with every input under `jax.shard_map`, as what is added to them does.
    zero = jnp.zeros((), dtype)
    for x in inputs:
        zero += jnp.zeros_like(x, dtype, shape=())
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), empty)


def cleared(state: Any, is_start: Bool[Array, "batch"]) -> Any:
    """The arrays of a state, zero in the rows where a document starts."""

    def of_array(x: Array) -> Array:
        return jnp.where(is_start.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)

    return jax.tree.map(of_array, state)


def _in_sums(dtype: Any, x: Array) -> Array:
    """An array of a state in the dtype of sums, unless it counts."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def document_starts(segment_ids: SegmentIds) -> Bool[Array, "batch time"]:
    """Where the document changes. The first token is no start: the initial state is its own."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def _update(
    rule: Rule, state: Array, token: Tokens, again: Sequence[Tokens] = ()
) -> tuple[Array, Array]:
    """One token; where it corrects, all reads are of the old state, which is read once."""
    query, correction, addition = act(rule, state.dtype, token.arrays)
    more = (act(rule, state.dtype, x.arrays).correction for x in again)
    corrections = [x for x in (correction, *more) if x]
    decay = jnp.exp(token.g)
    if addition and not corrections:
        # The output reads the new state. If it read the old one, nothing would make the compiler
        # read that before it writes over it, and it would keep a copy.
        state = decay[..., None] * state + addition.key[..., None] * addition.value[..., None, :]
        return state, read_state(query[:, :, None], state)[:, :, 0]
    readers = [decay * query]
    for x in corrections:
        readers.append(x.erase if rule.erases_before_decay else decay * x.erase)
    reads = read_state(jnp.stack(readers, axis=2), state)
    out, state = reads[:, :, 0], decay[..., None] * state
    differences = []
    for i, x in enumerate(corrections):
        written = -reads[:, :, 1 + i]
        for before, difference in zip(corrections, differences, strict=False):
            written -= _overlap(x.erase, before.write) * difference
        if x.value is not None:
            written += x.value
        if x.strength is not None:
            written *= x.strength[..., None]
        out += _overlap(query, x.write) * written
        state += x.write[..., None] * written[..., None, :]
        differences.append(written)
    if addition:
        out += _overlap(query, addition.key) * addition.value
        state += addition.key[..., None] * addition.value[..., None, :]
    return state, out


def _overlap(reader: Array, writer: Array) -> Array:
    return jnp.sum(reader * writer, axis=-1, keepdims=True)


def _scan_rule(
    rule: Rule, tokens: Tokens, state: Array, starts: Array | None
) -> tuple[Array, Array]:
    def body(state, xs):
        (arrays, g), is_start = xs
        if is_start is not None:
            state = cleared(state, is_start)
        return _update(rule, state, Tokens(arrays, g, tokens.scale))

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens.arrays, tokens.g))
    state, out = lax.scan(body, state, (by_time, None if starts is None else starts.T))
    return jnp.moveaxis(out, 0, 1), state


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _scan_chunks(
    rule: Rule, chunk: int | None, arrays: tuple[Array, ...], g: Array, state: Array,
    starts: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """For values alone; derivatives take another way (`_scan_chunks_jvp`)."""
    sizes = [_chunk_size(rule, chunk, alone, arrays, g) for alone in (True, False)]
    on_cpu, elsewhere = (partial(_walk, rule, True, size) for size in sizes)
    if sizes[0] == sizes[1]:
        return elsewhere(arrays, g, state, starts)
    # Smaller chunks are known to be faster on CPUs alone.
    return lax.platform_dependent(arrays, g, state, starts, cpu=on_cpu, default=elsewhere)


@_scan_chunks.defjvp
def _scan_chunks_jvp(rule, chunk, primals, tangents):
    arrays, g, *_ = primals
    size = _chunk_size(rule, chunk, False, arrays, g)
    return jax.jvp(partial(_walk, rule, False, size), primals, tangents)


def _chunk_size(
    rule: Rule, chunk: int | None, alone: bool, arrays: tuple[Array, ...], g: Array
) -> int:
    _, k, v, *_ = arrays
    time = known(v.shape[1])
    size = chunk or rule.chunk_size(time, k.shape[-1], v.shape[-1], g.shape[-1], alone)
    # A longer chunk would only add padding, in matrices of size by size.
    return min(size, max(16, 1 << (time - 1).bit_length()))


def _walk(
    rule: Rule, alone: bool, size: int, arrays: tuple[Array, ...], g: Array, state: Array,
    starts: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    batch, time, heads, _ = g.shape
    documents = None if starts is None else cut_documents(starts, heads, size)
    chunks = Chunks(tuple(cut(x, size) for x in arrays), Gates(cut(g, size), documents))
    rows = state.reshape(-1, *state.shape[2:])
    out, final = cast(tuple[Array, Array], chunked(rule, alone, chunks, rows))
    return join(out, batch, time), final.reshape(state.shape)
