"""Published models with recurrent layers, there and back, against Hugging Face transformers.

Tiny models with random weights, whose own code runs in PyTorch without kernels: logits, 20 tokens
written greedily with our caches after our own file was written and read, what we write for
transformers, and the same numbers when that is read again. Every family has switches whose other
position must show.
"""

import json
from typing import Any

import pytest
from their_models import (
    IDS,
    assert_same_parameters,
    check_there_and_back,
    described,
    error_of,
    logits_of,
    made,
    some_tokens,
)
from tiers import by_night

from toolkit._compat import set_value
from toolkit.looped import load_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.families.recurrent import RECURRENT
from toolkit.looped.checkpoints.reading import fields_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SHOWS = 1e-4  # of the largest logit: what another position of a switch moves them at least
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    **IDS,
}
KIMI = {
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "rms_norm_eps": 1e-3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LFM2 = {
    "intermediate_size": 70,
    "block_multiple_of": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_eps": 1e-3,
    "conv_L_cache": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "layer_types": ["conv", "full_attention", "conv"],
}
# Decay rates of which no chunked form loses digits; three heads to a group.
MAMBA2 = {
    "num_heads": 6,
    "head_dim": 16,
    "expand": 3,
    "n_groups": 2,
    "state_size": 8,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-3,
    "chunk_size": 8,
}
GRANITE = {
    "intermediate_size": 20,
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 3,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_d_conv": 3,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MINIMAX = {
    "intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "block_size": 4,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **dict.fromkeys(
        ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), 1.7
    ),
    **dict.fromkeys(("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"), 0.8),
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 3,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-3,
    "time_step_min": 0.8,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
FALCON = {
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.8, 1.1],
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
}
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("FalconH1", FALCON),
    "falcon_h1 normed": ("FalconH1", FALCON | NORMED),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "nemotron_h experts": ("NemotronH", NEMOTRON | NEMOTRON_EXPERTS),
    "nemotron_h latent experts": (
        "NemotronH",
        NEMOTRON | NEMOTRON_EXPERTS | {"moe_latent_size": 24},
    ),
    "minimax": ("MiniMax", MINIMAX),
    "kimi_linear": ("KimiLinear", KIMI),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "granitemoehybrid dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 biases": ("Lfm2", {**LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "mamba2": ("Mamba2", MAMBA2),
    "kimi_linear grouped": (
        "KimiLinear",
        {**KIMI, "q_lora_rank": 12, "num_expert_group": 4, "topk_group": 2},
    ),
}
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "granitemoehybrid": [
        {"embedding_scale": 1.0},
        {"residual_scale": 0.3},
        {"options": {"nope": {"score_scale": None}}},
        {"options": {"moe": {"normalise": False}}},
    ],
    "granitemoehybrid dense": [{"rope_theta": 1e4}, {"head_scale": 1.0}],
    "kimi_linear": [
        {"options": {"mla": {"rotary": True}}},
        {"options": {"mla": {"latent_epsilon": 1e-3}}},
        {"options": {"kda": {"negative_eigenvalues": True}}},
        {"options": {"moe": {"scale": 1.0}}},
    ],
    "lfm2": [{"rope_theta": 1e4}, {"options": {"full": {"rotary_fraction": 0.5}}}],
    "mamba2": [{"norm_epsilon": 1e-6}],
    "falcon_h1": [
        {"embedding_scale": 1.0},
        {"head_scale": 1.0},
        {"rope_theta": 1e4},
        {"norm_epsilon": 1e-5},
    ],
    "nemotron_h": [
        {"options": {"mamba2": {"shortest_step": 0.0}}},
        {"options": {"mlp": {"activation": "relu"}}},
        {"norm_epsilon": 1e-5},
    ],
    "nemotron_h latent experts": [
        {"options": {"moe": {"scale": 1.0}}},
        {"options": {"moe": {"normalise": False}}},
        {"options": {"moe": {"groups": 1, "chosen_groups": 1}}},
    ],
    "minimax": [
        {"carry_norm": False},
        {"stream_scale": 1.0},
        {"residual_scale": 1.0},
        {"options": {"full": {"rotary_fraction": 0.5}}},
    ],
}
BY_DAY = {"granitemoehybrid", "kimi_linear", "lfm2", "nemotron_h latent experts"}


def published(name, folder):
    """A random model of theirs, saved as its authors would."""
    model = made(MODELS[name][0], SIZES | MODELS[name][1])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", by_night({*MODELS} - BY_DAY, MODELS))
def test_there_and_back(name, tmp_path):
    theirs = published(name, tmp_path)
    model, again = check_there_and_back(theirs, tmp_path, name.split()[0])
    assert again.config == model.config


@pytest.mark.parametrize("name", by_night({*SWITCHES} - BY_DAY, SWITCHES))
def test_another_position_of_a_switch_shows(name, tmp_path):
    """So that equal logits mean that these are right."""
    theirs, tokens = published(name, tmp_path), some_tokens()
    wanted = logits_of(theirs, tokens)
    for fields in SWITCHES[name]:
        other = load_checkpoint(tmp_path, **fields)
        assert error_of(other, tokens, wanted) > SHOWS, fields
    other = load_checkpoint(tmp_path)
    for part in ("log_rate", "skip", "step_bias"):
        if (own := getattr(other.blocks[0].mixer, part, None)) is not None:
            before = own[...]
            set_value(own, before + 0.1)
            assert error_of(other, tokens, wanted) > SHOWS, part
            set_value(own, before)
    if (rates := getattr(other.blocks[0].mixer, "log_decay", None)) is not None:
        other.blocks[0].mixer.log_decay = tuple(0.9 * rate for rate in rates)
        assert error_of(other, tokens, wanted) > SHOWS


LINEAR = {
    "full_attn_layers": [2],
    "kda_layers": [1, 3],
    "head_dim": 8,
    "num_heads": 3,
    "short_conv_kernel_size": 4,
}


def test_kimi_linear_as_it_is_published(tmp_path):
    """Layers in groups and counted from 1; the dense layer's names begin with "mlp"."""
    published("kimi_linear", tmp_path)
    wanted = load_checkpoint(tmp_path)
    names = ("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    absent = dict.fromkeys((*names, "mlp_layer_types"), "absent")
    described(tmp_path, **absent, linear_attn_config=LINEAR, mla_use_nope=True, rope_theta=1e4)
    file = tmp_path / "model.safetensors"
    dense = {
        name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(dense, file)
    again = load_checkpoint(tmp_path)
    assert again.config == wanted.config
    assert_same_parameters(again, wanted)


REFUSED = [
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False; known is True"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'softmax'; known is 'sigmoid'"),
    (
        "kimi_linear",
        {"gate_lower_bound": -5.0},
        "gate_lower_bound -5.0, which models of this family do not have",
    ),
    ("kimi_linear", {"linear_num_heads": "absent"}, "does not say 'linear_num_heads'"),
    ("kimi_linear", {"layer_types": ["conv"] * 3}, "layer_types 'conv'; known are 'linear_atten"),
    ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads 2; known is num_attention"),
    ("kimi_linear", {"linear_attn_config": LINEAR | {"kda_layers": [1]}}, "layers 1 to 3, each"),
    ("minimax", {"mlp_alpha_factor": 2.0}, "mlp_alpha_factor 2.0; known is full_attn_alpha_factor"),
    ("minimax", {"sliding_window": 4}, "sliding_window 4; known is None"),
    (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe"], "mlp_bias": True},
        "mlp_bias",
    ),
    ("nemotron_h", {"layers_block_type": ["mlp"]}, "layer 'mlp', which follows no mixer"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate True; known is False"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias True; known is False"),
    ("falcon_h1", {"mamba_d_ssm": 32}, "mamba_d_ssm 32; mamba_n_heads are 4"),
    ("nemotron_h", {"use_bias": True}, "use_bias True; known is False"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\]; known is"),
    ("mamba2", {"expand": 2}, "an expand other than num_heads head_dim / hidden_size, 96 / 32"),
    ("mamba2", {"use_conv_bias": False}, "use_conv_bias False; known is True"),
    ("mamba2", {"num_heads": "6"}, "does not say 'num_heads' in a whole number"),
    ("mamba2", {"rms_norm": False}, "rms_norm False, which models of this family do not have"),
    ("lfm2", {"conv_dim": 16}, "conv_dim 16; known is 32"),
    ("lfm2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "of its YaRN in a num"),
    ("lfm2", {"sliding_window": 5}, "sliding_window 5, which models of this family do not have"),
    ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias True; known is False"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ("granitemoehybrid", {"mamba_d_head": 8}, "mamba_d_head 8 and mamba_n_heads 4, which do not"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_what_a_family_does_not_know_is_refused(name, settings, message):
    made, sizes = MODELS[name]
    known = getattr(transformers, f"{made}Config")(**SIZES | sizes).to_diff_dict() | settings
    said = {name: value for name, value in known.items() if value != "absent"}
    with pytest.raises(ValueError, match=message) as refusal:
        fields_of(FAMILIES[name], said)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("style", ["apertus", "bloom"])
def test_families_that_are_not_read_say_why(style, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": style}))
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"style '{style}' are not read: its ") as refusal:
        load_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


PUBLISHED_LFM2 = {
    "tie_embedding": True,
    "block_ff_dim": 70,
    "block_ffn_dim_multiplier": 1.0,
    "block_dim": 32,
    "conv_dim": 32,
    "full_attn_idxs": [1],
    "rope_theta": 300.0,
    "block_use_swiglu": True,
    "use_pos_enc": True,
    **dict.fromkeys(
        ("tie_word_embeddings", "intermediate_size", "layer_types", "rope_parameters"), "absent"
    ),
}
PUBLISHED_GRANITE = {
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "normalization_function": "rmsnorm",
    "mamba_d_head": "auto",
    "rope_theta": 10_000,
    "rope_scaling": None,
    "init_method": "mup",
}


@pytest.mark.parametrize(
    ("name", "settings"), [("lfm2", PUBLISHED_LFM2), ("granitemoehybrid", PUBLISHED_GRANITE)]
)
def test_older_names_of_settings_say_the_same(name, settings, tmp_path):
    published(name, tmp_path)
    wanted = load_checkpoint(tmp_path).config
    described(tmp_path, **settings)
    assert load_checkpoint(tmp_path).config == wanted


def test_every_family_is_tried():
    assert {*RECURRENT} == {name.split()[0] for name in MODELS}
    assert {*RECURRENT} == {name.split()[0] for name in SWITCHES}
