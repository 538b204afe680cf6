"""Quest: the largest and smallest number of every channel in a page bound its keys' scores.

    U(q, page) = sum_c max(q_c M_c, q_c m_c) = relu(q) . M - relu(-q) . m >= q . k

Pages are runs of tokens; the page of the newest token is always read. Where neighbouring keys are
alike the bound is tight; on unordered keys it says almost nothing: in models with induction heads,
whose keys resemble no neighbour's, it keeps no more of the softmax than random tokens of as many
bytes (data/experiments/sparse.jsonl), as does the paper's own selection per query head; the best
pages would keep half as much again.

Source: Tang et al. (2024), arXiv:2406.10774.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_count
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.selector import Selector, setting


class Bounds(NamedTuple):
    """Of every page and channel; pages last, so that a query reads rows contiguous in time."""

    largest: Float[Array, "key pages"]
    smallest: Float[Array, "key pages"]


@register_dataclass
@dataclass(frozen=True)
class Quest(Selector):
    """Rank pages by an upper bound of their keys' scores.

    Attributes:
        page_size: tokens of a page.
    """

    page_size: int = setting(16)

    group: ClassVar[str] = "max"

    def __post_init__(self):
        super().__post_init__()
        check_count("page_size", self.page_size, 1, " token")

    @property
    def unit(self) -> int:
        return self.page_size

    def build(self, keys: Array, values: Array, length) -> Bounds:
        capacity, size = keys.shape
        pages = -(-capacity // self.page_size)
        rows = jnp.pad(keys, ((0, pages * self.page_size - capacity), (0, 0)))
        rows = rows.reshape(pages, self.page_size, size)
        is_token = (jnp.arange(pages * self.page_size) < length).reshape(pages, -1)[..., None]
        largest = jnp.where(is_token, rows, -jnp.inf).max(axis=1)
        smallest = jnp.where(is_token, rows, jnp.inf).min(axis=1)
        is_page = is_token[:, 0]
        return Bounds(*(jnp.where(is_page, x, 0).T for x in (largest, smallest)))

    def update(self, index: Bounds, k: Array, v: Array, position) -> Bounds:
        page, is_first = position // self.page_size, position % self.page_size == 0
        return Bounds(
            *(
                bound.at[:, page].set(jnp.where(is_first, k, widen(bound[:, page], k)))
                for widen, bound in zip((jnp.maximum, jnp.minimum), index, strict=True)
            )
        )

    def scores(self, index: Bounds, keys: Array, q: Array, length) -> Array:
        precise = accumulator(q.dtype)
        above = jnp.matmul(jax.nn.relu(q), index.largest, preferred_element_type=precise)
        return above - jnp.matmul(jax.nn.relu(-q), index.smallest, preferred_element_type=precise)

    def logits(self, index: Bounds, q: Array, scores: Array) -> Array:
        """Of `page_size` keys in the middle of their bounds."""
        middle = (index.largest + index.smallest) / 2
        middle = jnp.matmul(q, middle, preferred_element_type=scores.dtype)
        return middle + jnp.log(jnp.asarray(self.page_size, scores.dtype))

    def index_bytes(self, index: Bounds, q: Array, length) -> Array:
        pages = -(-length // self.page_size)
        return pages * (2 * q.shape[1] * index.largest.dtype.itemsize)
