"""Layouts as data: printed, edited, checked, applied."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from toolkit.parallel import data_parallel, fully_sharded, make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 8})


def some_params():
    return {
        "embed": jnp.ones((48, 32)),
        "layers": [{"kernel": jnp.ones((32, 64)), "bias": jnp.ones(64)}],
        "odd": jnp.ones((63, 33)),
    }


def specs_by_path(layout):
    return {row.path: row.spec for row in layout.placements}


def test_fully_sharded_cuts_the_largest_divisible_dimension(mesh):
    layout = fully_sharded(some_params(), mesh)
    assert specs_by_path(layout) == {
        "embed": P("data"),
        "layers/0/kernel": P(None, "data"),
        "layers/0/bias": P(),
        "odd": P(),
    }
    reasons = {row.path: row.reason for row in layout.placements}
    assert reasons["layers/0/kernel"] == "dimension 1 (64) is the largest divisible by 8"
    assert reasons["layers/0/bias"] == "replicated: small (64 elements < 1024)"
    assert reasons["odd"] == "replicated: no free dimension is divisible by data=8"


def test_the_first_of_equal_dimensions_and_the_threshold(mesh):
    square = {"square": jnp.ones((16, 16))}
    assert specs_by_path(fully_sharded(square, mesh)) == {"square": P()}
    assert specs_by_path(fully_sharded(square, mesh, min_elements=0)) == {"square": P("data")}


def test_bytes_per_device(mesh):
    params = some_params()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    kept = params["layers"][0]["bias"].nbytes + params["odd"].nbytes
    assert data_parallel(params, mesh).bytes_per_device == whole
    sharded = fully_sharded(params, mesh)
    assert sharded.bytes_per_device == (whole - kept) // 8 + kept
    placed = sharded.apply(params)
    first = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
    assert held == sharded.bytes_per_device


def test_describe_reads_as_a_table(mesh):
    lines = str(fully_sharded(some_params(), mesh)).splitlines()
    assert lines[0] == "mesh: data=8 (8 devices); batch: P('data')"
    assert lines[1].split() == ["path", "shape", "spec", "bytes/device", "reason"]
    assert "layers/0/kernel  32x64  P(None, 'data')" in lines[4]
    assert lines[-1].startswith("total")
    column = lines[1].index("reason")
    assert all(line[column - 2 : column] == "  " for line in lines[1:])


def test_replace_edits_a_copy(mesh):
    layout = fully_sharded(some_params(), mesh)
    edited = layout.replace("embed", P(None, "data"), "cut the features")
    assert specs_by_path(edited)["embed"] == P(None, "data")
    assert "cut the features" in str(edited)
    assert specs_by_path(layout)["embed"] == P("data")
    with pytest.raises(ValueError, match=r"no parameter 'layers/0/kernal'.*layers/0/kernel"):
        layout.replace("layers/0/kernal", P(), "")


@pytest.mark.parametrize(
    ("path", "spec", "message"),
    [
        (
            "odd",
            P(None, "data"),
            r"odd \(63, 33\): dimension 1 of size 33 is not divisible by axis 'data' of size 4",
        ),
        (
            "odd",
            P(("data", "model")),
            "dimension 0 of size 63 is not divisible by axis 'data' x 'model' of size 8",
        ),
        ("embed", P("rows"), "axis 'rows' is not in the mesh \\(axes 'data', 'model'\\)"),
        ("embed", P("data", "data"), "axis 'data' is used twice in P\\('data', 'data'\\)"),
        ("layers/0/bias", P(None, "data"), "names 2 dimensions, the tensor has 1"),
    ],
)
def test_check_names_path_dimension_axis_and_sizes(path, spec, message):
    layout = data_parallel(some_params(), make_mesh({"data": 4, "model": 2}))
    layout.check()
    edited = layout.replace(path, spec, "wrong")
    with pytest.raises(ValueError, match=message):
        edited.check()
    with pytest.raises(ValueError, match="the layout does not fit"):
        edited.apply(some_params())


def test_optimiser_moments_follow_their_parameters(mesh):
    params = some_params()
    layout = fully_sharded(params, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"step": jnp.int32(0), "params": params, "optimizer_state": optimizer.init(params)}
    specs = layout.specs(state)
    adam = specs["optimizer_state"][1][0]
    assert specs["params"]["layers"][0]["kernel"] == P(None, "data")
    assert adam.mu["layers"][0]["kernel"] == adam.nu["layers"][0]["kernel"] == P(None, "data")
    assert adam.mu["odd"] == specs["step"] == adam.count == P()


def test_flax_states_and_plain_dicts_have_the_same_paths(mesh):
    _, params = nnx.split(nnx.Linear(32, 64, rngs=nnx.Rngs(0)))
    layout = fully_sharded(params, mesh)
    assert specs_by_path(layout) == {"bias": P(), "kernel": P(None, "data")}
    plain = nnx.to_pure_dict(params)
    assert specs_by_path(fully_sharded(plain, mesh)) == specs_by_path(layout)
    placed = layout.apply(params)
    assert placed["kernel"][...].sharding.spec == P(None, "data")
    moments = layout.apply(optax.adam(1e-3).init(params))
    assert moments[0].mu["kernel"][...].sharding.spec == P(None, "data")


def test_shapes_alone_make_a_layout(mesh):
    shapes = jax.eval_shape(some_params)
    assert specs_by_path(fully_sharded(shapes, mesh)) == specs_by_path(
        fully_sharded(some_params(), mesh)
    )


def test_apply_keeps_the_values(mesh):
    params = {"kernel": jnp.arange(64.0 * 32).reshape(64, 32)}
    placed = fully_sharded(params, mesh).apply(params)
    np.testing.assert_array_equal(placed["kernel"], params["kernel"])
    assert {shard.data.shape for shard in placed["kernel"].addressable_shards} == {(8, 32)}


def test_another_model_is_refused(mesh):
    layout = fully_sharded({"kernel": jnp.ones((64, 32))}, mesh)
    with pytest.raises(ValueError, match=r"kernel has shape \(64, 48\).*made for \(64, 32\)"):
        layout.shardings({"kernel": jnp.ones((64, 48))})


def test_a_tree_of_other_names_is_refused(mesh):
    layout = data_parallel({"w": jnp.ones((8, 4))}, mesh)
    with pytest.raises(ValueError, match="tree has none of the 1 parameters"):
        layout.apply({"kernel": jnp.ones((8, 4))})
    alone = fully_sharded(jnp.ones((512, 4)), mesh)
    moments = optax.adam(1.0).init(jnp.ones((512, 4)))
    assert alone.apply(jnp.ones((512, 4))).sharding.spec == alone.specs(moments)[0].mu != P()
    assert layout.apply({"count": jnp.zeros(())})["count"] == 0


def test_batches_are_cut_or_refused(mesh):
    layout = data_parallel(some_params(), mesh)
    batch = layout.apply_batch({"tokens": jnp.ones((16, 4), jnp.int32)})
    assert batch["tokens"].sharding.spec == P("data")
    with pytest.raises(ValueError, match=r"batch: tokens \(12, 4\): dimension 0 of size 12"):
        layout.apply_batch({"tokens": jnp.ones((12, 4))})


def test_wrong_arguments_are_named(mesh):
    with pytest.raises(ValueError, match="axis must be one of 'data'"):
        fully_sharded(some_params(), mesh, axis="model")
    with pytest.raises(ValueError, match="min_elements=-1"):
        fully_sharded(some_params(), mesh, min_elements=-1)
    with pytest.raises(TypeError, match="params, at 'name': got str, want an array"):
        data_parallel({"name": "kernel"}, mesh)
