"""What is not sent is remembered, conserved, and fits another number of replicas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import DEVICES, LEVELS, Alone, gradients

from toolkit.parallel import data_parallel, layout, make_mesh
from toolkit.parallel.gradients import COMPRESSORS, FEEDBACKS, Exchange, ExchangePlan, ExchangeState
from toolkit.parallel.gradients.resized import _vectors, resized

CONSERVED = 1e-5  # float32 sums over five steps
N, STEPS = 4096, 5


def pending(plan, residuals):
    """The sum over hops of the mean of what has not been sent, as a vector."""
    group, total = plan.groups[0], 0
    for (stored, *_), rows in zip(residuals[0], plan.hops(group), strict=True):
        vectors = _vectors(np.asarray(stored)[:, 0], group, group.along, rows)
        total = total + vectors.mean(axis=0)
    return total


@pytest.mark.parametrize(
    ("compressor", "pattern", "axes", "scheme"),
    [
        ("top_k=0.05", "gather", None, "data"),
        ("scaled_sign", "scatter_gather", None, "data"),
        ("int4=64", "two_hop", LEVELS, "data"),
        ("int4=64", "far", LEVELS, "zero1"),
        ("random_k=0.1", "all_reduce", None, "data"),
        ("low_rank=4", "all_reduce", None, "data"),
    ],
)
def test_what_was_sent_and_what_is_pending_are_all_there_is(compressor, pattern, axes, scheme):
    exchange = Exchange(compressor, pattern, "error_feedback", dense_below=0)
    alone, state, sent, given = Alone(exchange, (64, 64), axes, scheme), None, 0, 0
    for seed in range(STEPS):
        x = gradients(N, seed)
        mean, _, state = alone(x.reshape(DEVICES, 64, 64), state)
        sent = sent + np.asarray(mean).reshape(N)
        given = given + np.asarray(jnp.mean(x, axis=0))
    left = pending(alone.plan, state.residuals)
    np.testing.assert_allclose(sent + left, given, atol=CONSERVED)
    assert np.abs(left).max() > 1000 * CONSERVED  # so that the sum alone would fail
    spec = state.residuals[0][0][0].sharding.spec
    assert spec[0] == ("data" if axes is None else ("node", "gpu"))


def test_feedback_on_a_lossless_compressor_is_dense_to_the_bit():
    dense = Alone(Exchange("float32", "scatter_gather", dense_below=0), N)
    fed = Alone(Exchange("float32", "scatter_gather", "error_feedback", dense_below=0), N)
    state = None
    for seed in range(3):
        mean, _, state = fed(gradients(N, seed), state)
        np.testing.assert_array_equal(mean, dense(gradients(N, seed))[0])


def test_differences_approach_a_gradient_that_stays():
    x, state, errors = gradients(N), None, []
    alone = Alone(Exchange("top_k=0.1", "gather", "ef21", dense_below=0), N)
    for _ in range(12):
        mean, _, state = alone(x, state)
        errors.append(float(jnp.abs(mean - jnp.mean(x, axis=0)).max()))
    assert errors[-1] < 1e-6 < errors[0]


def test_powersgd_finds_a_matrix_of_its_rank_and_keeps_its_columns():
    exchange = Exchange("low_rank=4", "all_reduce", "error_feedback", dense_below=0)
    alone, (left, right) = Alone(exchange, (64, 64)), gradients(2 * 4 * 64)[:2]
    x = jnp.broadcast_to(left.reshape(64, 8)[:, :4] @ right.reshape(8, 64)[:4], (DEVICES, 64, 64))
    mean, copies, state = alone(x)
    assert alone.plan.bytes_sent == 3_584 == alone.bytes_sent(x)
    np.testing.assert_allclose(mean, x[0], atol=1e-4)
    np.testing.assert_array_equal(copies, jnp.broadcast_to(mean, copies.shape))
    # Of a higher rank one pass finds a part; what is kept finds more than what is drawn anew.
    x = jnp.broadcast_to((gradients(N, 3)[0] * jnp.repeat(0.7 ** jnp.arange(64), 64)), (8, N))
    x = x.reshape(DEVICES, 64, 64)
    kept, fresh = alone.plan.init(), alone.plan.init()
    for _ in range(4):
        warm, _, kept = alone(x, dataclasses.replace(kept, residuals=_forgotten(kept)))
        cold, _, fresh = alone(x, dataclasses.replace(alone.plan.init(), step=fresh.step))
    assert jnp.linalg.norm(warm - x[0]) < 0.95 * jnp.linalg.norm(cold - x[0])
    # A gradient of zeros is no end of it.
    state = alone(jnp.zeros_like(x), alone.plan.init())[2]
    assert jnp.linalg.norm(alone(x, state)[0]) > 0


def _forgotten(state):
    (((residual, columns),),) = state.residuals
    return (((jnp.zeros_like(residual), columns),),)


def test_loco_keeps_a_byte_and_a_quarter_per_number_at_most():
    alone = Alone(Exchange("int4", feedback="loco", dense_below=0), N)
    state = alone(gradients(N))[2]
    first = state.residuals[0][0]
    assert sum(x.size * x.dtype.itemsize for x in first) <= 1.25 * DEVICES * N
    later = alone(gradients(N, 1), state)[0]
    # It forgets: where its period ends, what was remembered makes no difference.
    period = FEEDBACKS["loco"].forgets_after
    at = dataclasses.replace(state, step=jnp.int32(period))
    empty = dataclasses.replace(alone.plan.init(), step=jnp.int32(period))
    forgotten = [alone(gradients(N, 1), each)[0] for each in (at, empty)]
    np.testing.assert_array_equal(*forgotten)
    assert np.abs(later - forgotten[0]).max() > 0


def test_dgc_forgets_momentum_where_it_sent():
    alone = Alone(Exchange("top_k=0.1", "gather", "momentum", dense_below=0), N)
    _, _, state = alone(gradients(N))
    velocity, unsent = state.residuals[0][0]
    assert jnp.sum(velocity[0] == 0) == jnp.sum(unsent[0] == 0) == 410


def quadratic_loss(exchange, rate, steps=150):
    """Of curvatures 1..0.01 and other optima on each replica, after SGD by an exchange."""
    curvature = jnp.logspace(0, -2, 256)
    optima = 3 * jax.random.normal(jax.random.key(0), (DEVICES, 256))
    alone = Alone(exchange, 256)
    with_state = alone.plan.init(), jnp.zeros(256)

    def body(carry, _):
        (state, w) = carry
        given = curvature * (w - optima)
        mean, residuals, _ = alone.program(given, state.residuals, state.step)
        return (ExchangeState(state.step + 1, residuals), w - rate * mean), None

    (_, w), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, None, steps))(with_state)
    return 0.5 * float(jnp.sum(curvature * (w - jnp.mean(optima, axis=0)) ** 2))


@pytest.mark.slow
def test_sparse_gradients_need_a_memory_and_a_smaller_rate():
    def best(feedback):
        exchange = Exchange("top_k=0.01", "gather", feedback, dense_below=0)
        return min(quadratic_loss(exchange, rate, 400) for rate in (0.2, 0.05, 0.02))

    assert best("error_feedback") < best("none") / 10
    fed = Exchange("top_k=0.01", "gather", "error_feedback", dense_below=0)
    assert quadratic_loss(fed, 0.9, 400) > quadratic_loss(fed, 0.05, 400) * 10  # feedback delays
    eight = Exchange(COMPRESSORS["int8"](64), "gather", "error_feedback", dense_below=0)
    assert quadratic_loss(eight, 0.9, 400) < best("error_feedback") / 100


def test_feedback_on_what_is_no_contraction_diverges():
    """Why it is refused: the same row, said to be a contraction."""
    wrong = dataclasses.replace(COMPRESSORS["qsgd"](4), contraction=lambda n: 0.5)
    diverged = quadratic_loss(Exchange(wrong, "gather", "error_feedback", dense_below=0), 0.05)
    plain = quadratic_loss(Exchange(COMPRESSORS["qsgd"](4), "gather", dense_below=0), 0.05)
    assert not diverged < 1e6
    assert plain < 31.9


@pytest.mark.parametrize("scheme", [pytest.param("data", marks=pytest.mark.slow), "zero1"])
@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        ("int4=64:scatter_gather", "error_feedback"),
        pytest.param("int4=64:two_hop=2", "loco", marks=pytest.mark.slow),
        ("int4=64:two_hop=2", "error_feedback"),
        ("low_rank=4:all_reduce", "error_feedback"),
    ],
)
def test_merged_replicas_average_and_doubled_ones_copy(scheme, text, feedback):
    parsed = Exchange.parse(text)
    exchange = Exchange(
        parsed.compressor, parsed.pattern, feedback, near=parsed.near, dense_below=0
    )
    whole = Alone(exchange, (64, 64), scheme=scheme)
    state = whole(gradients(64 * 64).reshape(DEVICES, 64, 64))[2]
    mesh = make_mesh({"data": 4}, devices=jax.devices()[:4])
    fewer = ExchangePlan(exchange, layout({"w": jnp.zeros((64, 64))}, mesh, scheme, min_elements=0))
    half = resized(fewer, jax.tree.map(np.asarray, state.residuals))
    assert half[0][0][0].sharding.spec == fewer.layout.replica_spec
    if feedback == "loco":
        return  # rounded to eight bits again
    before, after = pending(whole.plan, state.residuals), pending(fewer, half)
    np.testing.assert_allclose(after, before, atol=1e-6)
    # A sum, which is right for a summed update only, would be another correction.
    assert np.abs(2 * after - before).max() > 0.01
    again = resized(fewer, jax.tree.map(np.asarray, resized(whole.plan, half)))
    np.testing.assert_allclose(again[0][0][0], half[0][0][0], atol=1e-6)


def test_a_layout_never_replicates_a_residual():
    params = {"w": jnp.zeros((256, 256))}
    found = data_parallel(params, make_mesh({"data": DEVICES}))
    plan = ExchangePlan(Exchange(feedback="error_feedback"), found)
    placed = found.apply({"params": params, "exchange_state": plan.init()})
    residual = placed["exchange_state"].residuals[0][0][0]
    assert residual.addressable_shards[0].data.size == residual.size // DEVICES
    # What `shard_map` with out_specs P() would claim: the same everywhere, with shards that differ.
    claimed = jax.shard_map(
        lambda: jax.lax.axis_index("data")[None], mesh=found.mesh, in_specs=(),
        out_specs=jax.P(), check_vma=False,
    )()  # fmt: skip
    assert claimed.is_fully_replicated
    assert {int(shard.data[0]) for shard in claimed.addressable_shards} == {*range(DEVICES)}


def test_a_gradient_of_replicated_weights_is_a_sum_under_check_vma():
    """Why the steps differentiate with `check_vma=False`: there is nothing left to exchange."""
    mesh, x = make_mesh({"data": DEVICES}), jnp.arange(8.0)

    def slope(check_vma):
        step = jax.shard_map(
            lambda w, x: jax.grad(lambda w: jnp.sum(w * x))(w)[None], mesh=mesh,
            in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"), check_vma=check_vma,
        )  # fmt: skip
        return step(jnp.float32(1), x)

    np.testing.assert_array_equal(slope(False), x)
    np.testing.assert_array_equal(slope(True), jnp.full(8, 28.0))
