"""The form for TPUs, compiled ahead of time: no product computes more than its rows ask for."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

# The buffer's last rows and the router's own work come on top of the experts' products.
MOST_WORK = 1.3
# In a process of its own: libtpu reads the environment.
COMPILE = textwrap.dedent(
    """
    import json, sys
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from toolkit.experts import mixture, route, router_logits

    form, tokens, experts, chosen, width, hidden = json.loads(sys.argv[1])
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    place = SingleDeviceSharding(devices[0])
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    def loss(x, kernel, gate, up, down):
        routing = route(router_logits(x, kernel), chosen)
        y = mixture(x, routing, gate, up, down, implementation=form)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    arguments = (like(tokens, width), like(width, experts), like(experts, width, hidden),
        like(experts, width, hidden), like(experts, hidden, width))
    report = {}
    for name, function in (("value", loss), ("gradient", jax.grad(loss, argnums=(0, 2, 3, 4)))):
        compiled = jax.jit(function).lower(*arguments).compile()
        report[name] = compiled.cost_analysis()["flops"]
        report[name + " kernels"] = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    print(json.dumps(report))
    """
)


def compiled(*case):
    environment = os.environ | {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_ID": "0"}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPILE, json.dumps(case)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# No tile of 128 divides 360.
@pytest.mark.parametrize("width", [256, pytest.param(360, marks=pytest.mark.nightly)])
def test_the_default_is_the_grouped_product_forward_and_backward(width):
    tokens, experts, chosen, hidden = 512, 16, 4, 360
    found = compiled(None, tokens, experts, chosen, width, hidden)
    assert found["value kernels"] == 3
    assert found["gradient kernels"] >= 8  # nine products, of which the last value is not needed
    ideal = 6 * tokens * chosen * width * hidden
    assert found["value"] < MOST_WORK * ideal
    assert found["gradient"] < MOST_WORK * 3 * ideal


@pytest.mark.nightly
def test_ragged_dot_computes_gradients_of_weights_for_every_expert():
    """Why it is not the default on a TPU."""
    tokens, experts, chosen, width, hidden = 512, 16, 4, 256, 360
    ideal = 3 * 6 * tokens * chosen * width * hidden
    assert compiled("ragged", tokens, experts, chosen, width, hidden)["gradient"] > 3 * ideal
