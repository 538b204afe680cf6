"""Arrays on a mesh with explicit axes, as `jax.make_mesh` makes it: each device takes its share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.attention import (
    MIXERS,
    KVCache,
    draw_inputs,
    latent,
    mixer,
    softmax_attention,
    softmax_attention_step,
)

TIME, TOLERANCE = 21, 1e-5
BATCH, BOTH = P("data"), P("data", None, "model")
NIGHT = pytest.mark.nightly
QUICK = {"full": BOTH, "gdn": BATCH}
CASES = [
    pytest.param(name, spec, marks=[] if QUICK.get(name) == spec else NIGHT)
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


QUICK_STEPS = [("full", BATCH), ("dsa", BOTH)]
STEPS = [
    pytest.param(name, spec, marks=[] if (name, spec) in QUICK_STEPS else NIGHT)
    for name in MIXERS
    for spec in (BATCH, BOTH, P(None, None, "model"))
]


@pytest.mark.parametrize(("name", "spec"), STEPS)
def test_a_state_is_read_into_and_decoded_where_it_lies(name, spec, mesh):
    row = mixer(name)
    options = smaller(row)
    inputs = draw_inputs(row, 6, batch=2, heads=2, key=8, value=4)
    state = row.empty_state(2, 2, 8, 4, 8, jnp.float32, **options)

    @jax.jit
    def run(inputs, state):
        first, state = row.function(*(x[:, :5] for x in inputs), initial_state=state, **options)
        last, state = row.step(*(x[:, 5] for x in inputs), state, **options)
        return last, first, state

    def cut(path, x, axes):
        is_of_index = "index" in str(path)
        return placed(mesh, P(axes[0]) if is_of_index else axes, x)[0]

    of_state = P(spec[0], *spec[2:])  # which has no axis of time before its heads
    inputs_cut = [cut(one, x, spec) for one, x in zip(row.names, inputs, strict=True)]
    state_cut = jax.tree_util.tree_map_with_path(lambda path, x: cut(path, x, of_state), state)
    found, wanted = run(inputs_cut, state_cut), run(inputs, state)
    with jax.set_mesh(mesh):
        inside = run(inputs_cut, state_cut)
    assert jax.typeof(found[0]).sharding.spec[: len(of_state)] == tuple(of_state)
    for got in (found, inside):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_step_with_all_that_heads_have_of_their_own_equals_one_device(mesh):
    q, k, v = (x[:, 0] for x in draw_inputs(mixer("full"), 1, batch=2, heads=2, key=8, value=4))
    own = {"alibi_slopes": jnp.asarray([0.5, 0.1]), "sinks": jnp.asarray([1.0, -2.0])}
    cache = KVCache.empty(2, 2, 8, 4, 8, is_quantised=True)
    step = partial(softmax_attention_step, return_residual=True)
    wanted = step(q, k, v, cache, **own)
    got = step(*placed(mesh, P("data", "model"), q, k, v), cache, **own)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
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


@pytest.mark.parametrize("spec", [BATCH, pytest.param(BOTH, marks=NIGHT)])
@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=NIGHT)])
def test_what_softmax_takes_besides_is_cut_as_the_arrays_are(spec, cached, mesh):
    """Longer than dense attention goes."""
    time = 150
    inputs = draw_inputs(mixer("full"), time, batch=2, heads=2, key=8, value=4)
    own = {"alibi_slopes": jnp.asarray([0.5, 0.1]), "sinks": jnp.asarray([1.0, -2.0])}
    if cached:
        own["initial_state"] = KVCache.empty(2, 2, 8, 4, time)
    else:
        own["bias"] = jnp.linspace(-1, 1, 2 * time).reshape(1, 2, 1, time)
        own["mask"] = (jnp.arange(time) % 7 > 0)[None, None, :, None]
        own |= {"query_offset": jnp.asarray([0, 3]), "query_seq_lengths": jnp.asarray([150, 9])}
        own["key_value_seq_lengths"] = jnp.asarray([100, 150])

    @jax.jit
    def run(inputs):
        def loss(inputs):
            out, _ = softmax_attention(*inputs, **own)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(inputs)

    found = run(placed(mesh, spec, *inputs))
    assert jax.typeof(found[1]).sharding.spec[: len(spec)] == tuple(spec)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(run(inputs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_dropout_in_tiles_and_its_gradient_are_refused_in_one_line(mesh):
    """Which weights are dropped hangs on their places in the whole."""
    inputs = draw_inputs(mixer("full"), TIME, batch=2, heads=2, key=8, value=4)

    def loss(q, k, v, **options):
        dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
        return softmax_attention(q, k, v, **dropout, **options)[0].sum()

    q, k, v = placed(mesh, BATCH, *inputs)
    np.testing.assert_allclose(jax.jit(loss)(q, k, v), loss(*inputs), rtol=TOLERANCE)
    with pytest.raises(NotImplementedError, match=r"this gradient is not available .*Auto"):
        jax.jit(jax.grad(loss))(q, k, v)
    with pytest.raises(NotImplementedError, match=r"dropout in tiles is not available .*Auto"):
        loss(q, k, v, implementation="blockwise")


def test_a_step_of_latent_attention_is_refused_in_one_line(mesh):
    sizes = {"key_size": 4, "rope_size": 2, "value_size": 4}
    config = latent.LatentConfig(width=8, heads=2, latent_size=4, **sizes)
    weights = latent.LatentWeights.random(config, jax.random.key(0))
    (x,) = placed(mesh, BATCH, jnp.ones((2, 8)))
    with pytest.raises(NotImplementedError, match=r"a step of latent attention is not .*Auto"):
        latent.mla_step(x, weights, latent.LatentCache.empty(2, 4, 2, 3), config)
