r"""InfLLM-v2: overlapping means of a few keys say which blocks a group of heads reads.

    m_w = mean of k_i, i = stride w, ..., stride w + kernel - 1
    score of a block = max over windows w that overlap it of sum over heads of softmax_w(q . m_w)

The softmax is over the windows that are complete. The first block and those of the local window are
always read. The model is trained with this selection; other models may be read by it, too.

Source: Zhao et al. (2025), arXiv:2509.24663; MiniCPM4, arXiv:2506.07900.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import masked_softmax
from toolkit.attention._checks import check_count
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.selector import Selector, setting

Sums = Float[Array, "key strides"]  # of the keys of every stride


@register_dataclass
@dataclass(frozen=True)
class InfLLM(Selector):
    """Rank blocks by the attention of a group's heads to means of overlapping windows of keys.

    Attributes:
        block_size: tokens of a block.
        kernel: keys of a window, a multiple of stride.
        stride: from one window to the next; divides block_size.
    """

    sinks: int = setting(64)
    recent: int = setting(2048)
    block_size: int = setting(64)
    kernel: int = setting(32)
    stride: int = setting(16)

    group: ClassVar[str] = "sum"
    estimates_mass: ClassVar[bool] = False
    compares_scores: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_count("stride", self.stride, 1, " token")
        for name in ("block_size", "kernel"):
            check_count(name, getattr(self, name), 1, " token")
            if getattr(self, name) % self.stride:
                raise ValueError(
                    f"{name} must be a multiple of stride {self.stride}; got {getattr(self, name)}."
                )

    @property
    def unit(self) -> int:
        return self.block_size

    def build(self, keys: Array, values: Array, length) -> Sums:
        rows = jnp.pad(keys, ((0, -keys.shape[0] % self.block_size), (0, 0)))
        rows = jnp.where((jnp.arange(rows.shape[0]) < length)[:, None], rows, 0)
        rows = rows.reshape(-1, self.stride, keys.shape[1])
        return rows.sum(axis=1, dtype=accumulator(keys.dtype)).T

    def update(self, index: Sums, k: Array, v: Array, position) -> Sums:
        place = position // self.stride
        before = jnp.where(position % self.stride == 0, 0, index[:, place])
        return index.at[:, place].set(before + k.astype(index.dtype))

    def scores(self, index: Sums, keys: Array, q: Array, length) -> Array:
        strides, span = index.shape[1], self.kernel // self.stride
        sums = jnp.pad(index, ((0, 0), (0, span)))
        means = sum(sums[:, i : i + strides] for i in range(span)) / self.kernel
        x = jnp.matmul(q.astype(index.dtype), means)
        first = self.stride * jnp.arange(strides, dtype=jnp.int32)
        is_whole = first + self.kernel <= length
        exponentials, total, _ = masked_softmax(x, is_whole[None])
        votes = (exponentials / total).sum(axis=0)
        # The windows that begin in a block, and the last one that begins before it.
        votes = jnp.pad(votes, (1, 0))
        inside = votes[1:].reshape(-1, self.block_size // self.stride).max(axis=1)
        before = votes[:-1].reshape(inside.shape[0], -1)[:, 0]
        return jnp.broadcast_to(jnp.maximum(inside, before)[None], (q.shape[0], inside.shape[0]))

    def index_bytes(self, index: Sums, q: Array, length) -> Array:
        return -(-length // self.stride) * (q.shape[1] * q.dtype.itemsize)
