"""Plans: as good as every strategy tried one by one, quick, and explained."""

import dataclasses
import itertools

import pytest
from yardstick import assert_quick

from toolkit.measure import in_words
from toolkit.planning import MODELS, Constants, Strategy, plan, predict
from toolkit.planning.strategy import RECOMPUTE


def test_a_plan_is_no_slower_than_any_uniform_strategy():
    """Brute force over degrees, recomputing and microbatches; a plan may also mix layers."""
    found = plan("llama-3-8b", "a100:8", batch=32, reserve=0.0)
    best = None
    for data, fsdp, tensor, pipeline, recompute, parts in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), RECOMPUTE, (1, 2, 4, 8, 16)
    ):
        if data * fsdp * tensor * pipeline != 8 or (pipeline > 1 and parts < pipeline):
            continue
        strategy = Strategy(
            data=data, fsdp=fsdp, tensor=tensor, pipeline=pipeline, recompute=recompute,
            microbatches=parts, shard_optimizer=data > 1, head_chunks=8,
        )  # fmt: skip
        try:
            other = predict("llama-3-8b", "a100:8", strategy, batch=32)
        except ValueError:
            continue
        if other.fits and (best is None or other.step_seconds < best.step_seconds):
            best = other
    assert found.best.step_seconds <= best.step_seconds
    assert found.best.memory.total <= found.best.limit


def test_long_sequences_go_back_through_layers_in_chunks():
    """Brute force over chunks too: what fits no other way is planned so, and is the fastest."""
    given = {"batch": 4, "sequence_length": 65_536}
    found = plan("llama-3.2-1b", "v5e:4", **given)
    assert found.best.strategy.block_chunks > 1
    assert "layers in" in str(found)
    for fsdp, tensor, recompute, chunks in itertools.product(
        (1, 2, 4), (1, 2, 4), RECOMPUTE, (1, 2, 4, 8, 16)
    ):
        if fsdp * tensor > 4 or (chunks > 1 and (recompute != "layer" or tensor > 1)):
            continue
        strategy = Strategy(
            data=4 // fsdp // tensor, fsdp=fsdp, tensor=tensor, recompute=recompute,
            shard_optimizer=fsdp * tensor < 4, head_chunks=256, block_chunks=chunks,
        )  # fmt: skip
        other = predict("llama-3.2-1b", "v5e:4", strategy, memory=found.best.limit, **given)
        assert not other.fits or found.best.step_seconds <= other.step_seconds


def test_no_plan_is_slower_than_the_layouts_by_name():
    found = plan("llama-3.2-1b", "v5e:4x4", batch=64, reserve=0.0)
    for named in (Strategy(data=16), Strategy(fsdp=16), Strategy(fsdp=16, recompute="layer")):
        other = predict("llama-3.2-1b", "v5e:4x4", named, batch=64)
        assert found.best.step_seconds <= other.step_seconds or not other.fits


def test_a_plan_says_why():
    found = plan("llama-3-8b", "h100:16", batch=64, constants=Constants(link=0.2))
    text = str(found)
    assert "modelled" in text
    assert "MFU" in text
    for each in (found.best, *found.runners_up):
        assert in_words(each.utilisation, "share") in text
    assert "its groups: " in text
    assert "+" in text
    assert "of the memory is free" in text


def test_stages_are_balanced_where_that_helps():
    """On slow links; the head's stage has fewer layers, and equal stages are slower."""
    found = plan("llama-3-8b", "a100:16", batch=64, constants=Constants(link=0.1))
    best = next(each for each in (found.best, *found.runners_up) if each.strategy.stages)
    even = predict(
        "llama-3-8b", "a100:16", dataclasses.replace(best.strategy, stages=()), batch=64,
        constants=Constants(link=0.1),
    )  # fmt: skip
    assert sum(best.stages) == 32
    assert best.step_seconds < even.step_seconds
    assert best.fits
    assert f"stages of {best.strategy.stage_words} layers" in str(found)
    again = dataclasses.asdict(best.strategy) | {"stages": [*best.strategy.stages]}
    assert Strategy(**again) == best.strategy  # as a file has it
    with pytest.raises(ValueError, match="the model has 32"):
        predict("llama-3-8b", "h100:2", Strategy(pipeline=2, stages=(16, 15)), batch=8)
    with pytest.raises(ValueError, match="stages must have a number of layers"):
        Strategy(pipeline=2, stages=(32,))


@pytest.mark.timed
@pytest.mark.nightly
def test_plans_and_predictions_are_quick():
    deep = dataclasses.replace(MODELS["llama-3-8b"], pattern=" ".join(["full"] * 48))
    assert_quick(lambda: plan(deep, "v5p:8x8x8", batch=1024), 5, rounds=5)
    assert_quick(lambda: plan("llama-3-8b", "h100:3072", batch=6144), 5, rounds=3)
    assert_quick(lambda: plan("llama-3.1-405b", "h100:3072", batch=3072), 5, rounds=3)
    predict("llama-3-8b", "h100:8", Strategy(fsdp=8), batch=8)
    batches = itertools.count(16, 8)
    assert_quick(
        lambda: predict("llama-3-8b", "h100:8", Strategy(fsdp=8), batch=next(batches)), 0.01
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": 1e9}, "nearest that works: .* GiB with"),
        ({"chips": "t4:2"}, "nearest that works"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"chips": "h100:74", "batch": 3}, "no cut divides .* nearest batch that works: 37"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(given, words):
    given = {"chips": "h100:8", "batch": 8} | given
    with pytest.raises(ValueError, match=words) as refused:
        plan("llama-3-8b", given.pop("chips"), **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reserve", [0.0, 0.1])
def test_the_memory_that_a_refusal_names_is_enough(reserve):
    """It once was what the strategy needs, of which a tenth is then kept free."""
    given = {"batch": 64, "reserve": reserve}
    with pytest.raises(ValueError, match="too little") as refused:
        plan("llama-3-8b", "h100:8", memory=1e9, **given)
    named = float(str(refused.value).split("nearest that works: ")[1].split(" GiB")[0])
    assert plan("llama-3-8b", "h100:8", memory=named * 2**30, **given).best.fits
    with pytest.raises(ValueError, match="too little"):
        plan("llama-3-8b", "h100:8", memory=(named - 0.02) * 2**30, **given)


@pytest.mark.nightly
def test_a_plan_that_fits_fits_when_compiled_for_tpus():
    """The TPU compiler's memory, without a TPU; a small model, for its compiler is slow."""
    pytest.importorskip("libtpu")
    from toolkit.looped import LoopedConfig
    from toolkit.planning.grade.by_compiler import compile_plan

    small = LoopedConfig(
        vocabulary=4096, width=512, pattern="full full", heads=4, residual_gate=False,
        dtype="bfloat16",
    )  # fmt: skip
    words = compile_plan(plan(small, "v5e:2x2", batch=8, sequence_length=512))
    assert ", fits; predicted" in words


def test_only_tpus_are_compiled_for():
    from toolkit.planning.grade.by_compiler import compile_plan

    with pytest.raises(ValueError, match="want a TPU topology"):
        compile_plan(plan("llama-3.2-1b", "h100:8", batch=8))
