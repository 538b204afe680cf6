"""A cluster stands for its name in every function of the room, and candidates are trusted."""

import cProfile
import pstats

import pytest

from toolkit.attention.latent import LatentConfig
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
