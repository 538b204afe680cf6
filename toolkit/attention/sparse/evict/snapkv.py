r"""SnapKV: the last tokens of a prompt vote for those before them, neighbours share their votes.

    score_i = mean over |j - i| <= kernel / 2 of mean over window queries t, heads of p_tj

The window itself is kept. Means run over the query heads that share a key head, as in the usual
port to grouped heads; the pooled votes stop at the window, with zeros beyond it.

Source: Li et al. (2024), arXiv:2404.14469.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_count
from toolkit.attention.sparse.evict.evictor import Evictor, attention, newest
from toolkit.attention.sparse.selector import setting


@register_dataclass
@dataclass(frozen=True)
class SnapKV(Evictor):
    """Keep the tokens that the end of the prompt attends to.

    Attributes:
        recent: last tokens, always attended to; in the prompt, the window whose queries vote.
        kernel: neighbours that share their votes; odd.
    """

    sinks: int = setting(0)
    recent: int = setting(64)
    kernel: int = setting(5)

    def __post_init__(self):
        super().__post_init__()
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd; got {self.kernel}.")

    def build(self, keys: Array, values: Array, length, queries: Array) -> Array:
        window = length - self.recent + jnp.arange(self.recent, dtype=jnp.int32)
        own = queries[:, jnp.clip(window, 0, keys.shape[0] - 1)]
        votes = attention(keys, own, window, length).mean(axis=(0, 1))
        token = jnp.arange(keys.shape[0], dtype=jnp.int32)
        votes = jnp.pad(jnp.where(token < window[0], votes, 0), self.kernel // 2)
        pooled = sum(votes[i : i + keys.shape[0]] for i in range(self.kernel)) / self.kernel
        return jnp.where(token < window[0], pooled, newest(token))
