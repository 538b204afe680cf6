"""Sparse attention by kernels on a GPU: a step of each system that has one, and SALE's prefill."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import sparse
from toolkit.attention.sparse.prefill import attend_tiles, sale_tiles
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.mixers.sparse_inputs import HEADS, QUERIES, SIZE, SYSTEMS, heavy_tailed

DENSE = "dense"
# On a GPU, in bfloat16: attention by kernels, at four times as many query as key-value heads.
GROUP, GPU_BUDGET = 4, 2048
GPU_SIZES = tuple((batch, context) for batch in (1, 8) for context in (32768, 131072, 262144))
PUBLISHED = {"quest": 7.0, "tactic to mass 0.9": 7.3, "hata": 7.2}  # times a dense step's speed
GPU_SYSTEMS = ("quest", "tactic", "tactic to mass 0.9", "hata", "pqcache")
ROUNDED = 0.02  # of the root mean square, beside the same tokens gathered
PROMPTS, SALE, PUBLISHED_SALE = (65536, 131072), "sale, pallas", 3.36
CHECKED = 64  # last queries of a prompt, attended to tile by tile without a kernel


def cases() -> Iterator[PlannedCase]:
    """Every system with a kernel at every size, and SALE."""
    sizes = f"H={GROUP * HEADS}/{HEADS} D={SIZE}"
    for name, (batch, context) in itertools.product(GPU_SYSTEMS, GPU_SIZES):
        label = f"{name}, B={batch} {sizes} context={context} bfloat16"
        build = partial(kernel_case, name, batch, context, GPU_BUDGET, "pallas")
        yield PlannedCase(label, build)
    for context in PROMPTS:
        label = f"sale prefill, B=1 {sizes} context={context} bfloat16"
        yield PlannedCase(label, partial(prefill_case, context, "pallas", "cudnn"))


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
