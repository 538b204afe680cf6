"""A cluster stands for its name in every function of the room, and candidates are trusted."""

import cProfile
import pstats

import pytest

from toolkit.attention.latent import LatentConfig
from toolkit.looped import LoopedConfig
from toolkit.parallel import make_mesh
from toolkit.planning import Strategy, cluster, plan, plan_decode, plan_sequences, predict

CHECKS = 20  # of the whole search
LATENT = LatentConfig(width=64, heads=16, latent_size=64, key_size=16, rope_size=16, value_size=16)


@pytest.mark.parametrize(
    "call",
    [
        lambda chips: plan("llama-3.2-1b", chips, batch=64),
        lambda chips: predict("llama-3.2-1b", chips, Strategy(fsdp=16), batch=64),
        lambda chips: plan_sequences("llama-3.2-1b", chips, [4096, 512, 512, 512]),
        lambda chips: plan_decode(LATENT, 16, 1024, chips, other_parameters=0.0),
    ],
)
def test_a_cluster_is_taken_as_its_name_is(call):
    assert str(call(cluster("v5e:4x4"))) == str(call("v5e:4x4"))


def test_slices_of_a_pod_are_joined_by_the_data_centre():
    two, whole = cluster("2*v5e:4x8"), cluster("v5e:8x8")
    assert (two.chips, two.slices, two.link(1, 32).name) == (64, 2, whole.link(1, 64).name)
    assert two.link(32, 2).name == "DCN"
    assert whole.link(32, 2).name != "DCN"
    sizes = {"batch": 64, "strategy": Strategy(data=2, fsdp=32, recompute="layer")}
    apart, near = (predict("llama-3-8b", each, **sizes) for each in (two, whole))
    assert apart.step_seconds > near.step_seconds
    for chips in ("2*h100:8", "x*v5e:4", "0*v5e:4"):
        with pytest.raises(ValueError, match="slices of a TPU"):
            cluster(chips)
    with pytest.raises(ValueError, match="no v5e slice"):
        cluster("2*v5e:3x3")


def test_a_plan_says_which_attention_it_assumes():
    found = str(plan("llama-3.2-1b", "h100:8", batch=64))
    assert "its attention: as fast as FlashAttention-2 in published runs" in found
    assert "splash attention" in str(plan("llama-3.2-1b", "v5e:8", batch=64))


def test_what_is_neither_name_nor_cluster_is_refused():
    with pytest.raises(TypeError, match="chips must be a string or a Cluster; got 16"):
        plan("llama-3.2-1b", 16, batch=64)


def test_candidates_of_a_plan_do_not_check_themselves():
    plan("llama-3-8b", "h100:64", batch=256)  # what is computed once
    profile = cProfile.Profile()
    profile.runcall(plan, "llama-3-8b", "h100:64", batch=256)
    counts = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    checks = [calls[0] for (_, _, name), calls in counts.items() if name == "__post_init__"]
    assert 0 < sum(checks) < CHECKS


@pytest.mark.nightly
def test_a_step_over_two_slices_compiles():
    from toolkit.planning.grade.by_compiler import compile_plan

    pytest.importorskip("libtpu")
    tiny = LoopedConfig(
        vocabulary=512, width=256, pattern="full full", heads=4, feed_forward=512, dtype="bfloat16"
    )
    found = plan(tiny, "2*v5e:2x2", batch=16, sequence_length=256)
    mesh = make_mesh({"data": 2, "model": 4}, devices=cluster("2*v5e:2x2").devices())
    assert [{each.slice_index for each in row} for row in mesh.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match="divide the 2 slices"):
        make_mesh({"a": 3}, devices=cluster("2*v5e:2x2").devices()[2:5])
    assert "per chip" in compile_plan(found)
