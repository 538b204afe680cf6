"""A layer that reads several tokens one after the other and keeps its cache after each of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from toolkit.attention._caches import picked


class InTurn(NamedTuple):
    """The caches of a layer before and after each of its last tokens."""

    caches: tuple[Any, ...]  # the cache, and one more per token
    start: Int[Array, "batch"]  # tokens of every row before them

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "InTurn":
        """Clear some rows for other sequences."""
        return InTurn(tuple(cache.free(rows) for cache in self.caches), self.start)

    def truncate(self, lengths: Int[Array, "batch"]) -> Any:
        """The cache as it was after the given number of tokens of every row."""
        which = lengths - self.start
        return jax.tree.map(lambda *arrays: picked(arrays, which), *self.caches)

    def read(self, mixer: Any, x: Any, how: Mapping[str, Any]) -> tuple[Array, "InTurn"]:
        """Mix [batch, time, width] by steps; the layer's own matrices are read once per token."""
        cache, caches, out = self.caches[-1], list(self.caches), []
        window = {name: how[name] for name in ("window",) if how.get(name) is not None}
        arrays = {name: x for name, x in how.items() if name != "window" and x is not None}
        for at in range(jax.tree.leaves(x)[0].shape[1]):
            # Tokens come one per row, what layers share keeps its axis of time.
            own = {n: a[:, at] if n == "tokens" else a[:, at : at + 1] for n, a in arrays.items()}
            y, cache = mixer.step(
                jax.tree.map(lambda a, at=at: a[:, at], x), cache, **window, **own
            )
            out.append(y)
            caches.append(cache)
        return jnp.stack(out, axis=1), InTurn(tuple(caches), self.start)
