"""Mixtures inside `jax.shard_map`, where tokens vary along a mesh and weights do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.experts import mixture, route, router_logits
from toolkit.parallel import make_mesh

TOLERANCE = 2e-6


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("implementation", [None, "blocks", "padded", "gather", "dense"])
def test_tokens_on_several_devices_equal_one(implementation, is_checked):
    mesh, draw = make_mesh({"data": 4}, devices=jax.devices()[:4]), np.random.default_rng(0)
    shapes = (12, 8), (8, 6), (6, 8, 5), (6, 5, 8)
    arrays = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]

    def mix(x, kernel, gate, down):
        routing = route(router_logits(x, kernel), 2)
        return mixture(x, routing, gate, gate, down, implementation=implementation)

    def run(mix):
        def loss(*arrays):
            return (mix(*arrays) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arrays)

    specs = (P("data"), P(), P(), P())
    spread = jax.shard_map(
        mix, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=is_checked
    )
    for one, other in zip(jax.tree.leaves(run(spread)), jax.tree.leaves(run(mix)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())


def test_the_kernel_for_tpus_says_what_it_needs():
    mesh = make_mesh({"data": 4}, devices=jax.devices()[:4])
    x, gate, down = jnp.ones((4, 8)), jnp.ones((6, 8, 5)), jnp.ones((6, 5, 8))

    def mix(x):
        routing = route(router_logits(x, jnp.ones((8, 6))), 2)
        return mixture(x, routing, gate, gate, down, implementation="pallas")

    with pytest.raises(NotImplementedError, match="check_vma=False"):
        jax.shard_map(mix, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
