"""Every pair of a compressor and a pattern gives the mean, in the bytes that its row states.

What a row states is held against the compiled program; controls show what a wrong one would do.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import DEVICES, LEVELS, Alone, gradients
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.gradients import COMPRESSORS, FEEDBACKS, PATTERNS, Exchange, contracted
from toolkit.parallel.gradients.compression.messages import Messages

SUMS = 1e-6  # float32 sums in another order
N = 4096
MATRIX = 59, 69


def pairs():
    for (name, make), pattern in itertools.product(COMPRESSORS.items(), PATTERNS):
        try:
            yield name, Exchange(make(), pattern, dense_below=0, near=4)
        except ValueError:
            continue


PAIRS = {f"{name}-{exchange.pattern}": exchange for name, exchange in pairs()}
# One of each compressor and of each pattern; the others every night.
FIRST = {
    "float32-dense", "bfloat16-scatter_gather", "int8-two_hop", "int4-far", "top_k-gather",
    "random_k-all_reduce", "scaled_sign-vote", "scaled_sign-scatter_gather", "low_rank-all_reduce",
}  # fmt: skip
BY_PAIR = [
    pytest.param(exchange, id=name, marks=() if name in FIRST else pytest.mark.nightly)
    for name, exchange in PAIRS.items()
]


def relative(found, wanted):
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def by_definition(exchange, x):
    """The mean of the decoded messages of one hop, without a collective."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(exchange.seed), 0), 0)
    key = jax.random.fold_in(key, 0)
    if exchange.of_gradients.is_linear:
        row = exchange.of_gradients
        row = row if row.of_columns is None else row.of_columns(MATRIX[1])
        mean = jnp.mean(x, axis=0)
        return row.decode(row.encode(mean, key), mean.size, key)
    sent = []
    for device in range(DEVICES):
        messages = Messages(exchange.of_gradients, None, key, device)
        is_whole = exchange.pattern in ("gather", "all_reduce")
        rows = x[device].reshape(1 if is_whole else DEVICES, -1)
        sent.append(messages.decode(messages.encode(rows), rows.shape[1]).reshape(-1))
    return jnp.mean(jnp.stack(sent), axis=0)


def test_every_row_stands_in_a_pair():
    assert {name.split("-")[0] for name in PAIRS} == {*COMPRESSORS}
    assert {exchange.pattern for exchange in PAIRS.values()} == {*PATTERNS}


@pytest.mark.parametrize("exchange", BY_PAIR)
def test_bytes_are_the_programs_and_replicas_agree_to_the_bit(exchange):
    size, even = 59 * 69, 59 * 69 // 8 * 8  # seven numbers are left over
    x, alone = gradients(size).reshape(DEVICES, *MATRIX), Alone(exchange, MATRIX)
    assert alone.bytes_sent(x) == alone.plan.bytes_sent
    mean, copies, _ = alone(x)
    np.testing.assert_array_equal(copies, jnp.broadcast_to(mean, copies.shape))
    x, mean = x.reshape(DEVICES, size), mean.reshape(size)
    row = exchange.of_gradients
    if exchange.pattern == "vote":
        signs = jnp.where(jnp.sum(jnp.where(x >= 0, 1, -1), axis=0) >= 0, 1.0, -1.0)
        np.testing.assert_array_equal(mean[:even], signs[:even])
    elif row.name == "float32":
        np.testing.assert_allclose(mean, jnp.mean(x, axis=0), atol=SUMS)
    elif exchange.pattern in ("gather", "all_reduce"):
        differs = jnp.abs(mean[:even] - by_definition(exchange, x[:, :even])) > SUMS
        # Compiled together, a quotient may round to the other side of a draw.
        assert jnp.mean(differs) < (1e-3 if row.variance else 1 / N)
    np.testing.assert_allclose(mean[even:], jnp.mean(x[:, even:], axis=0), atol=SUMS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("float32:dense", 28_672), ("top_k=0.01:gather", 2_296), ("scaled_sign:gather", 3_612),
        ("scaled_sign:scatter_gather", 952), ("int8=64:gather", 30_464),
        ("int8=64:scatter_gather", 7_616), ("int4=64:gather", 16_128),
        ("int4=64:scatter_gather", 4_032), ("ternary=64:scatter_gather", 2_240),
        ("random_k=0.01:all_reduce", 287), ("scaled_sign:vote", 896 + 7),
    ],
)  # fmt: skip
def test_golden_bytes(text, wanted):
    exchange = Exchange.parse(text)
    exchange = Exchange(exchange.compressor, exchange.pattern, dense_below=0)
    assert Alone(exchange, N).plan.bytes_sent == wanted


@pytest.mark.parametrize("axes", [LEVELS, {"data": DEVICES}], ids=["two axes", "groups"])
@pytest.mark.parametrize(
    ("compressor", "pattern", "error"),
    [
        (COMPRESSORS["int8"](64, "nearest"), "two_hop", 0.00851),
        (COMPRESSORS["int4"](64), "two_hop", 0.2173),
        (COMPRESSORS["int4"](64, "nearest"), "scatter_gather", 0.1074),
        (COMPRESSORS["float32"](), "two_hop", 0.0),
        (COMPRESSORS["float32"](), "far", 0.0),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_scattered_means_lie_with_their_owners(axes, compressor, pattern, error):
    x = gradients(16_384)
    if "data" in axes and error:
        return  # the same program with other groups
    near = 4 if "data" in axes else None
    alone = Alone(Exchange(compressor, pattern, dense_below=0, near=near), 16_384, axes, "zero1")
    assert relative(alone(x)[0], jnp.mean(x, axis=0)) == pytest.approx(error, rel=0.05, abs=SUMS)


def test_without_the_near_first_order_parts_land_elsewhere():
    mesh, x = make_mesh(LEVELS), jnp.broadcast_to(jnp.arange(8.0)[:, None], (8, 4))

    def owned(order):
        def body():
            hop = jax.lax.psum_scatter(order(x).reshape(4, -1), "gpu") / 4
            return jax.lax.psum_scatter(hop.reshape(2, -1), "node") / 2

        spec = P(("node", "gpu"))
        return jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)()

    right = owned(lambda x: x.reshape(2, 4, -1).swapaxes(0, 1))
    np.testing.assert_array_equal(right, jnp.arange(8.0).repeat(4))
    assert not np.array_equal(owned(lambda x: x), right)


def test_far_sends_few_bytes_between_nodes():
    exchange = Exchange(COMPRESSORS["int8"](64, "nearest"), "far", dense_below=0)
    alone, x = Alone(exchange, 16_384, LEVELS), gradients(16_384)
    given = jax.device_put(x, alone.sharding)
    state = alone.plan.init()
    compiled = alone.program.lower(given, state.residuals, state.step).compile()
    sent = {2: 0.0, 4: 0.0}
    for found in collectives(compiled):
        sent[found.group_size] += found.total_bytes_sent
    assert sent == {2: 4_352, 4: 98_304}
    assert relative(alone(x)[0], jnp.mean(x, axis=0)) == pytest.approx(0.0085, rel=0.03)


def test_a_type_that_cpus_widen_is_sent_as_integers():
    """The control: the same exchange without the bitcast counts twice."""
    mesh = make_mesh({"data": DEVICES})

    def sent(wire):
        body = lambda x: jax.lax.all_gather(wire(x.astype(jnp.bfloat16)), "data")  # noqa: E731
        step = jax.shard_map(
            body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        compiled = jax.jit(step).lower(gradients(N)).compile()
        return sum(found.total_bytes_sent for found in collectives(compiled))

    as_integers = sent(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16))
    assert as_integers == 7 * 2 * N
    assert sent(lambda x: x) == 2 * as_integers


def test_integers_are_added_after_decoding():
    x = jnp.full((DEVICES, N), 127.0)
    alone = Alone(Exchange(COMPRESSORS["int8"](64, "nearest"), dense_below=0), N)
    np.testing.assert_allclose(alone(x)[0], 127.0, rtol=SUMS)
    assert jnp.sum(jnp.full(DEVICES, 100, jnp.int8), dtype=jnp.int8) == 32  # what a psum would do


def test_replicas_draw_their_own_rounding():
    """Equal gradients on all: errors average out. With one key for all they do not."""
    x = jnp.broadcast_to(gradients(16_384)[0], (DEVICES, 16_384))
    row = COMPRESSORS["int4"](64)
    alone = Alone(Exchange(row, "gather", dense_below=0), 16_384)
    assert relative(alone(x)[0], x[0]) == pytest.approx(0.0539, rel=0.05)
    payload = row.encode(x[0], jax.random.key(5))
    assert relative(row.decode(payload, 16_384, None), x[0]) == pytest.approx(0.1525, rel=0.05)


@pytest.mark.parametrize("text", ["scaled_sign:vote", "int4:scatter_gather", "top_k:gather"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_on_one_replica_is_seen_by_all(text, bad):
    parsed = Exchange.parse(text)
    alone = Alone(Exchange(parsed.compressor, parsed.pattern, dense_below=0), N)
    assert not jnp.isfinite(alone(gradients(N).at[3, 1234].set(bad))[0]).all()
    assert not jnp.nan >= 0  # so that a bare vote would count it as a no


def test_one_replica_says_nothing_and_rounds_nothing():
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    from toolkit.parallel import data_parallel
    from toolkit.parallel.gradients import ExchangePlan

    plan = ExchangePlan(
        Exchange("int4", feedback="error_feedback", dense_below=0),
        data_parallel({"w": jnp.zeros(N)}, mesh),
    )
    assert plan.bytes_sent == 0
    assert plan.init().residuals == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exchange(pattern="ring"), "pattern must be one of 'all_reduce', 'dense'"),
        (lambda: Exchange(feedback="all"), "feedback must be one of 'none', 'error_fee"),
        (lambda: Exchange("ternary", feedback="error_feedback"), "is no contraction and would div"),
        (lambda: Exchange("qsgd=4", feedback="loco"), "qsgd=4, which is no contraction"),
        (lambda: Exchange("int4", feedback="ef21"), "encodes twice; wanted all_reduce or gather"),
        (
            lambda: Exchange(COMPRESSORS["random_k"](0.1, True), "all_reduce", "ef21"),
            r"random_k=0\.1, which is no contraction",
        ),
        (lambda: Exchange("int4", feedback="momentum"), "wanted it with 'top_k' only"),
        (lambda: Exchange("int8", "all_reduce"), "whose messages are not sums"),
        (lambda: Exchange("random_k", "gather"), "messages have no places; wanted 'all_reduce'"),
        (lambda: Exchange("int8", "vote"), "wanted 'scaled_sign'"),
        (lambda: Exchange(dense_below=-1), "dense_below: got -1"),
        (lambda: Exchange.parse("int4:two_hop=x"), "near: got 'x'"),
        (lambda: Exchange.parse("a:b:c:d:e"), "wanted compressor:pattern:feedback:weights"),
        (lambda: Alone(Exchange("int4", "two_hop", near=3), 2**15), "near: got 3, wanted a divi"),
        (lambda: Alone(Exchange("int4", "two_hop"), 2**15), "wanted near=, a divisor between"),
    ],
)
def test_what_no_exchange_takes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_divided_compressor_takes_feedback():
    assert Exchange(contracted(COMPRESSORS["ternary"]()), feedback="error_feedback").memory
    assert {row.name for row in FEEDBACKS.values()} == {*FEEDBACKS}


def test_texts_are_read_back():
    for text in ("int4=64:two_hop=4", "top_k=0.01:gather:ef21", "int4=256:two_hop:none:int8=256"):
        assert str(Exchange.parse(text)) == text
