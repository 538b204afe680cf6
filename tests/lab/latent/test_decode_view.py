"""Who holds what when latents decode: what is drawn against what the planner counts."""

import pytest

from toolkit.attention.latent import PRESETS
from toolkit.lab.latent.decode import (
    ARRAYS,
    PUBLISHED,
    PUBLISHED_CONTEXTS,
    SCHEMES,
    TITLES,
    collectives_of,
    decode_view,
    holding,
)
from toolkit.planning import decode_cost

SETTING = {"model": "deepseek_v3", "kind": "h100", "degree": 8, "slices": 2, "batch": 16}


def view_of(**changes):
    return decode_view(**{**SETTING, "context": 32768, "chip": 0, **changes})


def numbers_held(config, shards):
    """The number of weights, and of cached numbers per token of all rows, in a shard."""
    sizes = config.parameters
    weights = (
        sizes["query_down"]
        + sizes["rope_key"]
        + (sizes["query_up"] + sizes["output"]) * shards["heads"].share
        + sizes["latent_down"] * shards["down"].share
        + (sizes["key_up"] + sizes["value_up"]) * shards["up"].share
    )
    cache = shards["cache"]
    return weights, config.latent_size * cache.share + config.rope_size * cache.along[1]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", TITLES)
def test_what_is_drawn_makes_up_the_bytes_of_the_planner(model, scheme):
    config, batch, context = PRESETS[model], 16, 4096
    for degree, slices in ((2, 2), (8, 2), (8, 4), (8, 8)):
        slices = slices if scheme.startswith("tpla") else 1
        cost = decode_cost(model, batch, context, f"h100:{degree}", scheme=scheme, slices=slices)
        weights, per_token = numbers_held(config, holding(scheme, degree, slices, degree - 1))
        assert cost.weight_bytes == pytest.approx(2 * weights)
        assert cost.cache_bytes == pytest.approx(2 * batch * context * per_token)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_chips_together_hold_every_array_evenly(scheme):
    slices = 2 if scheme.startswith("tpla") else 1
    found = [holding(scheme, 8, slices, chip) for chip in range(8)]
    for array in ARRAYS:
        places = [one[array] for one in found]
        distinct = set(places)
        assert sum(place.share for place in distinct) == pytest.approx(1)
        assert {places.count(place) for place in distinct} == {8 // len(distinct)}


def test_break_even_is_where_reading_is_equal():
    view = view_of(degree=2, batch=1)
    sizes = view_of(degree=2, batch=1, context=round(view.break_even)).costs
    whole, cut = (next(c for c in sizes if c.scheme == one) for one in ("replicate", "tpla"))
    read = [cost.weight_bytes + cost.cache_bytes for cost in (whole, cut)]
    assert read[0] == pytest.approx(read[1], rel=1e-5)
    assert view_of(degree=2, batch=16).break_even == pytest.approx(view.break_even / 16)


def test_the_model_explains_a_part_of_what_is_published():
    assert [PUBLISHED[model][-1] for model in ("deepseek_v3", "kimi_k2")] == [1.79, 1.93]
    assert PUBLISHED_CONTEXTS[-1] == 32768
    for model, ratios in PUBLISHED.items():
        view = view_of(model=model, kind="h800", degree=2)
        assert 1 < view.faster["tpla"][PUBLISHED_CONTEXTS.index(32768)] < ratios[-1]


def test_nothing_that_fits_is_said_and_more_slices_than_chips_are_as_many():
    view = view_of(degree=2, slices=8, batch=1024, context=1 << 20)
    assert view.slices == 2
    assert view.reason == "No exact scheme fits these chips."
    assert view.data()["fits"] == ["no"] * len(SCHEMES)


def test_collectives_in_words():
    costs = dict(zip(SCHEMES, view_of().costs, strict=True))
    assert collectives_of(costs["data"]) == "none"
    assert collectives_of(costs["replicate"]) == "all-reduce 224 KiB"
    own = [collectives_of(costs[scheme]).split(", ") for scheme in ("dcp", "tpla-lean", "tpla")]
    assert [len(of) for of in own] == [3, 3, 1]
    assert own[0][-1] == own[1][-1] == own[2][0] == "all-reduce 224 KiB"
    assert "exact scheme that fits" in view_of().sentence()
