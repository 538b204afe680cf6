"""Mixtures of experts: published sizes, memory and time as they must move, bad input refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from toolkit.attention.latent import PRESETS as LATENTS
from toolkit.looped import PRESETS, LoopedConfig, active_parameter_count, parameter_count
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import check_settings, settings_of
from toolkit.planning import MODELS, Constants, Strategy, cluster, plan, plan_decode, predict
from toolkit.planning.decode.cuts import Degrees
from toolkit.planning.decode.latent import ELSEWHERE
from toolkit.planning.decode.mixtures import mixture_cost, touched_experts
from toolkit.planning.mixtures import dropped_share

# Parameters, and those that a token passes, of the models of transformers 5.24 with the sizes of
# the released config.json files, built without memory (device "meta").
PUBLISHED = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "kimi-k2": (1_026_408_209_408, 32_861_477_888),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
}
# What their authors say, in billions: arXiv:2401.04088 (section 2), the cards of Qwen3-30B-A3B and
# Qwen3-235B-A22B, arXiv:2412.19437, arXiv:2507.20534, arXiv:2508.10925 (table 1, which does not
# count the input table as active).
SAID_BY_AUTHORS = {
    "mixtral-8x7b": (47, 13),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1000, 32),
    "gpt-oss-120b": (116.83, 5.13),
}
H100: dict[str, Any] = {"batch": 256, "sequence_length": 2048}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    config = PRESETS[name]
    assert (parameter_count(config), active_parameter_count(config)) == PUBLISHED[name]
    total, active = SAID_BY_AUTHORS[name]
    table = config.vocabulary * config.width * (name == "gpt-oss-120b")
    assert parameter_count(config) / 1e9 == pytest.approx(total, rel=0.03)
    assert (active_parameter_count(config) - table) / 1e9 == pytest.approx(active, rel=0.03)
    dense = dataclasses.replace(config, feed_forwards="swiglu", options=without_experts(config))
    assert parameter_count(dense) < 0.6 * parameter_count(config)


def without_experts(config):
    return {word: own for word, own in config.options.items() if word != "moe"}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("qwen3-235b-a22b", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "kimi_k2"),
    ],
)
def test_presets_are_what_their_checkpoints_are_read_as(name, family):
    config = PRESETS[name]
    check_settings(family, config, settings_of(family, config))
    other = config.with_options(moe={"scale": config.moe.scale + 1})
    with pytest.raises(ValueError, match=r"moe\.scale"):
        check_settings(family, other, settings_of(family, config))


def test_gpt_oss_is_what_its_config_json_says():
    """Its family is read and not written."""
    config = PRESETS["gpt-oss-120b"]
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000}
    settings = {
        "vocab_size": 201_088, "hidden_size": 2880, "num_hidden_layers": 36, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "rms_norm_eps": 1e-5,
        "rope_parameters": yarn, "tie_word_embeddings": False,
    }  # fmt: skip
    read = LoopedConfig(**fields_of(FAMILIES["gpt_oss"], settings))
    assert read.options == config.options
    assert parameter_count(read) == parameter_count(config)


@pytest.mark.parametrize(
    ("name", "latent"), [("deepseek-v3", "deepseek_v3"), ("kimi-k2", "kimi_k2")]
)
def test_latent_presets_have_the_attention_and_the_rest_that_decoding_knows(name, latent):
    attention = sum(LATENTS[latent].parameters.values()) * LATENTS[latent].layers
    assert parameter_count(PRESETS[name]) == pytest.approx(attention + ELSEWHERE[latent], rel=1e-6)


def test_experts_are_cut_as_the_formulas_say():
    """Per chip: 3 D F E / n numbers of experts per layer, whatever else is cut."""
    config = PRESETS["qwen3-30b-a3b"]
    experts = 48 * 3 * 2048 * 768 * 128
    found = {
        cut: predict(config, "h100:64", cut, **H100).memory.parameters
        for cut in (
            Strategy(data=64),
            Strategy(data=8, fsdp=8, expert=8),
            Strategy(data=64, expert=64),
            Strategy(fsdp=16, tensor=4, expert=4),
        )
    }
    rest = parameter_count(config) - experts
    whole, eighth, each, folded = found.values()
    assert whole == 4 * parameter_count(config)
    assert each == 4 * (rest + experts / 64)
    # With fsdp 8 the rest is cut too, but for norms; with fsdp beside tensor all of both.
    assert eighth == pytest.approx(4 * (rest + experts) / 8, rel=0.01)
    assert folded == pytest.approx(4 * (rest + experts) / 64, rel=0.01)


def test_a_step_grows_with_the_load_of_the_busiest_chip():
    cut = Strategy(data=8, fsdp=8, expert=8, dispatch="gather", recompute="layer")
    seconds = [
        predict("qwen3-30b-a3b", "h100:64", cut, constants=Constants(imbalance=load), **H100)
        for load in (1.0, 1.5, 3.0)
    ]
    even, more, most = (
        sum(each.seconds[part] for part in ("forward", "backward", "recomputed"))
        for each in seconds
    )
    # Products, and what a row of the experts reads and writes, four times over.
    flops, moved = (
        6 * 2048 * 768 / (9.89e14 * 0.8 * 0.3),
        2 * (5 * 768 + 4 * 2048) / (3.35e12 * 0.6),
    )
    routed = 4 * 256 * 2048 / 64 * 8 * 48 * (flops + moved)
    assert more - even == pytest.approx(0.5 * routed, rel=0.05)
    assert most - even == pytest.approx(2 * routed, rel=0.05)
    assert "3 times the mean load" in str(seconds[-1])
    # Slots are computed whether full or not; what is too much for them is dropped.
    slots = dataclasses.replace(cut, dispatch="all_to_all")
    same = [
        predict("qwen3-30b-a3b", "h100:64", slots, constants=Constants(imbalance=load), **H100)
        for load in (1.0, 3.0)
    ]
    assert same[0].step_seconds == same[1].step_seconds
    assert "find it full at an even load" in str(same[0])


def test_capacity_is_computed_and_sent():
    found = [
        predict("qwen3-30b-a3b", "h100:8", Strategy(fsdp=8, expert=8, capacity=each), batch=16)
        for each in (1.0, 2.0)
    ]
    sent = [
        sum(t.total for t in each.transfers if t.part == "expert" and t.kind == "all-to-all")
        for each in found
    ]
    assert sent[1] == 2 * sent[0] == 4 * 48 * 128 * 512 * 2048 * 2 * 7 / 8
    assert found[1].seconds["forward"] > 1.3 * found[0].seconds["forward"]


@pytest.mark.parametrize("capacity", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_dropped_pairs_are_those_of_random_choices(capacity, tokens):
    config = PRESETS["qwen3-30b-a3b"]  # 8 of 128
    draws = np.random.default_rng(0).poisson(tokens * 8 / 128, 400_000)
    room = int(np.ceil(capacity * tokens * 8 / 128))
    wanted = np.maximum(draws - room, 0).sum() / draws.sum()
    found = dropped_share(config, Strategy(fsdp=8, expert=8, capacity=capacity), tokens)
    assert found == pytest.approx(wanted, abs=2e-3)


def test_few_rows_per_expert_take_the_time_to_read_the_weights():
    """3 D F E numbers of two bytes are read in each pass over few tokens."""
    rates = Constants(elementwise=1.0, launch=0.0)
    few, many = (
        predict(
            "qwen3-30b-a3b", "h100:8", Strategy(data=8), batch=8, sequence_length=length,
            constants=rates,
        )
        for length in (16, 8192)
    )  # fmt: skip
    read = 48 * 3 * 2048 * 768 * 128 * 2 / (3.35e12 * 0.8)
    assert few.seconds["forward"] == pytest.approx(read, rel=0.1)
    assert many.seconds["forward"] > 2 * read


def test_a_plan_cuts_experts_where_that_is_faster():
    found = plan("qwen3-235b-a22b", "h200:64", batch=256, sequence_length=4096)
    everyone = (found.best, *found.runners_up)
    assert any(each.strategy.expert > 1 for each in everyone)
    assert all(128 % each.strategy.expert == 0 for each in everyone)
    assert "8 of 128 experts per layer" in str(found.best)


@pytest.mark.parametrize(
    ("model", "strategy", "match"),
    [
        ("llama-3-8b", Strategy(fsdp=8, expert=8), "no mixture of experts .* works: 1$"),
        ("mixtral-8x7b", Strategy(fsdp=16, expert=16), "does not divide 8 experts.*works.*: 1$"),
        ("mixtral-8x7b", Strategy(fsdp=8, tensor=2, expert=16), "does not divide 8 .*: 2$"),
        ("deepseek-v3", Strategy(fsdp=4, tensor=2, expert=2), "cuts softmax layers only.*: 1$"),
        (
            "mixtral-8x7b",
            Strategy(fsdp=8, expert=8, recompute="layer", block_chunks=2),
            "block_chunks 2: not modelled for mixtures",
        ),
        ("mixtral-8x7b", Strategy(fsdp=8, expert=8, dispatch="ragged"), "TPUs only.*all_to_all"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(model, strategy, match):
    with pytest.raises(ValueError, match=match) as refused:
        predict(model, f"h100:{strategy.chips}", strategy, batch=strategy.batch_shards)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fsdp": 8, "expert": 3}, "got 3, nearest that works: 1$"),
        ({"fsdp": 8, "tensor": 4, "expert": 6}, "innermost.*nearest that works: 4$"),
        ({"fsdp": 8, "dispatch": "gather"}, "expert is 1"),
        ({"fsdp": 8, "expert": 8, "dispatch": "ring"}, "one of 'all_to_all', 'gather', 'ragged'"),
        ({"fsdp": 8, "expert": 8, "capacity": 0.0}, "capacity must lie in"),
        ({"fsdp": 8, "expert": 8, "capacity": float("nan")}, "capacity"),
    ],
)
def test_strategies_that_cut_experts_wrongly_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        Strategy(**fields)
    with pytest.raises(ValueError, match="imbalance"):
        Constants(imbalance=0.9)


def test_experts_touched_are_those_of_random_choices():
    rng = np.random.default_rng(0)
    for experts, chosen, rows in ((256, 8, 16), (8, 2, 1), (128, 4, 64), (4, 4, 3)):
        drawn = [
            len({*np.concatenate([rng.permutation(experts)[:chosen] for _ in range(rows)])})
            for _ in range(300)
        ]
        found = touched_experts(experts, chosen, rows)
        assert found == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize(
    ("model", "chips"), [("deepseek-v3", "h200:16"), ("gpt-oss-120b", "h100:8")]
)
def test_a_decoding_step_reads_more_experts_for_more_rows(model, chips):
    config = MODELS[model]
    plans: list[Any] = [plan_decode(model, batch, 4096, chips).chosen for batch in (1, 16, 256)]
    one, some, many = (each.expert_bytes for each in plans)
    layers, moe = config.feed_forward_words.count("moe"), config.moe
    each = 2 * 3 * config.width * moe.hidden * layers / int(chips.split(":")[1])
    assert one == pytest.approx(moe.chosen * each)
    assert one < some < many <= moe.experts * each
    assert some == pytest.approx(touched_experts(moe.experts, moe.chosen, 16) * each)
    steps = [each.step_seconds for each in plans]
    assert steps == sorted(steps)
    # A step cannot be faster than its bytes.
    assert steps[0] > one / 4.8e12
    # Treated as if every row read its own experts, sixteen rows would read several times as much.
    assert 16 * one > 1.2 * some


def step_of(*sizes, **how) -> Any:
    return plan_decode(*sizes, **how).chosen


def test_busy_experts_slow_decoding_down_and_caches_are_counted():
    even, busy = (
        step_of("deepseek-v3", 64, 4096, "h200:16", imbalance=load) for load in (1.0, 1.5)
    )
    # All experts of a chip are read at most once.
    assert even.expert_bytes < busy.expert_bytes <= 1.5 * even.expert_bytes
    long, short = (plan_decode("deepseek-v3", 64, n, "h200:32") for n in (32768, 1024))
    found = {cost.degrees: cost.cache_bytes for cost in short.costs if cost.is_exact}
    assert all(cost.cache_bytes == 32 * found[cost.degrees] for cost in long.costs if cost.is_exact)
    assert long.chosen.seconds > short.chosen.seconds
    assert long.chosen.degrees.dcp > short.chosen.degrees.dcp
    windows = plan_decode("gpt-oss-120b", 8, 65536, "h100:8").costs
    cached = next(cost for cost in windows if cost.scheme == "replicate").cache_bytes
    assert cached == 2 * 8 * (65536 + 128) / 2 * 2 * 64  # half the layers see 128 tokens


def test_experts_on_fewer_chips_are_held_more_often():
    config, where = MODELS["deepseek-v3"], cluster("h200:64")
    how: dict[str, Any] = {
        "scheme": "data",
        "slices": 1,
        "degrees": Degrees(64),
        "weights": "float8",
    }
    wide, narrow = (
        mixture_cost(config, 4096, 4096, where, expert=chips, **how) for chips in (64, 32)
    )
    each = 58 * 3 * 7168 * 2048  # of one expert in every layer
    assert narrow.memory_bytes - wide.memory_bytes == pytest.approx(256 * each / 64)
    assert narrow.expert_bytes == pytest.approx(2 * wide.expert_bytes, rel=0.01)
    assert narrow.collective_seconds < wide.collective_seconds  # a larger part stays in a node
    spare = mixture_cost(config, 4096, 4096, where, redundant=32, **how)
    assert spare.memory_bytes - wide.memory_bytes == pytest.approx(32 * each / 64)
    drafted = mixture_cost(config, 4096, 4096, where, drafted=1, accepted=0.8, **how)
    assert wide.step_seconds < drafted.step_seconds < 2 * wide.step_seconds
    assert drafted.tokens_per_second == pytest.approx(1.8 * 4096 / drafted.step_seconds)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"model": "llama-3-8b"}, "mixture of experts, or latent attention"),
        ({"model": "deepseek-v3", "other_parameters": 1.0}, "other_parameters"),
        ({"model": "deepseek-v3", "imbalance": 0.5}, "imbalance"),
        ({"model": "deepseek_v3", "imbalance": 2.0}, "imbalance"),
        ({"model": "kimi-k2", "chips": "h100:8"}, "hold no exact scheme.*nearest.*h100:32"),
    ],
)
def test_decoding_that_is_not_known_is_refused(how, match):
    given = {"batch": 1, "context": 1024, "chips": "h200:16"} | how
    with pytest.raises(ValueError, match=match) as refused:
        plan_decode(**given)
    assert "\n" not in str(refused.value)
