"""Workloads: the same batch for the same step and seed, splits that share nothing."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.experiments.lr import sources, workloads
from toolkit.experiments.lr.evaluation import EVALUATION
from toolkit.experiments.lr.experiment import EXPERIMENT
from toolkit.experiments.lr.workloads import WORKLOADS, workload

# Fine-tuning trains first, and is left to the night.
NAMES = [
    *WORKLOADS,
    *(pytest.param(name, marks=pytest.mark.nightly) for name in EVALUATION),
]


SCIKIT_LEARN = ("autoencoder", "ddpm", "diabetes")


@pytest.fixture(params=NAMES)
def problem(request):
    if request.param in SCIKIT_LEARN or request.param.startswith("digits"):
        pytest.importorskip("sklearn")
    return workload(request.param)


def test_batches_follow_from_step_and_seed(problem):
    draw = jax.jit(problem.sample)
    first, again, other, next_step = (
        jax.tree.leaves(draw(problem.data, step, seed))[0]
        for step, seed in ((3, 1), (3, 1), (3, 2), (4, 1))
    )
    assert len(first) == problem.batch_size
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != next_step).any()


def test_the_loss_is_finite_and_has_gradients(problem):
    params = problem.init(jax.random.key(0))
    batch = problem.sample(problem.data, 0, 0)
    loss, gradients = jax.jit(jax.value_and_grad(problem.loss))(params, batch)
    assert 0 < loss < 10
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_no_workload_of_evaluation_is_one_of_development():
    assert not WORKLOADS.keys() & EVALUATION.keys()
    made = {setting.workload for setting in EXPERIMENT.settings.values()}
    assert made == EVALUATION.keys()
    sources_of = [
        {build.__module__ for build in table.values()} for table in (WORKLOADS, EVALUATION)
    ]
    assert not set.intersection(*sources_of)


def test_rows_belong_to_one_split():
    splits = sources.shuffled_splits(np.arange(100), np.arange(100))
    rows = [set(split[0]) for split in splits.values()]
    assert [len(split) for split in rows] == [60, 20, 20]
    assert set.union(*rows) == set(range(100))


def test_windows_of_text_belong_to_one_split():
    text = np.arange(1000)  # each character says where it stands
    cut = {name: np.asarray(part) for name, part in sources.windows(text, 8).items()}
    draw = sources.draw_windows
    step = seed = jnp.uint32(0)
    drawn = draw(jnp.asarray(cut["training"]), step, seed, length=8, batch_size=4096)
    assert drawn.min() == 0
    assert drawn.max() == 799
    assert (cut["validation"].min(), cut["validation"].max()) == (800, 899)
    assert (cut["test"].min(), cut["test"].max()) == (900, 999)


def test_tables_share_no_row():
    rows = [{bytes(row) for row in workloads._friedman(500, seed)[0]} for seed in range(3)]
    assert len(set.union(*rows)) == 1500


def test_a_convolution_as_a_product():
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(2, 8, 8, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 3, 5)), jnp.float32)
    ours = sources.neighbourhoods(images) @ kernel.reshape(27, 5)
    theirs = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match="pip install scikit-learn"):
        sources.scikit_learn("load_digits")
    with pytest.raises(ValueError, match="workload must be one of 'digits-mlp'"):
        workload("mnist")
