"""One line, and the same calls divide their sequences, or their heads, among the cores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import draw_inputs, mixer, softmax_attention
from toolkit.parallel import make_mesh, use_cores

TIME = 40
OPTIONS = {
    "nsa": {"block_size": 4, "selected_blocks": 4, "sliding_window": 5},
    "moba": {"block_size": 4, "selected_blocks": 2},
    "dsa": {"selected_tokens": 6},
}


@pytest.fixture
def two_cores():
    assert use_cores(2) == 2
    yield
    assert use_cores(1) == 1


def value_and_gradients(row, inputs, segment_ids, state):
    def loss(*inputs):
        out, final = row.function(
            *inputs, segment_ids=segment_ids, initial_state=state, **row.options
        )
        return jnp.sum(jnp.sin(out)), (out, final)

    gradients, values = jax.grad(loss, argnums=range(len(inputs)), has_aux=True)(*inputs)
    return values, gradients


@pytest.mark.by_family
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "name",
    ["gdn", pytest.param("kda", marks=pytest.mark.nightly), "full", "nsa", "moba", "dsa"],
)
def test_values_and_gradients_stay_and_lie_on_both_cores(name, batch, two_cores):
    row = mixer(name, **OPTIONS.get(name, {}))
    inputs = draw_inputs(row, TIME, batch=batch, heads=4)
    state = jnp.ones((batch, 4, 16, 8)) if name in ("gdn", "kda") else None
    segment_ids = jnp.repeat(jnp.arange(2), TIME // 2)[None].repeat(batch, 0)
    eager = partial(value_and_gradients, row)
    for run in (eager, jax.jit(eager)):
        got = run(inputs, segment_ids, state)
        (out, _), (d_q, *_) = got
        assert len(out.sharding.device_set) == len(d_q.sharding.device_set) == 2
        share = (1, *out.shape[1:]) if batch == 2 else (1, TIME, 2, out.shape[3])
        assert out.addressable_shards[0].data.shape == share
        use_cores(1)
        wanted = eager(inputs, segment_ids, state)
        use_cores(2)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_what_the_cores_do_not_divide_stays_on_one(two_cores):
    row = mixer("gdn")
    out, _ = row.function(*draw_inputs(row, TIME, batch=1, heads=3))
    assert len(out.sharding.device_set) == 1


def test_sinks_and_queries_that_do_not_count_leave_attention_on_both_cores(two_cores):
    q, k, v = draw_inputs(mixer("full"), TIME, batch=2, heads=4)
    options = {"sinks": jnp.arange(4.0), "query_seq_lengths": jnp.asarray([TIME, 9])}
    out, _ = softmax_attention(q, k, v, **options)
    assert len(out.sharding.device_set) == 2
    use_cores(1)
    np.testing.assert_allclose(out, softmax_attention(q, k, v, **options)[0], rtol=1e-6, atol=1e-6)


def test_programs_with_a_mesh_of_their_own_stay_as_they_are(two_cores):
    row = mixer("gdn")
    inputs = draw_inputs(row, TIME, batch=4, heads=4)
    mesh = make_mesh({"data": 4}, devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("data")
    out = jax.jit(
        jax.shard_map(lambda *x: row.function(*x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    )(*inputs)
    assert len(out.sharding.device_set) == 4


def test_nothing_is_spread_without_the_line():
    row = mixer("gdn")
    out, _ = row.function(*draw_inputs(row, TIME, batch=2, heads=4))
    assert len(out.sharding.device_set) == 1


def test_too_late_or_no_number_is_said_in_one_line():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"use_cores\(9\) came too late.* 8 cpu device"):
        use_cores(9)
    with pytest.raises(ValueError, match="want an integer of at least 1"):
        use_cores(0)
