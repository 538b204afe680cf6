"""The caches of all requests that write: a row for each, in one block or in pages.

Both forms have the same methods, so the engine's programs are the same:

    view = batch.view(table)                       a LoopedCache of all rows
    batch = batch.written(view, table, position)   after a step
    batch = batch.insert(slot, cache, table, first)    a prompt that was read, into a row

Pages are arrays [pages, ...] that rows refer to by a table [slots, pages per row]; rows with the
same beginning refer to the same pages. Only what grows with the text lies in pages: recurrent
states, windows and lengths stay with the row. The view of a step is gathered, so that every layer
of `toolkit.looped` runs on pages unchanged; a step then copies what it reads. A kernel that reads
through the table, as vLLM's, saves that copy.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from toolkit._pytrees import register_dataclass
from toolkit.looped import LoopedCache, LoopedConfig


@register_dataclass
@dataclass(frozen=True)
class RowCache:
    """Every row in one block of memory of the full capacity: a `LoopedCache`, as it is."""

    cache: LoopedCache

    def view(self, table: Array) -> LoopedCache:
        return self.cache

    def written(self, view: LoopedCache, table: Array, position: Array) -> "RowCache":
        return RowCache(view)

    def insert(self, slot: Array, other: LoopedCache, table: Array, first: Array) -> "RowCache":
        return RowCache(self.cache.insert(slot[None], other))


@register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Rows in pages of `page` tokens.

    Source: Kwon et al., "PagedAttention", 2023 (arXiv:2309.06180), section 4.
    """

    pages: tuple[Array, ...]  # what grows with the text, [pages, ...] each
    rows: tuple[Array, ...]  # everything else, [slots, ...] each
    # for every leaf of a `LoopedCache` the axis of tokens, or None for one of `rows`
    axes: tuple[int | None, ...] = field(metadata={"static": True})
    tree: Any = field(metadata={"static": True})  # the structure of a `LoopedCache`
    page: int = field(metadata={"static": True})  # tokens of a page

    @classmethod
    def empty(
        cls, config: LoopedConfig, slots: int, capacity: int, page: int, pages: int
    ) -> "PagedCache":
        """No tokens; ValueError for a cache that cannot be cut into pages."""
        axes = growing_axes(config, capacity, page)
        small = jax.tree.leaves(LoopedCache.empty(config, 1, page))
        rows, tree = jax.tree.flatten(LoopedCache.empty(config, slots, capacity))
        return cls(
            tuple(
                jnp.zeros((pages, *leaf.shape[1:]), leaf.dtype)
                for leaf, axis in zip(small, axes, strict=True)
                if axis is not None
            ),
            tuple(leaf for leaf, axis in zip(rows, axes, strict=True) if axis is None),
            axes,
            tree,
            page,
        )

    def view(self, table: Int[Array, "slots pages"]) -> LoopedCache:
        """The cache of all rows, gathered; a row's pages that `table` lacks hold anything."""
        return self._joined(table, self.rows)

    def loaded(self, table: Int[Array, "pages"], states: tuple[Array, ...]) -> LoopedCache:
        """The cache of one row after its first pages, with the states that they ended in."""
        return self._joined(table[None], states)

    def _joined(self, table, rows):
        pages, others, leaves = iter(self.pages), iter(rows), []
        for axis in self.axes:
            if axis is None:
                leaves.append(next(others))
                continue
            array = jnp.moveaxis(next(pages)[table], 1, axis)
            shape = array.shape
            leaves.append(array.reshape(*shape[:axis], -1, *shape[axis + 2 :]))
        return jax.tree.unflatten(self.tree, leaves)

    def written(
        self, view: LoopedCache, table: Int[Array, "slots pages"], position: Int[Array, "slots"]
    ) -> "PagedCache":
        """After a step that wrote the token at `position` of every row: that page of each row is
        put back."""
        index = position // self.page
        target = jnp.take_along_axis(table, index[:, None], 1, mode="clip")[:, 0]
        pages, rows = [], []
        for axis, leaf in zip(self.axes, jax.tree.leaves(view), strict=True):
            if axis is None:
                rows.append(leaf)
                continue
            old = self.pages[len(pages)]
            unit = old.shape[axis]
            cut = jax.vmap(
                lambda row, i, axis=axis, unit=unit: jax.lax.dynamic_slice_in_dim(
                    row, i * unit, unit, axis - 1
                )
            )
            # A row that is not in use refers to pages that do not exist.
            pages.append(old.at[target].set(cut(leaf, index), mode="drop"))
        return PagedCache(tuple(pages), tuple(rows), self.axes, self.tree, self.page)

    def insert(
        self, slot: Array, other: LoopedCache, table: Int[Array, "pages"], first: Array
    ) -> "PagedCache":
        """Put a cache of one row into its pages from number `first` on; earlier ones are shared."""
        own = jnp.where(jnp.arange(table.shape[0]) >= first, table, len(self.pages[0]))
        pages, rows = [], []
        for axis, leaf in zip(self.axes, jax.tree.leaves(other), strict=True):
            if axis is None:
                rows.append(self.rows[len(rows)].at[slot].set(leaf[0]))
                continue
            old = self.pages[len(pages)]
            shape, place = leaf.shape[1:], axis - 1
            cut = leaf[0].reshape(*shape[:place], -1, old.shape[axis], *shape[place + 1 :])
            pages.append(old.at[own].set(jnp.moveaxis(cut, place, 0), mode="drop"))
        return PagedCache(tuple(pages), tuple(rows), self.axes, self.tree, self.page)

    def states(self, cache: LoopedCache) -> tuple[Array, ...]:
        """What does not grow of a cache of one row: kept where a page ends, to go on from there."""
        leaves = jax.tree.leaves(cache)
        return tuple(
            # Copied, as the cache is donated to the program that reads on.
            jnp.copy(leaf)
            for leaf, axis in zip(leaves, self.axes, strict=True)
            if axis is None
        )


def growing_axes(config: LoopedConfig, capacity: int, page: int) -> tuple[int | None, ...]:
    """For every leaf of a cache the axis that grows with its capacity, or None."""
    shapes = [
        [
            x.shape
            for x in jax.tree.leaves(jax.eval_shape(lambda n=n: LoopedCache.empty(config, 1, n)))
        ]
        for n in (page, capacity)
    ]
    axes: list[int | None] = []
    for small, large in zip(*shapes, strict=True):
        differs = [
            axis for axis, sizes in enumerate(zip(small, large, strict=True)) if len({*sizes}) > 1
        ]
        if (
            any(large[axis] * page != small[axis] * capacity for axis in differs)
            or len(differs) > 1
        ):
            raise ValueError(
                f"page: got {page}, and a cache of pattern {config.pattern!r} has an array of "
                f"{list(small)} for {page} tokens and {list(large)} for {capacity}; wanted a page "
                "that the layers' blocks divide, or None"
            )
        axes.append(differs[0] if differs else None)
    if not any(axis is not None for axis in axes):
        raise ValueError(
            f"pages: no cache of pattern {config.pattern!r} grows with the text; wanted None"
        )
    return tuple(axes)
