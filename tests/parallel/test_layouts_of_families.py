"""Biases, LayerNorms, heads and parallel blocks of published families, cut over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_models import FAMILIES, model_of
from flax import nnx
from jax.sharding import PartitionSpec as P

from toolkit.parallel import layout, make_mesh, partitioned_train_step

TOLERANCE = 1e-5
CUT = {"query/bias", "key/bias", "value/bias", "mixer/sinks", "gate/bias", "up/bias", "head_bias"}


def loss_of(graph, params, batch):
    logits = nnx.merge(graph, params)(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("mesh", "scheme"), [({"data": 2, "model": 4}, "tensor"), ({"data": 8}, "zero3")]
)
def test_published_families_equal_one_device(name, mesh, scheme):
    graph, params = nnx.split(model_of(name))
    tokens = jax.random.randint(jax.random.key(3), (8, 17), 0, 64, jnp.int32)
    batch = tokens[:, :-1], tokens[:, 1:]
    loss_fn, descent = partial(loss_of, graph), optax.sgd(1.0)
    wanted, gradients = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(gradients))
    found = layout(params, make_mesh(mesh), scheme, min_elements=16)
    cut = {row.path for row in found.placements if row.spec == P("model")}
    for ending in CUT if scheme == "tensor" else ():
        paths = [row.path for row in found.placements if row.path.endswith(ending)]
        assert all(path in cut for path in paths), (ending, paths)
    assert bool(cut) == (scheme == "tensor")
    state = found.apply((params, descent.init(params)))
    step = partitioned_train_step(loss_fn, descent, found)
    after, _, loss = step(*state, found.apply_batch(batch))
    np.testing.assert_allclose(loss, wanted, atol=TOLERANCE, rtol=0)
    for old, new, gradient in zip(*map(jax.tree.leaves, (params, after, gradients)), strict=True):
        np.testing.assert_allclose(old - new, gradient, atol=TOLERANCE, rtol=0)
