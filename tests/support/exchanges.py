"""An exchange of one tensor by itself, run and compiled: what its tests share."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives
from toolkit.parallel import layout, make_mesh
from toolkit.parallel.gradients import ExchangePlan, ExchangeState

DEVICES = 8
LEVELS = {"node": 2, "gpu": 4}


class Alone:
    """`exchange` on gradients [8, ...] of the replicas; `mean` is what each has afterwards."""

    def __init__(self, exchange, shape, axes=None, scheme="data"):
        axes = axes or {"data": DEVICES}
        mesh = make_mesh(axes)
        found = layout({"w": jnp.zeros(shape)}, mesh, scheme, min_elements=0)
        self.plan = plan = ExchangePlan(exchange, found)
        own, cut = found.replica_spec, P()
        if found.placements[0].states["optimizer"] != found.placements[0].spec:
            cut = found.placements[0].states["optimizer"]
        self.sharding = NamedSharding(mesh, own)

        @jax.jit
        @partial(
            jax.shard_map, mesh=mesh, in_specs=(own, own, P()), out_specs=(cut, own, own),
            check_vma=False,
        )  # fmt: skip
        def step(gradients, residuals, step):
            mean, residuals = plan.mean({"w": gradients[0]}, residuals, step)
            return mean["w"], residuals, mean["w"][None]

        self.program = step

    def __call__(self, gradients, state=None):
        """(mean, its copy on every replica, state)."""
        state = state or self.plan.init()
        given = jax.device_put(gradients, self.sharding)
        mean, residuals, copies = self.program(given, state.residuals, state.step)
        return mean, copies, ExchangeState(state.step + 1, residuals)

    def bytes_sent(self, gradients):
        """As the compiled program has it."""
        state = self.plan.init()
        given = jax.device_put(gradients, self.sharding)
        compiled = self.program.lower(given, state.residuals, state.step).compile()
        return sum(found.total_bytes_sent for found in collectives(compiled))


def gradients(n, seed=0):
    """Gaussian gradients of all replicas."""
    return jax.random.normal(jax.random.key(seed), (DEVICES, n))
