"""Compiled for TPUs ahead of time, exchanges send the bytes of their formulas, casts included."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("libtpu")
pytestmark = pytest.mark.nightly

# In a process of its own: libtpu reads the environment.
COMPILE = textwrap.dedent(
    """
    import json, sys
    from functools import partial
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from toolkit.measure import collectives
    from toolkit.parallel import data_parallel
    from toolkit.parallel.gradients import Exchange, ExchangePlan

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices), ("data",))
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    report = {}
    for text in sys.argv[1:]:
        plan = ExchangePlan(Exchange.parse(text), data_parallel(shape, mesh))
        body = lambda x: plan.mean(x[0], (), jnp.int32(0))[0]
        step = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
        own = NamedSharding(mesh, P("data"))
        given = jax.ShapeDtypeStruct((8, *shape.shape), jnp.float32, sharding=own)
        found = collectives(jax.jit(step).lower(given).compile())
        report[text] = sum(each.total_bytes_sent for each in found), plan.bytes_sent
    print(json.dumps(report))
    """
)
GOLDEN = {
    "float32:dense": 7_340_032, "bfloat16:scatter_gather": 3_670_016,
    "int8:scatter_gather": 1_863_680, "int4:scatter_gather": 2 * 473_088,
    "top_k=0.0009765625:gather": 57_344, "low_rank=4:all_reduce": 57_344,
}  # fmt: skip


def test_bytes_of_a_tpu_program_are_the_formulas():
    environment = os.environ | {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_ID": "0"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *GOLDEN], env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {text: [sent, sent] for text, sent in GOLDEN.items()}
