"""Configurations: readable refusals, derived sizes, parameters counted without allocating."""

import copy
import dataclasses
import json
import re

import jax
import pytest
from flax import nnx

from toolkit.attention import MIXERS
from toolkit.looped import PRESETS, LoopedConfig, LoopedLM, match_parameters, parameter_count
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.attention import AttentionLayer
from toolkit.looped.mixing.layer import LayerOptions
from toolkit.looped.mixing.linear.delta import DeltaOptions, GatedDeltaNetLayer

PATTERNS = ("full", "window full", "gdn gdn full", " ".join(MIXERS))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("pattern", "gdn mamba", ["'mamba'", "full, window"]),
        ("pattern", " ", ["no layer"]),
        ("width", 130, ["130", "divisible", "heads 4"]),
        ("loops", 0, ["loops", "0", "at least 1"]),
        ("loops", 1.5, ["loops", "1.5"]),
        ("options", {"full": {"key_value_heads": 3}}, ["heads 4", "full.key_value_heads 3"]),
        ("options", {"gdn": {"value_heads": 6}}, ["gdn.value_heads 6", "multiple"]),
        ("options", {"delta_product": {"steps": 0}}, ["delta_product.steps", "0", "at least 1"]),
        ("options", {"full": {"head_size": 7}}, ["full.head_size is 7", "even"]),
        ("options", {"mamba": {}}, ["unknown layer 'mamba'", "mamba2"]),
        ("options", {"gdn": {"steps": 2}}, ["gdn.steps", "convolution_size"]),
        ("options", {"gdn": 3}, ["'gdn'", "3", "DeltaOptions"]),
        ("dtype", "float8", ["float8", "float16", "bfloat16"]),
        ("dtype", "float64", ['dtype is "float64"', "jax_enable_x64"]),
        ("norm_epsilon", 0.0, ["norm_epsilon", "positive"]),
        ("norm_epsilon", float("inf"), ["norm_epsilon", "finite", "inf"]),
        ("rope_theta", None, ["rope_theta", "finite", "None"]),
        ("tied_embedding", "no", ["tied_embedding", "True or False", "'no'"]),
        ("options", {"full": {"output_gate": "no"}}, ["full.output_gate", "'no'"]),
        ("options", {"gdn": {"convolution_size": 10**6}}, ["gdn.convolution_size", "256"]),
        ("feed_forward", -1, ["feed_forward", "at least 1", "-1"]),
        ("feed_forward", "8", ["feed_forward", "an int or None", "'8'"]),
    ],
)
def test_bad_fields_are_named(field, value, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        LoopedConfig.tiny(**{field: value})
    for word in words:
        assert word in str(error.value)


def test_default_sizes_follow_the_papers_rules():
    recipe = LoopedConfig(width=1024, heads=8)
    assert recipe.feed_forward_size == 2816
    assert AttentionLayer.sizes_of(recipe) == (8, 8, 128)
    assert GatedDeltaNetLayer.sizes_of(recipe) == (8, 8, 96, 192)
    assert dataclasses.replace(recipe, width=2048).feed_forward_size == 5632


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"options": {"full": {"output_gate": True, "key_value_heads": 2, "head_size": 16}}},
        {
            "residual_gate": False,
            "options": {"gdn": {"value_heads": 8, "key_size": 24, "value_size": 40}},
        },
    ],
)
def test_parameter_count_equals_the_arrays(pattern, switches):
    config = LoopedConfig.tiny(pattern, loops=3, **switches)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(array.size for array in arrays)


def test_options_are_those_of_the_layers():
    config = LoopedConfig.tiny("gdn full", options={"gdn": {"key_size": 24}})
    assert config.gdn == DeltaOptions(key_size=24)
    assert config == LoopedConfig.tiny("gdn full", options={"gdn": DeltaOptions(key_size=24)})
    assert hash(config) == hash(LoopedConfig.tiny("gdn full").with_options(gdn={"key_size": 24}))
    assert config.full == LAYERS["full"].Options()
    assert config.mamba2.key_size == 64  # no layer of the model: its defaults
    both = config.with_options(gdn={"value_heads": 8}, full={"output_gate": True})
    assert (both.gdn.key_size, both.gdn.value_heads, both.full.output_gate) == (24, 8, True)
    # A layer that leaves takes its options along only where they say something.
    plain = LoopedConfig.tiny("full")
    assert dataclasses.replace(LoopedConfig.tiny("gdn"), pattern="full") == plain
    assert dataclasses.replace(config, pattern="full").gdn.key_size == 24
    with pytest.raises(AttributeError, match="'mamba'"):
        config.mamba  # noqa: B018
    with pytest.raises(TypeError, match="cannot change"):
        config.options["gdn"] = DeltaOptions()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_configuration_passes_through_json_and_copies(pattern):
    config = LoopedConfig.tiny(pattern, options={"gdn": {"key_size": 24}, "kda": {"heads": 2}})
    stored = json.loads(json.dumps(dataclasses.asdict(config)))
    assert set(config.layers) <= set(stored["options"])
    assert LoopedConfig(**stored) == config
    assert copy.deepcopy(config) == copy.copy(config) == config


def test_a_new_layer_brings_its_options(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class ToyOptions(LayerOptions):
        taps: int = 3

    class ToyLayer(GatedDeltaNetLayer):
        word = "toy"
        Options = ToyOptions

        @classmethod
        def sizes_of(cls, config):
            return GatedDeltaNetLayer.sizes_of(config)

    monkeypatch.setitem(LAYERS, "toy", ToyLayer)
    config = LoopedConfig.tiny("toy full", options={"toy": {"taps": 5}})
    assert config.toy.taps == 5
    assert LoopedConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(ValueError, match=r"toy\.taps must be at least 1; got 0"):
        config.with_options(toy={"taps": 0})


def test_loops_share_parameters():
    once, often = (LoopedConfig.tiny("gdn full", loops=loops) for loops in (1, 7))
    assert parameter_count(often) - parameter_count(once) == 6 * once.width
    ungated = [dataclasses.replace(c, residual_gate=False) for c in (once, often)]
    assert parameter_count(ungated[0]) == parameter_count(ungated[1])


def test_published_size():
    # LT2 reports its 1B full and hybrid models as about 1.3B and 1.5B parameters.
    assert 1.25e9 < parameter_count(PRESETS["lt2-looped-1.3b"]) < 1.5e9
    assert 1.35e9 < parameter_count(PRESETS["lt2-hybrid-1.3b"]) < 1.55e9


def test_match_parameters():
    plain = LoopedConfig.tiny("full full full full full")
    target = parameter_count(plain)
    for pattern in ("gdn gdn gdn gdn full", "gdn", "full full full full full full"):
        loops = LoopedConfig.tiny(pattern, loops=4)
        matched = match_parameters(loops, plain)
        assert abs(parameter_count(matched) / target - 1) <= 0.01
        assert matched == dataclasses.replace(loops, feed_forward=matched.feed_forward)
        assert match_parameters(loops, target) == matched
    with pytest.raises(ValueError, match="change width or pattern"):
        match_parameters(plain, 1000)
