"""What the layers of a pipeline's stage pass from one slice of a sequence to the next."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit.parallel.pipeline.stores import Stores

Arrays = list[Float[Array, "batch *rest"]]


class SliceCaches:
    """The caches of every stage as one list of floating arrays, which all stages pass on.

    Each stage uses those of the arrays that its layers need; keys, values and states in them carry
    gradients back to the slices before.

    Args:
        slices: how many make a sequence.
        empty: for each stage (sequences, tokens) -> the caches of its layers before the first.
    """

    def __init__(self, slices: int, empty: Sequence[Callable[[int, int], tuple[Any, ...]]]):
        self._slices, self._of_stages = slices, empty

    def start(self, _: Any, data: dict[str, Array]) -> Arrays:
        """What the first slice of a sequence finds: nothing of it is used."""
        return [jnp.zeros(a.shape, a.dtype) for a in self._stores(data["tokens"]).leaves[0]]

    def before(self, stage: int, carried: Arrays, data: dict[str, Array]) -> tuple[Any, ...]:
        """A stage's caches before a slice: empty where the slice begins a document."""
        leaves, tree = jax.tree.flatten(self._empty(stage, data["tokens"]))
        found = self._stores(data["tokens"]).get([carried], stage)
        goes_on: Bool[Array, "batch"] = data["continues"]

        def chosen(old: Array, empty: Array) -> Array:
            rows = goes_on.reshape(-1, *(1,) * (empty.ndim - 1))
            return jnp.where(rows, old.astype(empty.dtype), empty)

        return tree.unflatten(map(chosen, found, leaves))

    def after(
        self, stage: int, carried: Arrays, caches: tuple[Any, ...], data: dict[str, Array]
    ) -> Arrays:
        """What goes on to the next slice: the stage's new caches, in their places."""
        return self._stores(data["tokens"]).put([carried], stage, _floating(caches))[0]

    def _empty(self, stage: int, tokens: Int[Array, "batch time"]) -> tuple[Any, ...]:
        batch, time = tokens.shape
        return self._of_stages[stage](batch, time * self._slices)

    def _stores(self, tokens: Int[Array, "batch time"]) -> Stores:
        kinds = [
            jax.eval_shape(lambda s=s: _floating(self._empty(s, tokens)))
            for s in range(len(self._of_stages))
        ]
        return Stores([0] * len(kinds), kinds)


def _floating(caches: tuple[Any, ...]) -> Arrays:
    """Lengths are whole numbers below 2^24, which float32 holds exactly."""
    is_floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return [a if is_floating(a) else a.astype(jnp.float32) for a in jax.tree.leaves(caches)]
