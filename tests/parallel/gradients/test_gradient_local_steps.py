"""Local steps, zeroth order and codes: what is sent, and that nothing else changes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.gradients import (
    Exchange,
    LocalSteps,
    coded_load,
    cyclic_code,
    decoding_weights,
    local_steps,
    multiplexed_rounds,
    recovery_rounds,
    repetition_code,
    zeroth_order_step,
)
from toolkit.training import Checkpoints

SUMS = 1e-6  # float32 in another order
DEVICES = 8


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "up": jax.random.normal(keys[0], (16, 64)) / 4,
        "down": jax.random.normal(keys[1], (64, 16)) / 8,
    }


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def batches(steps, seed=1):
    return jax.random.normal(jax.random.key(seed), (steps, 32, 16))


def trained(how, rounds=1, axes=None, optimizer=None, seed=1):
    mesh = make_mesh(axes or {"island": DEVICES})
    init, one_round = local_steps(loss, optimizer or optax.sgd(0.1), mesh, how)
    state = init(params())
    for at in range(rounds):
        state, losses = one_round(state, batches(how.inner_steps, seed + at))
    return state, losses, one_round


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=SUMS), found, wanted)


def test_one_inner_step_is_data_parallel_training():
    state, _, _ = trained(LocalSteps(1, outer_rate=1.0, momentum=0.0), rounds=3)
    w = params()
    for at in range(3):
        w = jax.tree.map(lambda x, g: x - 0.1 * g, w, jax.grad(loss)(w, batches(1, 1 + at)[0]))
    close(state.params, w)
    # The control: with more inner steps islands move apart in between.
    other = trained(LocalSteps(3, outer_rate=1.0, momentum=0.0))[0]
    assert not np.allclose(other.params["up"], w["up"], atol=SUMS)


@pytest.mark.slow
def test_an_outer_step_is_nesterovs():
    how = LocalSteps(2, outer_rate=0.7, momentum=0.9)
    state, _, _ = trained(how)
    w, own = params(), []
    for island in range(DEVICES):
        mine = params()
        for x in batches(2).reshape(2, DEVICES, 4, 16)[:, island]:
            mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, jax.grad(loss)(mine, x))
        own.append(mine)
    delta = jax.tree.map(lambda x, *all_of: x - sum(all_of) / DEVICES, w, *own)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    updates, _ = outer.update(delta, outer.init(w), w)
    close(state.params, optax.apply_updates(w, updates))


@pytest.mark.parametrize("fragments", [1, 2])
def test_islands_talk_once_per_fragment_and_round(fragments):
    axes, how = {"island": 2, "data": 4}, LocalSteps(4, fragments=fragments)
    state, _, one_round = trained(how, axes=axes)
    found = collectives(one_round.lower(state, batches(4)).compile())
    # Islands of four devices each: what goes between islands goes in groups of two.
    outer = [each for each in found if each.group_size == 2]
    assert sum(each.total_bytes_sent for each in outer) == 2 * 1 / 2 * 4 * 2 * 16 * 64
    assert {each.count for each in outer} == {1}
    peak = max(each.bytes_sent for each in outer)
    assert peak <= 4 * 2 * 16 * 64 / fragments


@pytest.mark.slow
def test_outer_gradients_of_four_bits_are_as_good_and_smaller():
    how = LocalSteps(4, exchange=Exchange("int4", dense_below=0))
    dense = trained(LocalSteps(4), rounds=4, optimizer=optax.adam(1e-2))
    small = trained(how, rounds=4, optimizer=optax.adam(1e-2))
    assert float(small[1][-1].mean()) == pytest.approx(float(dense[1][-1].mean()), rel=0.05)
    sent = [
        sum(each.total_bytes_sent for each in collectives(run.lower(state, batches(4)).compile()))
        for state, _, run in (small, dense)
    ]
    assert sent[0] < sent[1] / 6


@pytest.mark.slow
def test_a_delayed_fragment_is_taken_later_and_blended():
    how = LocalSteps(4, fragments=2, delay=1, blend=0.5)
    state, losses, _ = trained(how, rounds=2)
    assert losses.shape == (4, DEVICES)
    assert jnp.isfinite(losses).all()
    apart = jnp.std(state.islands["up"], axis=0).max(), jnp.std(state.islands["down"], axis=0).max()
    assert min(apart) > 0  # blending keeps a share of each island's own


def test_what_no_local_steps_are_is_refused():
    with pytest.raises(ValueError, match="delay: got 2, wanted 0 to 1, below inner_steps / fr"):
        LocalSteps(4, fragments=2, delay=2)
    with pytest.raises(
        ValueError, match=r"inner_steps: got 5, wanted a multiple of 2 \(fragments\)"
    ):
        LocalSteps(5, fragments=2)
    with pytest.raises(ValueError, match="fragments: got 4, wanted at most 2, one per tensor"):
        trained(LocalSteps(4, fragments=4))


@pytest.mark.slow
def test_local_steps_resume_to_the_bit(tmp_path):
    how = LocalSteps(
        2, fragments=2, exchange=Exchange("int4", feedback="error_feedback", dense_below=0)
    )
    whole = trained(how, rounds=2, optimizer=optax.adam(1e-2))[0]
    half, _, one_round = trained(how, rounds=1, optimizer=optax.adam(1e-2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, half)
        restored, _ = checkpoints.restore_latest(half)
    resumed, _ = one_round(restored, batches(2, 2))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_zeroth_order_replicas_send_one_number_and_stay_equal():
    mesh = make_mesh({"data": DEVICES})
    step = zeroth_order_step(loss, mesh, rate=0.02, epsilon=1e-3)
    w, x = params(), batches(1)[0]
    with pytest.raises(ValueError, match="loss_fn: got a sum over the batch; wanted the mean"):
        zeroth_order_step(lambda w, x: len(x) * loss(w, x), mesh)(w, x, 0)
    compiled = step.lower(w, x, 0).compile()
    assert sum(each.total_bytes_sent for each in collectives(compiled)) == 7.0
    first, slope = step(w, x, 0)
    z = jax.tree.map(lambda new, old: (old - new) / (0.02 * slope), first, w)
    exact = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(w, x), z)))
    assert float(slope) == pytest.approx(float(exact), rel=0.02)
    for at in range(100):
        w, _ = step(w, x, at)
    assert loss(w, x) < loss(params(), x)
    for leaf in jax.tree.leaves(w):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shard, shards[0]) for shard in shards)


@pytest.mark.slow
def test_zeroth_order_trains_a_looped_model():
    from flax import nnx

    from toolkit.looped import LoopedConfig, LoopedLM

    config = LoopedConfig.tiny("full", loops=2, width=32, heads=2, vocabulary=64)
    graph, weights = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 8)

    def loss_of(weights, tokens):
        logits = nnx.merge(graph, weights)(tokens[:, :-1])
        logits = logits[0] if isinstance(logits, tuple) else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    step = zeroth_order_step(loss_of, make_mesh({"data": DEVICES}), rate=2e-4)
    first = loss_of(weights, tokens)
    for at in range(60):
        weights, _ = step(weights, tokens, at)
    assert loss_of(weights, tokens) < first
    for leaf in jax.tree.leaves(weights):  # bit-equal replicas
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shard, shards[0]) for shard in shards)


@pytest.mark.parametrize("make", [repetition_code, cyclic_code])
@pytest.mark.parametrize(("workers", "stragglers"), [(8, 1), (8, 3), (12, 2)])
def test_the_sum_is_recovered_whoever_is_missing(make, workers, stragglers):
    options = {} if make is repetition_code else {"condition": 1e4}
    code = make(workers, stragglers, **options)
    parts = np.random.default_rng(0).normal(size=(workers, 5)).astype(np.float32)
    patterns = itertools.combinations(range(workers), stragglers)
    for missing in itertools.islice(patterns, 60):
        answered = [worker for worker in range(workers) if worker not in missing]
        weights = decoding_weights(code, answered)
        assert not weights[[*missing]].any()
        np.testing.assert_allclose(weights @ (code @ parts), parts.sum(axis=0), atol=1e-4)
        if make is repetition_code:
            assert {*weights} <= {0.0, 1.0}  # nothing is rounded
    assert (np.count_nonzero(code, axis=1) == stragglers + 1).all()


def test_one_straggler_too_many_is_refused():
    with pytest.raises(ValueError, match="answered: got 6 of 8 workers, whose parts do not make"):
        decoding_weights(repetition_code(8, 1), range(2, 8))
    with pytest.raises(ValueError, match=r"wanted s \+ 1 to divide 8 workers"):
        repetition_code(8, 2)
    with pytest.raises(ValueError, match="stragglers: got 8, wanted 0 to 7"):
        cyclic_code(8, 8)
    with pytest.raises(ValueError, match="condition: got 1, and this code decodes with weights"):
        cyclic_code(8, 3, condition=1.0)


def test_golden_loads():
    assert coded_load(256, stragglers=15) == 0.0625
    assert coded_load(256, burst=2, window=3, tolerated=23) == pytest.approx(0.05078, rel=1e-3)
    both = {"window": 2, "is_multiplexed": True}
    assert coded_load(256, tolerated=27, **both) == pytest.approx(0.007543, rel=1e-3)
    assert coded_load(20, tolerated=4, **both) == pytest.approx(0.0833, rel=1e-2)
    assert coded_load(20, burst=1, window=2, tolerated=4) == pytest.approx(0.15)


def bursty(rng, rounds, workers, burst, window, most):
    """Late workers, at most so many in any window, each within a burst."""
    late = np.zeros((rounds, workers), bool)
    for _ in range(100):
        worker, start = rng.integers(workers), rng.integers(rounds)
        tried = late.copy()
        tried[start : start + rng.integers(1, burst + 1), worker] = True
        windows = [tried[at : at + window] for at in range(rounds)]
        spans = [np.ptp(np.flatnonzero(w[:, i])) for w in windows for i in np.flatnonzero(w.any(0))]
        if max(w.any(0).sum() for w in windows) <= most and max(spans, default=0) < burst:
            late = tried
    return late


@pytest.mark.parametrize(("burst", "window", "most"), [(2, 3, 4), (1, 2, 3), (3, 4, 4)])
def test_gradients_are_recovered_within_a_burst_by_the_smaller_load(burst, window, most):
    rng, workers, rounds = np.random.default_rng(0), 8, 15
    stragglers = -(-burst * most // (window - 1 + burst))
    last = np.arange(rounds - burst)
    missed = 0
    for _ in range(8):
        late = bursty(rng, rounds, workers, burst, window, most)
        found = recovery_rounds(late, stragglers, burst)[: rounds - burst]
        assert ((found >= last) & (found <= last + burst)).all()
        missed += ((~late).sum(1) < workers - stragglers).sum()
    assert missed  # a code within a round would have lost these
    assert coded_load(workers, burst=burst, window=window, tolerated=most) < (most + 1) / workers
    with pytest.raises(ValueError, match="burst: got 0"):
        recovery_rounds(late, stragglers, 0)


@pytest.mark.parametrize(("burst", "window", "most"), [(2, 3, 4), (1, 2, 3), (3, 4, 3), (2, 4, 1)])
def test_multiplexed_gradients_are_whole_to_the_bit_in_time(burst, window, most):
    rng, workers, rounds = np.random.default_rng(1), 8, 14
    parts, last = window - 1, window - 2 + burst
    is_exact = workers % (most + 1) == 0  # by repetition nothing is rounded
    make = repetition_code if is_exact else functools.partial(cyclic_code, condition=1e9)
    code = make(workers, most)
    own = rng.integers(-99, 99, (rounds, workers, parts))
    grouped = rng.integers(-99, 99, (rounds, burst, workers))
    for _ in range(6):
        late = bursty(rng, rounds, workers, burst, window, most)
        found, work = multiplexed_rounds(late, burst=burst, window=window, tolerated=most)
        for gradient in range(rounds - last):
            assert found[gradient] == gradient + last
            total, answered = 0, [[] for _ in range(burst)]
            delivered = set()
            for slot, worker in itertools.product(range(last + 1), range(workers)):
                piece = work[gradient + slot, worker, slot]
                if not late[gradient + slot, worker]:
                    delivered.add((worker, piece))
            for worker, piece in delivered:
                if piece < parts:
                    total += own[gradient, worker, piece]
                else:
                    answered[piece - parts].append(worker)
            assert min(map(len, answered)) >= workers - most
            for group, those in enumerate(answered):
                weights = decoding_weights(code, those)
                total += weights @ (code @ grouped[gradient, group])
            exact = own[gradient].sum() + grouped[gradient].sum()
            assert total == exact if is_exact else abs(total - exact) < 1e-4
    # One late worker too many in a window, and a gradient is not whole in time.
    late[:] = False
    late[window : window + 1, : most + 1] = True
    assert (
        multiplexed_rounds(late, burst=burst, window=window, tolerated=most)[0] < 0
    ).sum() > last
    load = coded_load(workers, burst=burst, window=window, tolerated=most, is_multiplexed=True)
    assert load <= coded_load(workers, burst=burst, window=window, tolerated=most)
    with pytest.raises(ValueError, match="burst: got 5, wanted 1 to 4, the rounds of the window"):
        multiplexed_rounds(late, burst=5, window=4, tolerated=1)
