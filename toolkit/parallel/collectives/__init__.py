"""Collectives inside `jax.shard_map` that follow a program of messages, by `ppermute`s in a loop.

Each takes a `toolkit.schedules.collectives.Program` and equals jax's own collective: to the bit for
integers and for all that is only copied, to rounding for sums of floats.

* `all_gather`: as `jax.lax.all_gather`
* `reduce_scatter`: as `jax.lax.psum_scatter`
* `all_reduce`: as `jax.lax.psum`
* `broadcast`: every rank gets the root's array
* `reduce`: the root gets the sum, the others zeros
"""

from toolkit.parallel.collectives.execution import (
    all_gather,
    all_reduce,
    broadcast,
    reduce,
    reduce_scatter,
)

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]
