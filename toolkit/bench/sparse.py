"""Sparse decoding: a step of each system, index update and all, against the fastest dense step.

The keys are heavy-tailed, as a model's are and normal numbers are not: topics that stay for a
while, channels with a large bias, sinks. Every contender's recovered mass stands beside its time,
as do the bytes it read; a check holds that its output is exact attention over what it selected.
What the index costs is told, too: beside an update the same without an index, which appends the
token and no more, and the time to build it as a share of a dense prefill. On a GPU every system
attends by its kernel, and SALE reads a prompt.
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
from jax import Array

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step, sparse
from toolkit.attention.sparse.prefill import attend_tiles, sale_tiles
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase

HEADS, SIZE, QUERIES = 8, 128, 8
BUDGETS = {16384: 1024, 32768: 1024, 131072: 2048}
# system -> settings, budget (None: as many tokens as the context's), least ratio wanted at
# the longest context.
SYSTEMS: dict[str, tuple[dict[str, Any], sparse.MassTarget | None, float]] = {
    "window": ({}, None, 5),
    "quest": ({"page_size": 64}, None, 5),
    "tactic": ({"cluster_size": 32}, None, 5),
    "tactic to mass 0.9": ({"cluster_size": 32}, sparse.MassTarget(0.9, 2048), 5),
    "hata": ({}, None, 3),
    "pqcache": ({}, None, 3),
    "oracle": ({}, None, 1),
}
DENSE = "dense"
LAST = 1024  # queries of a prompt, whose time stands for that of all

# On a GPU, in bfloat16: attention by kernels, at four times as many query as key-value heads.
GROUP, GPU_BUDGET = 4, 2048
GPU_SIZES = tuple((batch, context) for batch in (1, 8) for context in (32768, 131072, 262144))
PUBLISHED = {"quest": 7.0, "tactic to mass 0.9": 7.3, "hata": 7.2}  # times a dense step's speed
GPU_SYSTEMS = ("quest", "tactic", "tactic to mass 0.9", "hata", "pqcache")
ROUNDED = 0.02  # of the root mean square, beside the same tokens gathered
PROMPTS, SALE, PUBLISHED_SALE = (65536, 131072), "sale, pallas", 3.36
CHECKED = 64  # last queries of a prompt, attended to tile by tile without a kernel


def cases(cores: int) -> Iterator[PlannedCase]:
    """Every system at every context; on a GPU what has a kernel."""
    if jax.default_backend() == "gpu":
        sizes = f"H={GROUP * HEADS}/{HEADS} D={SIZE}"
        for name, (batch, context) in itertools.product(GPU_SYSTEMS, GPU_SIZES):
            label = f"{name}, B={batch} {sizes} context={context} bfloat16"
            build = partial(kernel_case, name, batch, context, GPU_BUDGET, "pallas")
            yield PlannedCase(label, build)
        for context in PROMPTS:
            label = f"sale prefill, B=1 {sizes} context={context} bfloat16"
            yield PlannedCase(label, partial(prefill_case, context, "pallas", "cudnn"))
        return
    for context in BUDGETS:
        for name in SYSTEMS:
            label = f"{name}, B=1 H={HEADS} D={SIZE} context={context} float32"
            yield PlannedCase(label, partial(_case, name, context))


@cache
def heavy_tailed(context: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [queries, heads, key], keys and values [heads, context, key] of one sequence."""
    random = np.random.default_rng(seed)
    normal = partial(random.standard_normal, dtype=np.float32)
    topics = 64
    keys = np.empty((HEADS, context, SIZE), np.float32)
    values, queries = np.empty_like(keys), np.empty((QUERIES, HEADS, SIZE), np.float32)
    for head in range(HEADS):
        centres, bias = normal((topics, SIZE)), np.zeros(SIZE, np.float32)
        outliers = random.choice(SIZE, 4, replace=False)
        bias[outliers] = 8 * random.choice([-1, 1], 4)
        chances = random.permutation(1 / np.arange(1, topics + 1))
        drawn = random.choice(topics, context, p=chances / chances.sum())
        changes = np.where(random.random(context) < 0.05, np.arange(context), 0)
        topic = drawn[np.maximum.accumulate(changes)]
        spread = np.exp(0.25 * normal((context, 1)))
        k = bias + 0.7 * centres[topic] + 0.7 * normal((context, SIZE)) * spread
        sharpness = np.exp(random.uniform(np.log(0.6), np.log(2.2)))
        needles = k[random.integers(4, context, (2, QUERIES))].sum(axis=0) - 2 * bias
        of_query = centres[random.integers(0, topics, QUERIES)]
        q = 0.8 * of_query + 0.35 * needles + 0.5 * normal((QUERIES, SIZE))
        q = sharpness * q + np.where(bias != 0, 2 * np.sign(bias), 0)
        # Sinks along the outliers, as long as makes them hold some 0.3 of the softmax.
        along = np.sign(bias)
        scores = (q @ k.T) * SIZE**-0.5
        most = scores.max(axis=1)
        total = most + np.log(np.exp(scores - most[:, None]).sum(axis=1))
        sinks = bias + 0.3 * normal((4, SIZE))
        missing = total + np.log(0.43 / 4) - (q @ sinks.T).mean(axis=1) * SIZE**-0.5
        k[:4] = sinks + (missing * SIZE**0.5 / (q @ along)).mean() * along
        v = normal((context, SIZE))
        v *= np.exp(0.1 * normal((context, 1))) / np.linalg.norm(v, axis=1, keepdims=True)
        v[:4] *= 0.1
        keys[head], values[head], queries[:, head] = k, v, q
    return queries, keys, values


def _case(name: str, context: int, label: str) -> Case:
    settings, budget, least = SYSTEMS[name]
    budget = budget or sparse.FixedTokens(BUDGETS[context])
    selector = sparse.SELECTORS[name.split()[0]](**settings)
    queries, keys, values = (jnp.asarray(x) for x in heavy_tailed(context))
    # The last slot is free: a step writes its token there, again and again.
    length, token = jnp.full(1, context - 1, jnp.int32), (keys[None, :, -1], values[None, :, -1])
    built, again = (_timed(sparse.build, selector, keys[None], values[None], length) for _ in "12")
    share = again[1] / prefill_seconds(context)

    def ours(cache: sparse.SparseCache, q: Array) -> tuple[sparse.Decoded, sparse.SparseCache]:
        new = sparse.update(selector, cache, *token)
        return sparse.decode_step(new, q, selector, budget), replace(new, length=cache.length)

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
    mass, error = _quality(steps, context)
    tokens = int(np.mean([np.asarray(read.tokens).sum() for read in steps]))
    read = int(np.mean([np.asarray(each.bytes_read).sum() for each in steps]))
    by_time = [x[None].swapaxes(2, 3) for x in (keys, values)]
    whole = _repeated(dense, KVCache(by_time[0], by_time[1], length, jnp.zeros_like(length)))
    add = _repeated(appending(selector), again[0])
    plain = sparse.Selector()
    append = _repeated(appending(plain), sparse.build(plain, keys[None], values[None], length))
    mine, theirs = f"toolkit, {name}", f"toolkit, {DENSE}"
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
        contenders={
            mine: _in_turn(lambda q: step(q).out, queries),
            theirs: _in_turn(whole, queries),
        },
        parts={
            "index update": _in_turn(add, queries),
            "append alone": _in_turn(append, queries),
        },
        check=_bounded_error(mine, theirs, float(mass[0].min()), values),
        ours=mine,
        targets={theirs: least} if context == max(BUDGETS) else {},
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


def kernel_case(name: str, batch: int, context: int, budget: int, form: Any, label: str) -> Case:
    """A step of a system by its kernel, against the same tokens gathered, and against all tokens.

    Scores and selection are XLA's in both.
    """
    settings, wanted, _ = SYSTEMS[name]
    wanted = replace(wanted, most_tokens=budget) if wanted else sparse.FixedTokens(budget)
    selector = sparse.SELECTORS[name.split()[0]](**settings)
    kernel, gathered = f"{name}, pallas", f"{name}, gathered by xla"
    queries, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in heavy_tailed(context))
    keys, values = (jnp.broadcast_to(x, (batch, *x.shape)) for x in (keys, values))
    q = queries[:GROUP].swapaxes(0, 1).reshape(-1, SIZE)
    q = jnp.broadcast_to(q, (batch, *q.shape))
    cache = sparse.build(selector, keys, values, jnp.full(batch, context, jnp.int32))

    def step(implementation: Any) -> Callable[[], sparse.Decoded]:
        how = {"selector": selector, "budget": wanted, "implementation": implementation}
        decode = jax.jit(lambda cache, q: sparse.decode_step(cache, q, **how))
        return lambda: decode(cache, q)

    def facts() -> Mapping[str, Mapping[str, tuple[float, str]]]:
        read, first = step(form)(), q[0].reshape(HEADS, GROUP, SIZE)
        x = jnp.einsum("hgd,hsd->hgs", first, keys[0], preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(x * SIZE**-0.5, axis=-1).reshape(-1)
        mass = float(sparse.recovered_mass(read.lse[0], lse).mean())
        return {
            kernel: {
                "recovered mass": (100 * mass, "percent"),
                "tokens": (float(read.tokens.mean()), "token"),
                "bytes read": (float(read.bytes_read.sum()), "byte"),
            }
        }

    calls = {kernel: step(form), gathered: step("xla")}
    dense = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q[:, None], k, v)[:, 0])
    by_time = [x.swapaxes(1, 2) for x in (keys, values)]
    same_tokens = agree(ROUNDED, norm="rms")
    return Case(
        name=label,
        contenders={
            **{name: lambda step=step: step().out for name, step in calls.items()},
            DENSE: lambda: dense(q, *by_time),
        },
        check=lambda results: same_tokens({name: results[name] for name in calls}),
        ours=kernel,
        targets={DENSE: PUBLISHED[name]} if name in PUBLISHED else {},
        note=f"on {jax.devices()[0].device_kind}: {budget} of {context} tokens",
        facts=facts,
    )


def prefill_case(context: int, form: Any, implementation: Any, label: str) -> Case:
    """A prompt by SALE, its choice of tiles included, against dense attention to it.

    Neighbouring queries are alike, as those of a text are: runs of one tile's length ask the same.
    """
    queries, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in heavy_tailed(context))
    k, v = (x[None].swapaxes(1, 2) for x in (keys, values))
    random = np.random.default_rng(0)
    asked = random.integers(0, QUERIES, (GROUP, -(-context // CHECKED))).repeat(CHECKED, axis=1)
    q = queries[asked[:, :context]].transpose(1, 2, 0, 3).reshape(1, context, -1, SIZE)
    noise = jax.random.normal(jax.random.key(0), q.shape, q.dtype)
    q = q + 0.3 * noise.astype(q.dtype)

    @jax.jit
    def sale(q, k, v):
        tiles = sale_tiles(q, k, implementation=form)
        return attend_tiles(q, k, v, tiles, implementation=form)[0], tiles

    how = {"is_causal": True, "implementation": implementation}
    dense = jax.jit(partial(jax.nn.dot_product_attention, **how))
    tiles = sale(q, k, v)[1]
    last = context - 1 - (context - 1) % tiles.query_block  # of the last row of tiles
    pairs = jnp.repeat(tiles.kept[:, :, -1], tiles.key_block, axis=2)[:, :, None, :context]
    pairs &= jnp.arange(context)[None] <= jnp.arange(last, context)[:, None]
    ends = np.minimum((1 + np.arange(tiles.kept.shape[2])) * tiles.query_block, context)
    kept = float(tiles.kept.mean(axis=(0, 1)).sum() / (-(-ends // tiles.key_block)).sum())

    def check(results: Mapping[str, Any]) -> None:
        exact = jax.nn.dot_product_attention(q[:, last:], k, v, mask=pairs)
        agree(ROUNDED, norm="rms")({"its tiles": exact, SALE: results[SALE][:, last:]})

    return Case(
        name=label,
        contenders={SALE: lambda: sale(q, k, v)[0], DENSE: lambda: dense(q, k, v)},
        check=check,
        ours=SALE,
        targets={DENSE: PUBLISHED_SALE},
        note=f"on {jax.devices()[0].device_kind}: {kept:.1%} of the tiles",
    )


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


def _quality(steps: list[sparse.Decoded], context: int) -> tuple[np.ndarray, float]:
    """Recovered mass [queries, heads] and the relative error of the outputs, on the host."""
    queries, keys, values = heavy_tailed(context)
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
    name: str, dense: str, least_mass: float, values: Array
) -> Callable[[Mapping[str, Any]], None]:
    """An output may be off by 2 (1 - mass) max |v|: exact attention to what was selected is not."""
    largest = float(jnp.linalg.norm(values, axis=-1).max())

    def check(results: Mapping[str, Any]) -> None:
        off = np.linalg.norm(np.asarray(results[name]) - np.asarray(results[dense]), axis=-1).max()
        bound = 2 * (1 - least_mass) * largest + 1e-4
        if not off <= bound:
            raise ValueError(f"{name!r} is off by {off:.3f}; its mass allows {bound:.3f}")

    return check
