"""Sources in stated proportions, and data that training chooses, also after a resume."""

import json
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.training import (
    AdaptiveBatches,
    CorpusError,
    FitOptions,
    HostBatches,
    TokenWindows,
    TrainState,
    adamw,
    doremi_weights,
    fit,
    loss_weights,
    make_train_step,
    mix_sources,
    odm_weights,
    record_batches,
    reweighted_loss,
    select_by_loss,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
DEVIATIONS = 5  # of a share of draws, which are the same every time
SHORT, LONG = [f"short {i}" for i in range(7)], [f"long {i}" for i in range(400)]


def test_every_block_has_its_shares_and_every_source_its_epochs():
    """A short source repeats, and none of its records before all others."""
    mixed = mix_sources([SHORT, LONG], [3.0, 1.0], seed=5, block=40)
    blocks = [[mixed[40 * b + i] for i in range(40)] for b in range(30)]
    assert all(sum(r in SHORT for r in block) == 30 for block in blocks)
    seen = Counter()
    for block in blocks:
        seen.update(block)
        assert max(seen[r] for r in SHORT) - min(seen[r] for r in SHORT) <= 1
    assert max(seen[r] for r in LONG) == 1
    assert sum(seen[r] for r in LONG) == 300
    assert blocks[0] != blocks[1] != sorted(blocks[1])
    numbers = [mixed.source_of(i) for i in range(40)]
    assert [r in LONG for r in blocks[0]] == [number == 1 for number in numbers]
    again = mix_sources([SHORT, LONG], [3.0, 1.0], seed=5, block=40)
    assert [again[i] for i in range(700, 740)] == [mixed[i] for i in range(700, 740)]
    other = mix_sources([SHORT, LONG], [3.0, 1.0], seed=6, block=40)
    assert [other[i] for i in range(40)] != blocks[0]


def test_proportions_change_from_block_to_block_and_small_ones_are_met_in_the_long_run():
    rounds, share = 400, 0.02  # a fifth of a record of a block
    weights = np.array([[1.0, 0.0]] + [[1 - share, share]] * (rounds - 1))
    mixed = mix_sources([SHORT, LONG], weights, block=10)
    found = [mixed.source_of(i) for i in range(10 * rounds)]
    assert sum(found[:10]) == 0
    expected = share * 10 * (rounds - 1)
    assert abs(sum(found) - expected) < DEVIATIONS * math.sqrt(expected)
    records = [mixed[i] for i in range(10 * rounds)]
    assert len({r for r in records if r in LONG}) == sum(found)  # none of them twice
    counts = Counter(r for r in records if r in SHORT)
    assert max(counts.values()) - min(counts.values()) <= 1
    with pytest.raises(ValueError, match=r"weights: 0.02 is less than half a record"):
        mix_sources([SHORT, LONG], [1 - share, share], block=10)


def test_windows_of_a_token_array_come_once_an_epoch_beside_other_sources():
    windows = TokenWindows(np.arange(101, dtype=np.uint16), time=10)
    mixed = mix_sources([windows, [(np.zeros(10, int),) * 2]], [1.0, 1.0], block=20)
    starts = sorted(int(mixed[i][0][0]) for i in range(20) if mixed.source_of(i) == 0)
    assert starts == list(range(0, 100, 10))
    with pytest.raises(CorpusError, match="time: got 101"):
        TokenWindows(np.arange(101), time=101)
    with pytest.raises(CorpusError, match="token 100 near 90"):
        TokenWindows(np.arange(101), time=10, vocabulary=100)[9]
    with pytest.raises(IndexError, match="index: got 10"):
        windows[10]


def test_grain_datasets_are_mixed_and_a_mixture_is_a_grain_source():
    grain = pytest.importorskip("grain")
    even = grain.MapDataset.range(0, 20, 2).map(np.int32)
    odd = grain.MapDataset.range(1, 4, 2).map(np.int32)
    mixed = mix_sources([even, odd], [3.0, 1.0], block=8)
    doubled = grain.MapDataset.source(mixed).map(lambda record: 2 * record)
    data = record_batches(doubled, seed=0, batch=8, is_shuffled=False)
    for step in range(3):
        seen = HostBatches.sample(data.block(step, 1), step) // 2
        assert sorted((seen % 2).tolist()) == [0] * 6 + [1] * 2
        assert seen.tolist() == [int(mixed[8 * step + row]) for row in range(8)]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [([1.0], "one weight per source"), ([1.0, -1.0], "0 or more"), ([0.0, 0.0], "one above 0")],
)
def test_weights_that_are_none_are_refused(weights, wanted):
    with pytest.raises(ValueError, match=wanted):
        mix_sources([SHORT, LONG], weights)


def test_an_empty_source_is_refused():
    with pytest.raises(CorpusError, match="number 1 is empty"):
        mix_sources([SHORT, []], [1.0, 1.0])
    with pytest.raises(ValueError, match="sources: got generator"):
        mix_sources([SHORT, iter(x for x in LONG)], [1.0, 1.0])


def test_doremi_moves_weight_to_sources_that_lag_behind():
    weights = np.full(3, 1 / 3)
    for _ in range(3):
        weights = doremi_weights(weights, np.array([0.5, 0.1, -0.2]))
    np.testing.assert_allclose(weights, [0.655414, 0.197860, 0.146726], atol=5e-7)
    even, uneven = np.array([3.0, 3.0]), np.array([0.2, 0.8])
    np.testing.assert_allclose(doremi_weights(uneven, even, smoothing=0.0), uneven, **EXACT)
    far = doremi_weights(np.full(2, 0.5), np.array([2000.0, 0.0]), smoothing=0.01)
    np.testing.assert_allclose(far, [0.995, 0.005], **EXACT)
    assert doremi_weights(np.ones(1), np.array([4.0])).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"excess: got \[nan, 0.0\], wanted finite"):
        doremi_weights(uneven, np.array([math.nan, 0.0]))


def test_odm_explores_evenly_at_first_and_then_seeks_high_losses():
    rewards, weights, losses = np.zeros(3), np.full(3, 1 / 3), np.array([3.0, 2.0, np.nan])
    for update in range(1, 9):
        wanted = 0.9 * rewards[:2] + 0.1 * losses[:2] / weights[:2]
        rewards, weights = odm_weights(rewards, weights, losses, update)
        np.testing.assert_allclose(rewards, [*wanted, 0.0], **EXACT)
        # Three sources: 3 ln 3 = 3.3.
        assert (np.ptp(weights) < 1e-12) == (update <= 3)
        least = min(1 / 3, math.sqrt(math.log(3) / (3 * update)))
        assert min(weights) >= least - 1e-12
        assert math.isclose(sum(weights), 1, rel_tol=1e-12)
    assert weights[0] > weights[1] > weights[2]
    assert odm_weights(np.zeros(1), np.ones(1), np.array([2.0]), 1)[1].tolist() == [1.0]
    with pytest.raises(ValueError, match=r"weights: got .* at update 0; wanted"):
        odm_weights(rewards, weights, losses, 0)


def test_the_rules_give_the_numbers_of_dataflex():
    """Of its released code (OpenDCAI/DataFlex, run elsewhere), without its scale of rewards, 15."""
    weights = np.full(4, 0.25)
    for excess in ([0.5, 0.1, 0.0, 1.2], [0.2, 0.9, 0.3, 0.0]):
        weights = doremi_weights(weights, np.array(excess), rate=0.7, smoothing=0.01)
    np.testing.assert_allclose(weights, [0.226978, 0.280349, 0.172884, 0.319788], **CLOSE)
    seen = [(0, 3.0), (1, 2.0), (3, 4.0), (0, 2.5), (2, 5.0), (3, 1.0), (1, 2.0), (0, 3.0)]
    rewards, weights = np.zeros(4), np.full(4, 0.25)
    for update, (source, loss) in enumerate(seen, start=1):
        losses = np.where(np.arange(4) == source, loss, np.nan)
        rewards, weights = odm_weights(rewards, weights, losses, update)
    np.testing.assert_allclose(rewards, [3.065106, 1.526352, 2.0, 1.84], **CLOSE)
    np.testing.assert_allclose(weights, [0.259495, 0.244605, 0.248658, 0.247241], **CLOSE)
    losses = jnp.array([1.0, 2.0, 5.0, 3.0])
    for strategy, wanted in (
        ("linupper", 3.221123),
        ("quadratic", 2.690283),
        ("extremes", 2.796084),
    ):
        np.testing.assert_allclose(loss_weights(losses, strategy) @ losses, wanted, **CLOSE)


@pytest.mark.parametrize("favour", ["low", "medium", "high"])
def test_records_of_one_range_of_losses_are_drawn_more_often(favour):
    """Thirds of nine records: the favoured third has 5 of 7 of the first draws, or else 1 of 3."""
    losses, draws = np.array([8.0, 1, 5, 4, 0, 7, 3, 2, 6, np.inf]), 800
    wanted = {"low": {0, 1, 2}, "medium": {3, 4, 5}, "high": {6, 7, 8}}[favour]
    for factor, share in ((5.0, 5 / 7), (1.0, 1 / 3)):
        how = {"favour": favour, "factor": factor, "quantiles": (0.3, 0.7)}
        first = [select_by_loss(losses, 1, seed=seed, **how)[0] for seed in range(draws)]
        hits = sum(losses[record] in wanted for record in first)
        assert abs(hits - share * draws) < DEVIATIONS * math.sqrt(draws * share * (1 - share))
    assert sorted(select_by_loss(losses, 9, favour=favour)) == list(range(9))
    with pytest.raises(ValueError, match=r"count: got 10, wanted 1..9"):
        select_by_loss(losses, 10, favour=favour)


def test_rows_are_weighted_by_their_losses():
    losses = jnp.array([1.0, 2.0, 5.0, 3.0])
    h = np.array([-1.0, -0.5, 1.0, 0.0])
    for strategy, scores in (
        ("linupper", np.minimum(h + 1, 1)),
        ("quadratic", 1 - h**2),
        ("extremes", abs(h)),
    ):
        wanted = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(loss_weights(losses, strategy), wanted, **CLOSE)
    np.testing.assert_allclose(loss_weights(jnp.full(3, 2.0)), [1 / 3] * 3, **CLOSE)
    assert loss_weights(jnp.ones(1)).tolist() == [1.0]


def test_no_gradient_flows_through_the_weights():
    def square(w, batch):
        return jnp.mean((w * batch) ** 2)

    batch, w = jnp.array([1.0, 2.0, 4.0]), jnp.float32(1.5)
    loss = reweighted_loss(square, lambda losses, batch: loss_weights(losses))
    weights = loss_weights(jnp.square(w * batch))
    np.testing.assert_allclose(jax.grad(loss)(w, batch), (weights * 2 * w * batch**2).sum())
    even = reweighted_loss(square, lambda losses, batch: jnp.full(3, 1 / 3))
    np.testing.assert_allclose(jax.grad(even)(w, batch), jax.grad(square)(w, batch), **CLOSE)
    assert jax.grad(loss)(w, batch) > 1.2 * jax.grad(square)(w, batch)  # the control


TARGETS = np.array([0.0, 6.0], np.float32)  # of two sources; training starts near the first


def mixed_run(directory, steps, every=4, targets=TARGETS):
    """One parameter per source; proportions follow the losses."""
    sources = [[(np.int32(number), target)] * 5 for number, target in enumerate(targets)]

    def choose(state, choices):
        rewards, weights = map(np.array, choices[-1] if choices else ([0.0, 0.0], [0.5, 0.5]))
        losses = np.asarray((state.params - targets) ** 2, float)
        return odm_weights(rewards, weights, losses, len(choices) + 1)

    def batches(choices):
        weights = np.array([weights for _, weights in choices])
        mixed = mix_sources(sources, weights, seed=1, block=4 * every)
        return record_batches(mixed, seed=0, batch=4, is_shuffled=False)

    def loss(params, batch):
        return jnp.mean((params[batch[0]] - batch[1]) ** 2)

    step = make_train_step(loss, adamw(0.1), sample=HostBatches.sample, most_steps=10)
    state = TrainState.create(jnp.array([0.5, 0.5]), adamw(0.1))
    options = FitOptions(steps, checkpoint_every=3, is_progress_shown=False)
    return fit(state, step, AdaptiveBatches(every, choose, batches), options, directory=directory)


def rows_of(directory):
    return [json.loads(line) for line in (directory / "choices.jsonl").read_text().splitlines()]


def test_a_run_that_chooses_its_data_goes_on_as_if_unbroken(tmp_path):
    whole = mixed_run(tmp_path / "whole", 24)
    for stop in (6, 8, 15):  # within a round, at the end of one, and again
        mixed_run(tmp_path / "cut", stop)
    cut = mixed_run(tmp_path / "cut", 24)
    np.testing.assert_array_equal(cut.state.params, whole.state.params)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows_of(tmp_path / "whole")] == list(range(0, 24, 4))
    weights = [row["choice"][1] for row in rows_of(tmp_path / "whole")]
    assert weights[0] == [0.5, 0.5]
    assert min(second for _, second in weights[1:]) > 0.55
    mixed_run(tmp_path / "even", 24, targets=np.array([6.0, 6.0], np.float32))  # the control
    assert abs(rows_of(tmp_path / "even")[-1]["choice"][1][1] - 0.5) < 0.05


def test_choices_of_another_run_are_refused(tmp_path):
    mixed_run(tmp_path, 6)
    with pytest.raises(ValueError, match=r"every: got 5, and at step 6 choices.jsonl .* \[0, 4\]"):
        mixed_run(tmp_path, 9, every=5)
    (tmp_path / "choices.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds choices of steps \[\]; wanted the file"):
        mixed_run(tmp_path, 9)
    with pytest.raises(ValueError, match="every: got 0"):
        AdaptiveBatches(0, lambda *_: None, lambda *_: None)
