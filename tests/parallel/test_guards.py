"""What compilers and libraries of communication got wrong elsewhere must be right here."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from toolkit.parallel import launch, make_mesh

# With jax.distributed, CPUs communicate through gloo, within one process too. jax issue 40830: the
# ends of chunks of some megabytes were wrong, now and then, on the first device of each group.
SCATTER_SUMS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from toolkit.parallel import join_processes, make_mesh
join_processes()
mesh = make_mesh({"group": 2, "member": 2})
scatter = lambda x: jax.lax.psum_scatter(x, "member", scatter_dimension=2, tiled=True)
specs = {"in_specs": P("group", "member"), "out_specs": P("group", None, "member")}
program = jax.jit(jax.shard_map(scatter, mesh=mesh, **specs))
x = np.random.default_rng(0).integers(0, 1000, (2, 2, 1 << 21)).astype(np.float32)
for turn in range(6):
    np.testing.assert_array_equal(program(x + turn)[:, 0], (x + turn).sum(1))
"""


@pytest.mark.slow
def test_gloo_scatters_sums_right():
    assert launch([sys.executable, "-c", SCATTER_SUMS], processes=1, devices=4) == 0


@pytest.mark.parametrize("table", [("data",), ("model",), (None, "model"), ("model", "data")])
@pytest.mark.parametrize("ids", [("data",), (("data", "model"),)])
def test_scatter_add_is_right_on_every_mesh(table, ids):
    """The gradient of an embedding; xla issue 42481: partial sums in the wrong order."""
    mesh = make_mesh({"data": 4, "model": 2})
    rng = np.random.default_rng(0)
    values, factor = rng.normal(size=(16, 8)), rng.normal(size=(8, 4, 8))
    values, factor = values.astype(np.float32), factor.astype(np.float32)
    tokens = rng.integers(0, 16, (8, 4))
    wanted = np.zeros_like(values)
    np.add.at(wanted, tokens, factor)
    placed = (
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in ((values, table), (tokens, ids), (factor, ids))
    )
    gradient = jax.jit(jax.grad(lambda values, tokens, factor: jnp.sum(values[tokens] * factor)))
    np.testing.assert_allclose(gradient(*placed), wanted, rtol=1e-6, atol=1e-6)
