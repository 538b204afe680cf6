"""How attention over a selection is spread over queries, heads and sequences, and in which form.

One function, `attend`, serves two forms. Masked: all queries share the keys and a mask says which
each attends to; 2 S (K + V) FLOPs per query and head over S keys, at the speed of a matrix product.
Gathered: every query has its own copy of the k keys it selected; 2 k (K + V) FLOPs, but each copy
is written and read again, three times its size in memory traffic, and only the query heads of one
key head share a copy. So masked wins until S is many times k; `prefers_gather` counts both.

Both run over chunks of queries, recomputed in the backward pass: memory is linear in time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from toolkit.attention._attend import Mask, attend
from toolkit.attention._caches import cut_as_arrays_are
from toolkit.attention._shapes import HeadValues, Queries, known
from toolkit.attention.execution.cores import free_cores, over_cores
from toolkit.attention.softmax.forms import attend_to_keys
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.sparse.selection import selected_indices

QUERIES = 64  # in a chunk

# FLOPs of a matrix product in the time one byte crosses the memory bus; TPUs resemble GPUs.
FLOPS_PER_BYTE = {"cpu": 5, "gpu": 200}


def attend_to_past(
    q: Queries, k: Float[Array, "batch key_value_heads keys key"],
    v: Float[Array, "batch key_value_heads keys value"], mask: Mask, scale: float,
) -> HeadValues:  # fmt: skip
    """Softmax attention to the rows that a mask lets see."""
    inputs = Inputs(q, k.swapaxes(2, 3), v.swapaxes(2, 3))
    return attend_to_keys(inputs, Context(mask), Options(scale))[0]


def attend_selected(
    q: Float[Array, "queries key_value_heads group key"],
    k: Float[Array, "key_value_heads keys key"], v: Float[Array, "key_value_heads keys value"],
    mask: Bool[Array, "queries keys"], scale: float, copies: int | None, *,
    at_once: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Outputs [queries, key_value_heads, group, value] of attention to the keys in a mask, and the
    logarithms of their sums of exponentials; `copies` keys are gathered, or None."""
    index, filled = (None, mask) if copies is None else selected_indices(mask, copies)

    def head(q, k, v):
        if index is not None:
            k, v = k[index], v[index]
        found = attend(q, k, v, filled, scale=scale)
        return found.out, found.lse

    out, residual = each(head, q.swapaxes(0, 1), k, v, at_once=at_once)
    return out.swapaxes(0, 1), residual.swapaxes(0, 1)


def by_heads(
    method: Callable[..., tuple[Array, Any]], tokens: tuple[Any, ...], cache: Any,
    heads: tuple[int | None, ...], *how: Any,
) -> tuple[Array, Any]:  # fmt: skip
    """Run method(*tokens, cache, *how) -> (out, cache) as one program, each device its own heads.

    `heads` names the axis of heads of each of the tokens, the first of which are the queries.
    """
    if cache is None:
        return _without_cache(free_cores(), method, heads, how, *tokens), None
    return _with_cache(method, heads, how, *tokens, cache)


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _without_cache(cores, method, heads, how, *tokens):
    share = lambda *tokens: method(*tokens, None, *how)[0]  # noqa: E731
    return over_cores(cores, share, tokens, heads, heads[0])


@partial(jax.jit, static_argnums=(0, 1, 2))
def _with_cache(method, heads, how, *tokens_and_cache):
    *tokens, cache = tokens_and_cache
    share = lambda *arrays: method(*arrays, *how)  # noqa: E731
    return cut_as_arrays_are(share, tokens, cache, heads, (heads[0],))


Selection = Literal["masked", "gathered"]


def in_cheaper_form(
    form: Callable[[bool], Callable[..., Any]], *arrays: Any, keys: int, selected: int, group: int,
    implementation: Selection | None,
) -> Any:  # fmt: skip
    """Run form(is_gathered) on arrays, in the named form or the cheaper one on the platform.

    Masked where a program is exported for any number of keys, which may be fewer than are selected.
    """
    if not isinstance(keys, int):
        if implementation == "gathered":
            raise ValueError(
                'implementation="gathered" needs a known number of keys; "masked" runs any number.'
            )
        implementation = "masked"
    if implementation is not None:
        return form(implementation == "gathered")(*arrays)
    element_bytes = arrays[0].dtype.itemsize
    cpu, other = (
        prefers_gather(keys, selected, group, element_bytes, platform=platform)
        for platform in ("cpu", "gpu")
    )
    if cpu == other:
        return form(cpu)(*arrays)
    return lax.platform_dependent(*arrays, cpu=form(cpu), default=form(other))


def prefers_gather(
    keys: int, selected: int, group: int, element_bytes: int, *, platform: str
) -> bool:
    """Whether copying the selected keys costs less than a masked product with all of them.

    In FLOPs per channel of a query head, of the `group` that shares a copy.
    """
    flops_per_byte = FLOPS_PER_BYTE[platform]
    copies = 3 * selected * element_bytes * flops_per_byte / group
    return copies + 2 * selected < 2 * keys


def each(function: Callable[..., Any], *arrays: Any, at_once: bool = False) -> Any:
    """Apply a function to every entry of the leading axis (sequences, heads), and stack.

    One after another on a CPU, where one product of two matrices is fast and a batch of them is
    not; all at once on an accelerator, which needs the parallel work, and in decoding, where a
    loop would copy every entry's part of the cache.
    """
    every = jax.vmap(function)
    if at_once:
        return every(*arrays)

    def one_by_one(*arrays):
        return lax.map(lambda entry: function(*entry), arrays)

    return lax.platform_dependent(*arrays, cpu=one_by_one, default=every)


def over_queries(function: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to chunks of `QUERIES` queries, recomputing each in the backward pass."""
    time = jax.tree.leaves(arrays)[0].shape[0]
    size = min(QUERIES, known(time))

    def split(array):
        widths = [(0, -(-time // size) * size - time)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(-1, size, *array.shape[1:])

    def join(chunks):
        return chunks.reshape(-1, *chunks.shape[2:])[:time]

    run = jax.checkpoint(lambda chunk: function(*chunk), prevent_cse=False)
    return jax.tree.map(join, lax.map(run, jax.tree.map(split, arrays)))
