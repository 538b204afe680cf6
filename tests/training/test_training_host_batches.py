"""Every host reads its own rows; what a step sees depends on seed and step alone."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from toolkit import training
from toolkit.parallel import make_mesh
from toolkit.training import CorpusError, HostBatches, record_batches, token_batches
from toolkit.training.data.host_batches import permuted

DEVIATIONS = 5  # of a chi-square from its mean; the draws are the same every time
TOKENS = np.arange(1000, dtype=np.uint16)


def windows(step, sharding=None, **changes):
    options = {"seed": 3, "batch": 8, "time": 5, "sharding": sharding}
    return HostBatches.sample(
        token_batches(TOKENS, **options | changes).block(step, 2, 4), step + 1
    )


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}])
def test_batches_are_the_same_on_every_mesh(axes):
    spec = NamedSharding(make_mesh(axes), PartitionSpec("data"))
    for whole, cut in zip(windows(6), windows(6, spec), strict=True):
        np.testing.assert_array_equal(whole, cut)
    inputs, targets = windows(6)
    np.testing.assert_array_equal(targets, inputs + 1)
    assert len(set(inputs[:, 0].tolist())) > 4
    assert not jnp.array_equal(inputs, windows(7)[0])
    assert not jnp.array_equal(inputs, windows(6, seed=4)[0])


def test_a_host_reads_the_rows_of_its_devices_once():
    """Two of eight rows lie on the first device, and on its twin along the other axis."""
    mesh = make_mesh({"data": 4, "model": 2})
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    asked = []

    def read(step, row):
        asked.append((step, row))
        return np.full(3, row)

    batches = HostBatches(read, 8, sharding)
    batches.block(0, 2, 5)
    assert sorted(asked) == [(step, row) for step in (0, 1) for row in range(8)]
    asked.clear()
    here = set(mesh.devices[0])
    of_one_process = {
        device: index
        for device, index in sharding.devices_indices_map((8,)).items()
        if device in here
    }
    one_process = SimpleNamespace(addressable_devices_indices_map=lambda shape: of_one_process)
    parts = HostBatches._parts(SimpleNamespace(sharding=one_process, batch=8))
    assert {row for part in parts for row in part} == {0, 1}


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000, 1500])
def test_epochs_are_permutations_of_their_own(size):
    first, second = ([permuted(i, size, key) for i in range(size)] for key in ("0/0", "0/1"))
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second or size < 3
    assert 0 <= permuted(10**12, 10**15, "key") < 10**15


@pytest.mark.parametrize(("size", "draws"), [(3, 300), (4, 300), (5, 100)])
def test_few_records_come_in_every_order_equally_often(size, draws):
    """Of all orders: for 4 and 5 records a network alone has 7 and 35 times the chi-square."""
    orders = math.factorial(size)
    seen = Counter(
        tuple(permuted(i, size, f"7/{epoch}") for i in range(size))
        for epoch in range(draws * orders)
    )
    counts = [seen[order] for order in itertools.permutations(range(size))]
    freedom = orders - 1
    chi_square = sum((count - draws) ** 2 / draws for count in counts)
    assert abs(chi_square / freedom - 1) < DEVIATIONS * math.sqrt(2 / freedom)


@pytest.mark.parametrize("size", [8, 257])  # drawn exactly, and by the network
def test_two_records_are_at_every_distance_equally_often(size):
    draws = 100 * size
    epochs = [[permuted(i, size, f"7/{epoch}") for i in (0, 1)] for epoch in range(draws)]
    seen = Counter((second - first) % size for first, second in epochs)
    wanted, freedom = draws / (size - 1), size - 2
    chi_square = sum((seen[away] - wanted) ** 2 / wanted for away in range(1, size))
    assert abs(chi_square / freedom - 1) < DEVIATIONS * math.sqrt(2 / freedom)


def test_records_come_once_an_epoch():
    source = [{"ids": np.full(2, index), "weight": np.float32(index)} for index in range(6)]
    data = record_batches(source, seed=0, batch=4)
    block = data.block(0, 3)
    seen = [int(i) for step in range(3) for i in HostBatches.sample(block, step)["weight"]]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != list(range(6))
    own = record_batches(source, seed=0, batch=4, is_shuffled=False).block(0, 1)
    assert HostBatches.sample(own, 0)["weight"].tolist() == [0, 1, 2, 3]


def test_a_grain_dataset_is_a_source():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(20).map(lambda index: np.full(3, index, np.int32))
    seen = HostBatches.sample(record_batches(source, seed=0, batch=20).block(0, 1), 0)
    assert sorted(seen[:, 0].tolist()) == list(range(20))
    with pytest.raises(ValueError, match="source"):
        record_batches(source.to_iter_dataset(), seed=0, batch=2)


def test_fit_reads_and_resumes(tmp_path):
    """Cut anywhere, the run sees the same batches; the last call has fewer steps."""

    def run(directory, steps):
        optimizer = training.adamw(0.1)
        data = token_batches(TOKENS, seed=0, batch=4, time=3)
        step = training.make_train_step(
            lambda w, batch: ((w * batch[0] - batch[1]) ** 2).mean() / 1e6,
            optimizer,
            sample=data.sample,
            most_steps=4,
        )
        state = training.TrainState.create(jnp.ones(3), optimizer)
        options = training.FitOptions(steps, log_every=4, is_progress_shown=False)
        return training.fit(state, step, data, options, directory=directory)

    run(tmp_path / "cut", 5)
    cut, whole = run(tmp_path / "cut", 10), run(None, 10)
    np.testing.assert_array_equal(cut.state.params, whole.state.params)


def test_a_step_that_draws_no_batch_is_refused():
    step = training.make_train_step(lambda w, batch: jnp.mean(w * batch), optax.sgd(0.1))
    state = training.TrainState.create(jnp.float32(1), optax.sgd(0.1))
    data = record_batches([np.float32(1)] * 4, seed=0, batch=2)
    with pytest.raises(ValueError, match=r"HostBatches and .* wanted .*=HostBatches\.sample"):
        training.fit(state, step, data, training.FitOptions(3, log_every=1))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: token_batches(TOKENS, seed=0, batch=0, time=5), ValueError, "batch"),
        (lambda: token_batches(TOKENS, seed=0, batch=10**12, time=5), ValueError, "batch"),
        (lambda: token_batches(TOKENS, seed=0, batch=1, time=0), ValueError, "time"),
        (lambda: token_batches(TOKENS, seed=0, batch=1, time=1000), CorpusError, "time"),
        (lambda: token_batches(TOKENS / 2, seed=0, batch=1, time=5), ValueError, "float"),
        (lambda: windows(0, vocabulary=10), CorpusError, "vocabulary"),
        (lambda: record_batches(iter([]), seed=0, batch=1), ValueError, "list_iterator"),
        (lambda: record_batches([], seed=0, batch=1), CorpusError, "empty"),
        (
            lambda: record_batches([np.zeros(2), np.zeros(3)], seed=0, batch=2).block(0, 1),
            CorpusError,
            "alike",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_block_is_one_program():
    """The last call of a run has fewer steps; its block has the same shapes."""
    data = token_batches(TOKENS, seed=0, batch=2, time=3)
    shapes = [jax.tree.map(jnp.shape, data.block(0, steps, 4)) for steps in (1, 4)]
    assert shapes[0] == shapes[1]
