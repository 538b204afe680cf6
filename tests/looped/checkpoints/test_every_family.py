"""Every family with switches that its files may or may not have: what is written is what we have.

A model of each family gets a part of its heads' channels turned, biases of attention, and the other
kind of head, one after the other. `save_checkpoint` refuses it, or transformers reads the same
model from what was written, and so do we, to the bit.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from test_absent_settings import TRIED
from their_models import IDS, TOLERANCE, assert_same_parameters, error_of, logits_of, some_tokens
from tiers import by_night

from toolkit.looped import LoopedConfig, LoopedLM, load_checkpoint, save_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES, SOFTMAX
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import ARCHITECTURES

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

BY_DAY = {"glm", "helium", "llama"}
CHANGES = {
    "a part of the channels turned": {"rotary_fraction": 0.5},
    "biases": {"projection_biases": True, "output_bias": True},
    "biases of queries, keys and values": {"projection_biases": True},
    "the other head": {},
}


def configuration(name):
    """Ours, of the family's tiny model."""
    made, sizes = TRIED[name]
    suffix = next(s for s in ("TextConfig", "Config") if hasattr(transformers, made + s))
    settings = getattr(transformers, made + suffix)(**sizes).to_json_string()
    return LoopedConfig(**fields_of(FAMILIES[name.split()[0]], json.loads(settings)))


def changed(config, change):
    """None where the model has no such layer, or is so already."""
    if not CHANGES[change]:
        return dataclasses.replace(config, tied_embedding=not config.tied_embedding)
    words = [word for word in SOFTMAX[:2] if word in config.layers]
    other = config.with_options(**dict.fromkeys(words, CHANGES[change]))
    return None if other == config else other


def test_the_families_that_a_small_change_reads_are_among_those_tried():
    """Each is read from a file of transformers; RWKV-7, which it lacks, in test_rwkv7.py."""
    wanted = (
        "olmo2 olmo3 smollm3 gemma2 gemma3_text phi3 granite granitemoehybrid glm4 seed_oss "
        "ministral minicpm3 mamba2 falcon_h1 nemotron_h kimi_linear minimax lfm2"
    )
    assert {*wanted.split()} <= {name.split()[0] for name in TRIED}
    assert len(TRIED) >= 42


def random_model(config):
    model, draw = LoopedLM(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        is_scale, spread = len(parameter.shape) == 1, 1.0 if "embedding" in path[-1] else 0.2
        parameter[...] = parameter[...] * is_scale + spread * draw.normal(size=parameter.shape)
    return model


def refusal_of(model, folder, style):
    try:
        save_checkpoint(model, folder, style=style, settings=IDS)
    except ValueError as refusal:
        return str(refusal)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", by_night({*TRIED} - BY_DAY, TRIED))
def test_a_switch_is_written_or_refused(name, change, tmp_path):
    config, style = changed(configuration(name), change), name.split()[0]
    style = style if style in ARCHITECTURES else f"{style}_text"
    if config is None:
        return
    model, folder = random_model(config), tmp_path / "theirs"
    if (refusal := refusal_of(model, folder, style)) is not None:
        assert "\n" not in refusal
        assert style in refusal or "config.json" in refusal
        return
    again = load_checkpoint(folder)
    assert again.config.tied_embedding == config.tied_embedding
    assert_same_parameters(model, again)
    if style not in transformers.CONFIG_MAPPING:  # Kimi K2 comes with its own modelling file
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    tokens = some_tokens()
    assert error_of(again, tokens, logits_of(theirs, tokens)) <= TOLERANCE
    jax.clear_caches()
