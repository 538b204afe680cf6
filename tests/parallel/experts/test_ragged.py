"""The ragged dispatch, which only a TPU runs: compiled ahead of time, and its collectives read."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from toolkit.parallel.experts import dispatch_traffic

pytest.importorskip("libtpu")
pytestmark = pytest.mark.nightly

# In a process of its own: libtpu reads the environment.
COMPILE = textwrap.dedent(
    """
    import json
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    import numpy as np
    from toolkit.measure import collectives
    from toolkit.parallel.experts import expert_specs, sharded_mixture, sharded_route

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices), ("e",), axis_types=(AxisType.Auto,))
    specs = expert_specs(("e",))
    like = lambda spec, *shape: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(x, kernel, gate, up, down):
        routing = sharded_route(x, kernel, 4, mesh, tokens=P("e"))
        how = {"axes": "e", "tokens": P("e"), "dispatch": "ragged"}
        y = sharded_mixture(x, routing, gate, up, down, mesh, **how).outputs
        return jnp.sum(y.astype(jnp.float32) ** 2)

    arguments = (like(P("e"), 512, 256), like(P(), 256, 16), like(specs["gate"], 16, 256, 384),
        like(specs["up"], 16, 256, 384), like(specs["down"], 16, 384, 256))
    report = {}
    for name, function in (("value", loss), ("gradient", jax.grad(loss, argnums=(0, 2, 3, 4)))):
        compiled = jax.jit(function).lower(*arguments).compile()
        report[name] = [(c.kind, c.bytes_sent, c.count) for c in collectives(compiled)]
        report[name + " kernels"] = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    print(json.dumps(report))
    """
)


def test_rows_go_there_and_back_by_the_ragged_collective():
    environment = os.environ | {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_ID": "0"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ragged = [sent for kind, sent, _ in found["value"] if kind == "ragged-all-to-all"]
    (_, one) = dispatch_traffic(64, 256, 16, 4, 8, dispatch="ragged")
    assert ragged[0] == one.bytes_sent
    assert len(ragged) == 2
    assert sum(kind == "ragged-all-to-all" for kind, *_ in found["gradient"]) == 4
    assert (
        found["value kernels"] == 3
    )  # grouped products: nothing is computed for experts elsewhere
