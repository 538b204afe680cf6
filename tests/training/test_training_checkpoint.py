"""Checkpoints: what comes back, onto which devices, and what is refused with which words."""

import errno
import os
import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import NamedSharding, PartitionSpec

from toolkit.training import CheckpointError, Checkpoints, CheckpointWarning, TrainState, adamw
from toolkit.training.checkpoints.identity import _bit_sums, checksums

RUN = {"configuration": {"model": {"width": 8, "pattern": "gdn full"}, "corpus": "abc"}}


def make_state(seed=0, width=8):
    key = jax.random.key(seed)
    params = {
        "layers": [{"weight": jax.random.normal(key, (16, width))}, {"weight": jnp.ones(3)}],
        "large": jax.random.normal(key, (64, 256)),
        "half": jax.random.normal(key, (5, 2)).astype(jnp.bfloat16),
        "key": jax.random.key_data(key),
    }
    return TrainState(jnp.int32(seed), params, (jnp.zeros((2, 2)), {"count": jnp.int32(seed)}))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def directory(tmp_path):
    """Two good checkpoints, steps 1 and 2."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), RUN)
    return tmp_path


def data_files(directory, step):
    files = (directory / str(step) / "state").rglob("d/*")
    return sorted(files, key=lambda path: path.stat().st_size)


def truncate(directory):
    for path in data_files(directory, 2):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(directory):
    path = data_files(directory, 2)[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def delete_arrays(directory):
    for path in data_files(directory, 2):
        path.unlink()


def delete_state(directory):
    shutil.rmtree(directory / "2" / "state")


def delete_record(directory):
    shutil.rmtree(directory / "2" / "record")


def spoil_record(directory):
    (directory / "2" / "record" / "metadata").write_text('{"run": ')


def add_empty_directory(directory):
    shutil.rmtree(directory / "2")
    (directory / "2").mkdir()


def test_newest_comes_back_whole_and_older_ones_are_deleted(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore_latest(make_state()) is None
        for step in (3, 5, 8):
            checkpoints.save(step, make_state(step), RUN)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [5, 8]
        state, metadata = checkpoints.restore_latest(make_state(), RUN)
    assert_same(state, make_state(8))
    assert metadata == RUN


def test_saving_a_step_twice_leaves_the_first(directory):
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(2, make_state(2), RUN)
        assert checkpoints.steps() == [1, 2]
        with pytest.raises(CheckpointError, match="already holds step 2"):
            checkpoints.save(0, make_state(0), RUN)


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


def test_a_reader_changes_nothing_and_a_second_trainer_is_told_who_trains(directory):
    """`toolkit generate` reads while training saves: what is unfinished must stay."""
    with Checkpoints(directory) as trainer:
        unfinished = directory / "9.orbax-checkpoint-tmp"
        unfinished.mkdir()
        before = contents(directory)
        with Checkpoints(directory, is_read_only=True) as reader:
            state, _ = reader.restore_latest(make_state(), RUN)
        assert_same(state, make_state(2))
        assert contents(directory) == before
        with pytest.raises(CheckpointError, match=rf"being trained by process {os.getpid()} on"):
            Checkpoints(directory)
        assert unfinished.exists()
        trainer.save(3, make_state(3), RUN)
    with Checkpoints(directory) as trainer:
        assert not unfinished.exists(), "its new holder cleans up"
        assert trainer.steps() == [1, 2, 3]


def test_a_reader_leaves_damaged_checkpoints_where_they_are(directory):
    flip_a_bit(directory)
    before = contents(directory)
    with (
        Checkpoints(directory, is_read_only=True) as reader,
        pytest.warns(CheckpointWarning, match="not what was saved"),
    ):
        reader.restore_latest(make_state(), RUN)
    assert contents(directory) == before


def test_a_reader_of_nothing_makes_nothing(tmp_path):
    with Checkpoints(tmp_path / "absent", is_read_only=True) as reader:
        assert reader.restore_latest(make_state()) is None
    assert not (tmp_path / "absent").exists()


def test_arrays_may_be_donated_while_they_are_being_written(tmp_path):
    overwrite = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    values = np.random.default_rng(0).normal(size=(1 << 20,)).astype(np.float32)
    state = {"large": jnp.asarray(values.copy())}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, RUN)
        state = {"large": overwrite(state["large"])}
        restored, _ = checkpoints.restore_latest(state, RUN)
    np.testing.assert_array_equal(restored["large"], values)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "arrays are unreadable"),
        (flip_a_bit, "array 'params/large' is not what was saved"),
        (delete_arrays, "arrays are unreadable"),
        (delete_state, "arrays are unreadable"),
        (delete_record, "has no record"),
        (spoil_record, "record is unreadable"),
        (add_empty_directory, "has no record"),
    ],
)
def test_damaged_checkpoint_is_refused_and_the_one_before_is_used(directory, damage, reason):
    damage(directory)
    with Checkpoints(directory) as checkpoints:
        with pytest.warns(CheckpointWarning, match=reason) as caught:
            state, _ = checkpoints.restore_latest(make_state(), RUN)
        assert str(directory / "2") in str(caught[0].message)
        assert "Using step 1 instead" in str(caught[0].message)
        assert_same(state, make_state(1))
        checkpoints.save(2, make_state(2), RUN)
    assert (directory / "2.refused").is_dir()
    with Checkpoints(directory) as checkpoints:
        assert_same(checkpoints.restore_latest(make_state(), RUN)[0], make_state(2))


def test_nothing_usable_is_an_error_and_not_a_fresh_start(directory):
    for step in (1, 2):
        shutil.rmtree(directory / str(step) / "record")
    with Checkpoints(directory) as checkpoints:
        with pytest.raises(CheckpointError, match=r"2: it has no record.*\(1 older ones too\)"):
            checkpoints.restore_latest(make_state(), RUN)
        assert checkpoints.steps() == [1, 2]


def test_checkpoint_of_another_run_is_refused_with_what_differs(directory):
    other = {"configuration": {"model": {"width": 16, "pattern": "gdn full"}, "corpus": "abd"}}
    with Checkpoints(directory) as checkpoints:
        with pytest.raises(CheckpointError, match="belongs to another run") as error:
            checkpoints.restore_latest(make_state(), other)
        message = str(error.value)
        assert "configuration.model.width: the checkpoint has 8, this run 16" in message
        assert "configuration.corpus: the checkpoint has abc, this run abd" in message
        assert "pattern" not in message
        with pytest.raises(CheckpointError, match=r"float32\[16,8\], this run float32\[16,9\]"):
            checkpoints.restore_latest(make_state(width=9), RUN)
        with pytest.raises(
            CheckpointError, match=r"the checkpoint has int32\[\], this run nothing"
        ):
            checkpoints.restore_latest({"params": make_state().params}, RUN)


def test_foreign_checkpoint_on_top_of_a_good_one_is_set_aside(directory):
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(9, make_state(9, width=4), RUN)
    with Checkpoints(directory) as checkpoints:
        with pytest.warns(CheckpointWarning, match="belongs to another run"):
            state, _ = checkpoints.restore_latest(make_state(), RUN)
        assert checkpoints.steps() == [1, 2]
    assert_same(state, make_state(2))
    assert (directory / "9.refused").is_dir()


def test_unfinished_saves_are_removed_on_opening(directory):
    unfinished = directory / "7.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    with Checkpoints(directory) as checkpoints:
        assert not unfinished.exists()
        assert checkpoints.steps() == [1, 2]


def test_full_disk_is_noticed_before_writing(directory, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with Checkpoints(directory) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000, 9_000, 1_000))
        with pytest.raises(CheckpointError, match=r"needs [\d,]{9} bytes, 1,000 are free") as error:
            checkpoints.save(3, make_state(3), RUN)
        assert str(directory) in str(error.value)
        monkeypatch.undo()
        assert_same(checkpoints.restore_latest(make_state(), RUN)[0], make_state(2))


def test_disk_that_fills_up_during_a_save_leaves_the_previous_one(directory, monkeypatch):
    with Checkpoints(directory) as checkpoints:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(CheckpointError, match="the disk is full") as error:
            checkpoints.save(3, make_state(3), RUN)
        assert str(error.value).count("\n") == 1
        monkeypatch.undo()
        assert_same(checkpoints.restore_latest(make_state(), RUN)[0], make_state(2))


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="its name is not UTF-8"):
        Checkpoints(os.fsencode(tmp_path / "run").decode() + "\udcff")
    assert not list(tmp_path.glob("run*"))
    with pytest.raises(CheckpointError, match=r"cannot use '.*file'"):
        Checkpoints(tmp_path / "file")
    with Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(TypeError, match="JSON"):
        checkpoints.save(1, make_state(), {"dtype": jnp.float32})


def test_sharded_state_is_restored_onto_another_mesh_and_onto_one_device(tmp_path):
    auto = jax.sharding.AxisType.Auto
    eight = jax.make_mesh((8,), ("data",), axis_types=(auto,))
    two_by_four = jax.make_mesh((2, 4), ("data", "model"), axis_types=(auto, auto))
    values = {"weight": jnp.arange(128.0).reshape(16, 8), "bias": jnp.arange(8.0)}

    def on(mesh, spec):
        placed = {
            "weight": jax.device_put(values["weight"], NamedSharding(mesh, spec)),
            "bias": jax.device_put(values["bias"], NamedSharding(mesh, PartitionSpec())),
        }
        return TrainState.create(placed, adamw(1e-3))

    saved = on(eight, PartitionSpec("data"))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(saved)} == {8}
    templates = [
        on(two_by_four, PartitionSpec("model", "data")),
        TrainState.create(values, adamw(1e-3)),
    ]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, saved)
        for template in templates:
            restored, _ = checkpoints.restore_latest(template)
            assert_same(restored, template)
            for one, other in zip(
                jax.tree.leaves(restored), jax.tree.leaves(template), strict=True
            ):
                assert one.sharding == other.sharding


@pytest.mark.parametrize("leaf", ["float32", "bfloat16", "bool", "int8", "float64"])
def test_a_checksum_is_the_same_for_every_device_that_makes_it(leaf):
    """What NumPy adds where the array is, what XLA adds, and the parts of an array on a mesh."""
    with enable_x64(leaf == "float64"):
        whole = jax.random.normal(jax.random.key(0), (8, 6)).astype(leaf)
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        cut = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("a")))
        made = jax.device_get(_bit_sums([whole]))
        wanted = {"one": int(made[0]), "parts": int(made[0]), "none": 0}
        assert checksums({"one": whole, "parts": cut, "none": whole[:0]}) == wanted
