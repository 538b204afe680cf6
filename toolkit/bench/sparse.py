"""Sparse decoding: a step of each system, index update and all, against the fastest dense step.

Dense are a step of ours and PyTorch's, one and four query heads per key head; of a system's step
the parts are selection and copying, attention is what is left.

Every contender's recovered mass stands beside its time, as do the bytes it read; a check holds that
its output is exact attention over what it selected. The index has its own lines: beside an update
the same without an index, which appends the token and no more, and the time to build it as a share
of a dense prefill.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step, sparse
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.mixers.sparse_inputs import HEADS, SIZE, SYSTEMS, grouped, heavy_tailed
from toolkit.bench.peers import has_torch

GROUPS = (1, 4)  # query heads per key head
BUDGETS = {16384: 1024, 32768: 1024, 131072: 2048}
DENSE, TORCH = "dense", "torch SDPA"
LAST = 1024  # queries of a prompt, whose time stands for that of all


def cases(cores: int) -> Iterator[PlannedCase]:
    """Every system at every context."""
    for context, group, name in itertools.product(BUDGETS, GROUPS, SYSTEMS):
        heads = HEADS if group == 1 else f"{group * HEADS}/{HEADS}"
        label = f"{name}, B=1 H={heads} D={SIZE} context={context} float32"
        yield PlannedCase(label, partial(_case, name, context, group, cores))


def _case(name: str, context: int, group: int, cores: int, label: str) -> Case:
    settings, budget, least = SYSTEMS[name]
    budget = budget or sparse.FixedTokens(BUDGETS[context])
    selector = sparse.SELECTORS[name.split()[0]](**settings)
    drawn, host_keys, host_values = heavy_tailed(context)
    drawn = grouped(drawn, group)
    queries, keys, values = (jnp.asarray(x) for x in (drawn, host_keys, host_values))
    # The last slot is free: a step writes its token there, again and again.
    length, token = jnp.full(1, context - 1, jnp.int32), (keys[None, :, -1], values[None, :, -1])
    built, again = (_timed(sparse.build, selector, keys[None], values[None], length) for _ in "12")
    share = again[1] / prefill_seconds(context)

    def ours(cache: sparse.SparseCache, q: Array) -> tuple[sparse.Decoded, sparse.SparseCache]:
        new = sparse.update(selector, cache, *token)
        return sparse.decode_step(new, q, selector, budget), replace(new, length=cache.length)

    def selecting(cache: sparse.SparseCache, q: Array) -> tuple[Array, sparse.SparseCache]:
        read, cache = ours(cache, q)  # how many tokens are read takes the whole selection, no copy
        return read.tokens, cache

    @jax.jit
    def copying(keys: Array, values: Array, q: Array) -> Array:
        rows = places + (q.sum() > 0)
        copies = (x[jnp.arange(HEADS)[:, None], rows] for x in (keys, values))
        return jnp.stack(lax.optimization_barrier(tuple(copies)))

    def appending(selector: sparse.Selector) -> Callable[..., tuple[Array, sparse.SparseCache]]:
        def append(cache: sparse.SparseCache, q: Array) -> tuple[Array, sparse.SparseCache]:
            new = sparse.update(selector, cache, *token)
            return new.length, replace(new, length=cache.length)

        return append

    def dense(cache: KVCache, q: Array) -> tuple[Array, KVCache]:
        out, new = softmax_attention_step(q, *token, cache)
        return out, replace(new, length=cache.length)

    step = _repeated(ours, built[0])
    steps = [step(q) for q in queries[:, None]]
    mass, error = _quality(steps, context, drawn)
    most = steps[0].tokens.max().item()
    places = np.random.default_rng(0).integers(0, context - 1, (HEADS, most), dtype=np.int32)
    tokens = int(np.mean([np.asarray(read.tokens).sum() for read in steps]))
    read = int(np.mean([np.asarray(each.bytes_read).sum() for each in steps]))
    by_time = [x[None].swapaxes(2, 3) for x in (keys, values)]
    whole = _repeated(dense, KVCache(by_time[0], by_time[1], length, jnp.zeros_like(length)))
    add = _repeated(appending(selector), again[0])
    plain = sparse.Selector()
    append = _repeated(appending(plain), sparse.build(plain, keys[None], values[None], length))
    select = _repeated(selecting, sparse.build(selector, keys[None], values[None], length))
    mine, theirs = f"toolkit, {name}", f"toolkit, {DENSE}"
    peers = {theirs: _in_turn(whole, queries)}
    if has_torch():
        peers[TORCH] = _torch_step(drawn, host_keys, host_values, cores)
    facts: Mapping[str, Mapping[str, tuple[float, str]]] = {
        mine: {
            "recovered mass": (100 * float(mass.mean()), "percent"),
            "recovered mass, 5th percentile": (100 * float(np.percentile(mass, 5)), "percent"),
            "output error": (100 * error, "percent"),
            "tokens": (tokens / HEADS, "token"),
            "bytes read": (read, "byte"),
            "index built, of a dense prefill": (100 * share, "percent"),
        }
    }
    return Case(
        name=label,
        contenders={mine: _in_turn(lambda q: step(q).out, queries), **peers},
        parts={
            "selection, index update included": _in_turn(select, queries),
            "keys and values copied": _in_turn(partial(copying, keys, values), queries),
            "index update": _in_turn(add, queries),
            "append alone": _in_turn(append, queries),
        },
        check=_bounded_error(mine, list(peers), float(mass[0].min()), values),
        ours=mine,
        targets=dict.fromkeys(peers, least) if context == max(BUDGETS) else {},
        note=f"mass {mass.mean():.3f} (5th percentile {np.percentile(mass, 5):.3f}), output error "
        f"{error:.3f}, {tokens // HEADS} tokens, {read / 2**20:.1f} of "
        f"{8 * context * HEADS * SIZE / 2**20:.0f} MiB; built in {again[1]:.2g} s, "
        f"{share:.2%} of a dense prefill",
        facts=lambda: facts,
    )


@cache
def prefill_seconds(context: int) -> float:
    """Causal attention to a whole prompt, from the time of its last queries.

    seconds = seconds of these * pairs of a query and a key / pairs of these
    """
    keys, values = (jnp.asarray(x)[None].swapaxes(1, 2) for x in heavy_tailed(context)[1:])
    last = min(LAST, context)
    arguments = keys[:, -last:], keys, values
    prefill = jax.jit(partial(softmax_attention, query_offset=context - last))
    _, (_, seconds) = (_timed(prefill, *arguments) for _ in "12")
    return seconds * context * (context + 1) / (last * (2 * context - last + 1))


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(call(*args))
    return result, time.perf_counter() - start


def _repeated(function: Callable[..., tuple[Any, Any]], state: Any) -> Callable[[Array], Any]:
    """A step on a state updated in place."""
    jitted, donated = jax.jit(function, donate_argnums=0), [state]

    def call(q: Array) -> Any:
        out, donated[0] = jitted(donated[0], q)
        return jax.block_until_ready(out)

    return call


def _in_turn(call: Callable[[Array], Any], queries: Array) -> Callable[[], Any]:
    """A contender that asks another query every time: what one read, the next finds in no cache."""
    turns = itertools.cycle(queries[:, None])
    return lambda: call(next(turns))


def _torch_step(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, threads: int
) -> Callable[[], np.ndarray]:
    """PyTorch's fused attention; a group is rows of one product, four times faster than its own."""
    import torch

    torch.set_num_threads(threads)
    rows = itertools.cycle(torch.from_numpy(queries.reshape(len(queries), 1, HEADS, -1, SIZE)))
    cache = [torch.from_numpy(x)[None] for x in (keys, values)]
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(next(rows), *cache).numpy().reshape(1, -1, SIZE)


def _quality(
    steps: list[sparse.Decoded], context: int, queries: np.ndarray
) -> tuple[np.ndarray, float]:
    """Recovered mass [queries, heads] and the relative error of the outputs, on the host."""
    _, keys, values = heavy_tailed(context)
    group = queries.shape[1] // HEADS
    keys, values = (np.repeat(x, group, axis=0) for x in (keys, values))
    scores = np.einsum("qhd,hsd->qhs", queries, keys, optimize=True) * SIZE**-0.5
    most = scores.max(axis=2, keepdims=True)
    y = np.exp(scores - most)
    lse = most[..., 0] + np.log(y.sum(axis=2))
    exact = np.einsum("qhs,hsd->qhd", y / y.sum(axis=2, keepdims=True), values, optimize=True)
    out, part = (
        np.concatenate([np.asarray(x) for x in xs])
        for xs in zip(*((step.out, step.lse) for step in steps), strict=True)
    )
    error = np.sqrt(np.square(out - exact).sum() / np.square(exact).sum())
    return np.exp(part - lse), float(error)


def _bounded_error(
    name: str, peers: list[str], least_mass: float, values: Array
) -> Callable[[Mapping[str, Any]], None]:
    """An output may be off by 2 (1 - mass) max |v|: exact attention to what was selected is not."""
    largest = float(jnp.linalg.norm(values, axis=-1).max())

    def check(results: Mapping[str, Any]) -> None:
        agree(1e-4)({peer: results[peer] for peer in peers})
        apart = np.asarray(results[name]) - np.asarray(results[peers[0]])
        off, bound = np.linalg.norm(apart, axis=-1).max(), 2 * (1 - least_mass) * largest + 1e-4
        if not off <= bound:
            raise ValueError(f"{name!r} is off by {off:.3f}; its mass allows {bound:.3f}")

    return check
