"""Arrays on a mesh with explicit axes, as `jax.make_mesh` makes it: each device takes its share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.attention import MIXERS, draw_inputs, mixer, softmax_attention

TIME, TOLERANCE = 21, 1e-5
BATCH, BOTH = P("data"), P("data", None, "model")
QUICK = {"full": BOTH, "gdn": BATCH}
CASES = [
    pytest.param(name, spec, marks=[] if QUICK.get(name) == spec else pytest.mark.nightly)
    for name in MIXERS
    for spec in (BATCH, BOTH, P(None, None, "model"))
]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])


def placed(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for x in arrays]


def smaller(row):
    return {name: min(value, 4) for name, value in row.options.items()}


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_values_and_gradients_stay_and_lie_where_the_arrays_do(name, spec, mesh):
    row = mixer(name)
    inputs = draw_inputs(row, TIME, batch=2, heads=2, key=8, value=4)
    segment_ids = jnp.asarray(np.repeat([0, 1], [9, 12])[None].repeat(2, 0))

    @jax.jit
    def run(inputs):
        def loss(inputs):
            out, _ = row.function(*inputs, segment_ids=segment_ids, **smaller(row))
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(inputs)

    # An indexer's heads are whole wherever it selects.
    specs = [spec[:1] if name.startswith("index") else spec for name in row.names]
    cut = [placed(mesh, own, x)[0] for own, x in zip(specs, inputs, strict=True)]
    wanted = run(inputs)
    with jax.set_mesh(mesh):
        inside = run(cut)
    for found in (run(cut), inside):
        d_q, out = found[0][0], found[1]
        assert jax.typeof(out).sharding.spec[: len(spec)] == tuple(spec)
        assert d_q.sharding.spec[: len(spec)] == tuple(spec)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_is_cut_otherwise_is_refused_in_one_line(mesh):
    q, k, v = draw_inputs(mixer("full"), TIME, batch=2, heads=2, key=8, value=4)
    time = placed(mesh, P(None, "data"), *(x[:, :20] for x in (q, k, v)))
    with pytest.raises(NotImplementedError, match=r"cut along its axis 1, .*reshard it\."):
        softmax_attention(*time)
    other = *placed(mesh, BATCH, q, k), *placed(mesh, P("model"), v)
    with pytest.raises(ValueError, match=r"the batch along \[\('data',\), \('model',\)\]"):
        softmax_attention(*other)
    one_head = *placed(mesh, BOTH, q), *placed(mesh, BATCH, k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match=r"1 heads of .* are not divided by 2"):
        softmax_attention(*one_head)


def test_a_gradient_that_loops_cannot_carry_is_refused_in_one_line(mesh):
    inputs = draw_inputs(mixer("full"), TIME, batch=2, heads=2, key=8, value=4)
    bias = jnp.zeros((1, 2, TIME, TIME))

    def loss(q, k, v):
        return softmax_attention(q, k, v, bias=bias)[0].sum()

    q, k, v = placed(mesh, BATCH, *inputs)
    np.testing.assert_allclose(jax.jit(loss)(q, k, v), loss(*inputs), rtol=TOLERANCE)
    with pytest.raises(NotImplementedError, match=r"this gradient is not available .*Auto"):
        jax.jit(jax.grad(loss))(q, k, v)
