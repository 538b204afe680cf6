"""The selected part of a sparse step by a page table: a kernel reads only these pages.

Ranked pages are read whole, in their order, until a head's count of tokens is reached; of the last
page only the first tokens are attended to, as in the form that gathers rows.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from toolkit.attention.kernels.dispatch import attend_pages
from toolkit.attention.sparse.budget import Budget
from toolkit.attention.sparse.parts import Head, Part
from toolkit.attention.sparse.selector import Selector

PAGE = 64  # tokens of a page that the kernel copies at once


def is_page_table(selector: Selector, budget: Budget, group: str) -> bool:
    """Whether a step selects whole pages of the kernel's size, the same for a group's heads."""
    is_runs = type(selector).expand is Selector.expand and selector.unit == PAGE
    return is_runs and not budget.needs_mass and group in ("max", "sum")


def attend_to_pages(
    selector: Selector,
    head: Head,
    pages: Int[Array, "batch heads ranked"],
    limit: Int[Array, "batch heads"],
) -> Part:
    """Attend to the first `limit` selectable tokens of ranked pages, all heads of all rows."""
    size, start = selector.unit, head.start[..., None]
    low = jnp.maximum(pages * size, selector.sinks)
    high = jnp.minimum((pages + 1) * size, start)
    sizes = jnp.maximum(high - low, 0)
    before = jnp.cumsum(sizes, axis=-1) - sizes
    taken = jnp.clip(limit[..., None] - before, 0, sizes)
    rows = [
        x.reshape(-1, *x.shape[2:])
        for x in (head.q, head.keys, head.values, pages, low, low + taken)
    ]
    out, lse = attend_pages(*rows, page_size=size)
    out, lse = (x.reshape(*limit.shape, *x.shape[1:]) for x in (out, lse))
    tokens = taken.sum(axis=-1)
    none = jnp.zeros((*limit.shape, 1, 1), out.dtype)  # sums that only a tail asks for
    return Part(out, lse, tokens, tokens[..., None], none, none, None)
