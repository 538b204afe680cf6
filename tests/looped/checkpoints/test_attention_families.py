"""Published models of attention alone, there and back, against Hugging Face transformers.

Tiny models with random weights: logits, 20 tokens written greedily with our caches, what we write
for transformers, and the same numbers when that is read again. Every family has a change of our
configuration that must show, and every setting of its config.json is moved: what moves their logits
moves ours alike, or is refused.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from their_models import (
    IDS,
    TOLERANCE,
    check_there_and_back,
    error_of,
    logits_of,
    made,
    some_tokens,
)
from tiers import by_night

from toolkit.looped import load_checkpoint, prefill, save_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.families.attention import ATTENTION
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import ARCHITECTURES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SHOWS = 1e-3  # of the largest logit: what a change moves them at least
LONGEST = 64
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    **IDS,
}
TYPES = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 300.0}
CAPS = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA = {**CAPS, "head_dim": 12, "sliding_window": 5, "rope_parameters": ROPE, "layer_types": TYPES}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.5,
    "logits_scaling": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


class Case(NamedTuple):
    """Settings of a tiny model, and a change of ours that must show."""

    settings: dict[str, Any]
    change: dict[str, Any]


def partial(fraction):
    return {"head_dim": 12, "rope_parameters": ROPE | {"partial_rotary_factor": fraction}}


def option(word, **options):
    return {"options": {word: options}}


CASES = {
    "arcee": Case({}, option("mlp", activation="relu")),
    "cohere": Case({"logit_scale": 0.8}, {"head_scale": 1.0}),
    "cohere2": Case({"sliding_window": 5, "logit_scale": 0.8}, option("window", sliding_window=6)),
    "ernie4_5": Case({"use_bias": True, "head_dim": 12}, {"rope_theta": 400.0}),
    "exaone4": Case({"sliding_window": 5}, option("window", sliding_window=6)),
    "gemma": Case({"head_dim": 12}, {"embedding_scale": 1.0}),
    "gemma2": Case(GEMMA, {"head_soft_cap": None}),
    "gemma3_text": Case(
        GEMMA | {"rope_parameters": TWO_ROPES, "attn_logit_softcapping": None},
        option("full", rotary_rule="llama3"),
    ),
    "glm": Case(partial(0.5), option("full", rotary_fraction=1.0)),
    "glm4": Case(partial(2 / 3), option("full", rotary_fraction=1 / 3)),
    "gpt_neox": Case({"num_key_value_heads": 4}, option("mlp", activation="relu")),
    "granite": Case(
        MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}, {"residual_scale": 1.0}
    ),
    "helium": Case({"head_dim": 8}, {"rope_theta": 400.0}),
    "jais2": Case({}, {"norm_epsilon": 0.1}),
    "minicpm3": Case(LATENT | {"scale_emb": 3, "dim_model_base": 16}, {"residual_scale": 1.0}),
    "ministral": Case(
        {"head_dim": 12, "sliding_window": 5, "layer_types": TYPES},
        option("window", sliding_window=6),
    ),
    "nemotron": Case({}, option("full", rotary_fraction=1.0)),
    "olmo2": Case({"attention_bias": True}, {"norm_epsilon": 0.1}),
    "olmo3": Case({"sliding_window": 5}, option("window", sliding_window=6)),
    "phi": Case({}, {"rope_theta": 40.0}),
    "phi3": Case(partial(0.5) | {"sliding_window": 5}, option("window", rotary_fraction=1.0)),
    "seed_oss": Case({"head_dim": 12, "attention_out_bias": True}, {"rope_theta": 400.0}),
    "smollm3": Case({"rope_parameters": ROPE, "attention_bias": True}, {"rope_theta": 30.0}),
    "stablelm": Case(
        {"use_qkv_bias": True, "use_parallel_residual": True}, option("full", rotary_fraction=1.0)
    ),
    "starcoder2": Case({"sliding_window": 5}, option("window", sliding_window=6)),
    "vaultgemma": Case(GEMMA, option("full", logits_soft_cap=None)),
}
BY_DAY = {"gemma2", "granite", "phi3"}


def published(style, folder, **settings):
    """A random model of theirs, saved as its authors would."""
    settings = CASES[style].settings | settings if style in CASES else settings
    suffix = "TextConfig" if style.endswith("_text") else "Config"
    model = made(ARCHITECTURES[style], SIZES | settings, suffix)
    model.save_pretrained(folder)
    return model


def test_every_family_has_a_case():
    assert set(CASES) == set(ATTENTION)


@pytest.mark.parametrize("style", by_night({*CASES} - BY_DAY, CASES))
def test_there_and_back(style, tmp_path):
    theirs, tokens = published(style, tmp_path), some_tokens()
    check_there_and_back(theirs, tmp_path, style)
    changed = load_checkpoint(tmp_path, **CASES[style].change)
    assert error_of(changed, tokens, logits_of(theirs, tokens)) > SHOWS


ROPES = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    "yarn of two": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("name", by_night({*ROPES} - {"longrope", "yarn"}, ROPES))
def test_rotary_rules(name, tmp_path):
    rope = ROPE | ROPES[name] | {"rope_type": name.split()[0]}
    settings = {"head_dim": 8, "sliding_window": 5, "rope_parameters": rope}
    if name == "longrope":
        settings["original_max_position_embeddings"] = 32
    style = "phi3" if name == "longrope" else "mistral"
    theirs = published(style, tmp_path, **settings)
    tokens, model = some_tokens(), load_checkpoint(tmp_path)
    wanted = logits_of(theirs, tokens)
    assert error_of(model, tokens, wanted) <= TOLERANCE
    longest = model.config.window.longest
    plain = load_checkpoint(tmp_path, options={"window": {"rotary_factor": None,
        "rotary_divisors": None, "rotary_amplitude": None}})  # fmt: skip
    assert (error_of(plain, tokens, wanted) > SHOWS) == (name != "dynamic")
    assert longest == {"dynamic": LONGEST, "longrope": 32}.get(name)
    if longest is not None:
        with pytest.raises(ValueError, match=f"{longest + 1} tokens are more than window.longest"):
            jax.eval_shape(model, jnp.zeros((1, longest + 1), int))
        with pytest.raises(ValueError, match=r"window\.longest"):
            prefill(model, jnp.zeros((1, 3), int), longest + 1)
        with pytest.raises(ValueError, match="cannot express window"):
            save_checkpoint(model, tmp_path / "ours", style=style)


def moved(name, value):
    """Other values of a setting."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value + (1 if isinstance(value, int) else 0.5), None]
    if value is None:
        return [True, 2]
    if name == "rope_parameters":
        inner = [(key, other) for key, own in value.items() for other in moved(key, own)]
        inner += [("partial_rotary_factor", 0.5)] if "rope_theta" in value else []
        return [{**value, key: other} for key, other in inner]
    return ["gelu", None] if name in ("hidden_act", "hidden_activation") else []


@pytest.mark.parametrize(
    "style", by_night({*CASES, "qwen3"} - {"granite"}, [*CASES, "llama", "qwen3"])
)
def test_no_setting_is_misread(style, tmp_path):
    """Whatever one setting of config.json becomes: our logits are theirs, or it is refused."""
    theirs, tokens = published(style, tmp_path), some_tokens()
    file = tmp_path / "config.json"
    settings, state = json.loads(file.read_text()), theirs.state_dict()
    found_of: dict[str, np.ndarray] = {}
    followed, refused = set(), set()

    def ours():
        fields = repr(fields_of(FAMILIES[style], json.loads(file.read_text())))
        if fields not in found_of:
            with jax.disable_jit():
                found_of[fields] = np.asarray(load_checkpoint(tmp_path)(jnp.asarray(tokens)))
        return found_of[fields]

    before = logits_of(theirs, tokens)
    for name, value in theirs.config.to_dict().items():
        if name in ("tie_word_embeddings", "model_type"):  # which say what there is to read
            continue
        for other in moved(name, value):
            changed = {**settings, name: other}
            file.write_text(json.dumps(changed))
            try:
                found = ours()
            except ValueError:
                refused.add(name)
                continue
            try:
                config = transformers.AutoConfig.from_pretrained(tmp_path)
                config._attn_implementation = "eager"
                model = type(theirs)(config).eval()
                model.load_state_dict(state)
                wanted = logits_of(model, tokens)
            except Exception:
                continue
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error <= TOLERANCE, (name, value, other)
            if np.abs(wanted - before).max() > SHOWS * np.abs(wanted).max():
                followed.add(name)
    assert followed
    assert len(refused) >= 3, refused
