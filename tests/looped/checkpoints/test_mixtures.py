"""Published mixtures of experts, read from their files, against Hugging Face transformers.

Tiny models with random weights: logits, 20 tokens written greedily after our own file was written
and read, the other spelling of tensors' names, and what is refused.
"""

import weakref
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest
from their_models import (
    IDS,
    TOLERANCE,
    check_reading,
    described,
    error_of,
    logits_of,
    made,
    some_tokens,
)
from tiers import by_night

from toolkit.looped import load_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.families.recurrent import RECURRENT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SIZES_OF_OURS = (
    "vocabulary", "width", "pattern", "heads", "feed_forward", "feed_forwards", "rope_theta",
    "norm_epsilon", "tied_embedding", "options",
)  # fmt: skip
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    **IDS,
}
QWEN = {
    "num_experts": 8,
    "head_dim": 16,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.25,
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
}
GROUPED = {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
MODELS = {
    "deepseek_v2": ("DeepseekV2", GROUPED),
    "deepseek_v2 lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "kimi_k2": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-3},
    ),
    "glm4_moe plain": ("Glm4Moe", {"n_routed_experts": 8, "head_dim": 12}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "head_dim": 8,
            "intermediate_size": 20,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**QWEN, "intermediate_size": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_next": ("Qwen3Next", {**QWEN, "decoder_sparse_step": 2}),
}
BY_DAY = {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next"}


def published(name, folder):
    """A random model of theirs, saved as its authors would."""
    style, sizes = MODELS[name]
    suffix = "TextConfig" if style == "Qwen3_5Moe" else "Config"
    given = {key: value for key, value in (SIZES | sizes).items() if value is not None}
    if name == "deepseek_v2 lite":
        given["q_lora_rank"] = None
    model = made(style, given, suffix)
    model.save_pretrained(folder)
    if name == "kimi_k2":  # which has the modules of DeepSeek-V3, and a `model_type` of its own
        described(folder, model_type="kimi_k2")
    return model


@pytest.mark.parametrize("name", by_night({*MODELS} - BY_DAY, MODELS))
def test_logits_and_written_tokens_of_transformers(name, tmp_path):
    model = check_reading(published(name, tmp_path), tmp_path)
    assert "moe" in model.config.feed_forward_words


@pytest.mark.parametrize("name", by_night({*MODELS} - {"mixtral", "deepseek_v3"}, MODELS))
def test_the_spelling_of_a_state_dict(name, tmp_path):
    """With all experts in one tensor, as some published files have them too."""
    theirs, tokens = published(name, tmp_path), some_tokens()
    tensors = {
        key: value.numpy() for key, value in theirs.state_dict().items() if "inv_freq" not in key
    }
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    safetensors.save_file(
        {k: torch.tensor(v) for k, v in tensors.items()}, tmp_path / "m.safetensors"
    )
    assert error_of(load_checkpoint(tmp_path), tokens, logits_of(theirs, tokens)) <= TOLERANCE


class Counting(Mapping):
    """Tensors made when asked for, which counts those of experts that are alive."""

    def __init__(self, tensors):
        self.tensors, self.alive, self.most = tensors, [], 0

    def __getitem__(self, name):
        made = self.tensors[name].copy()
        if ".experts." in name:
            self.alive = [*(ref for ref in self.alive if ref() is not None), weakref.ref(made)]
            self.most = max(self.most, len(self.alive))
        return made

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_one_expert_at_a_time_is_in_memory(tmp_path):
    published("qwen3_moe", tmp_path)
    wanted = load_checkpoint(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    source = Counting({name: tensor.numpy() for name, tensor in tensors.items()})
    sizes = {field: getattr(wanted.config, field) for field in SIZES_OF_OURS}
    model = load_checkpoint(source, style="qwen3_moe", **sizes)
    assert model.config.moe == wanted.config.moe
    assert source.most <= 2  # of 48, and no two that are read: the one before lives while it waits
    tokens = jnp.asarray(some_tokens())
    np.testing.assert_array_equal(model(tokens), wanted(tokens))


def test_layers_that_guess_further_tokens_are_passed_over(tmp_path):
    theirs, tokens = published("deepseek_v3", tmp_path), some_tokens()
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
    safetensors.save_file(tensors, file)
    described(tmp_path, num_nextn_predict_layers=1)
    assert error_of(load_checkpoint(tmp_path), tokens, logits_of(theirs, tokens)) <= TOLERANCE
    described(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"unused model.layers.3.eh_proj.weight"):
        load_checkpoint(tmp_path)


def change(folder, **changed):
    file = folder / "model.safetensors"
    tensors = safetensors.load_file(file)
    for name in [name for name, value in changed.items() if value is None]:
        del tensors[name.replace("__", ".")]
    added = {k.replace("__", "."): v for k, v in changed.items() if v is not None}
    safetensors.save_file(tensors | added, file)


LAYER = "model__layers__1__"
SCALES = {f"{LAYER}mlp__experts__0__up_proj__weight_scale_inv": torch.ones(1)}
BLOCKS = {f"{LAYER}mlp__experts__gate_up_proj_blocks": torch.ones(1)}


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({f"{LAYER}mlp__experts__7__up_proj__weight": None}, {}, "missing .*experts.7.up_proj"),
        (SCALES, {}, "quantised in FP8 .*weight_scale_inv"),
        (BLOCKS, {}, "quantised in MXFP4 .*gate_up_proj_blocks"),
        ({}, {"quantization_config": {"quant_method": "awq"}}, "quantised by AWQ"),
        ({}, {"num_experts_per_tok": None}, "does not say 'num_experts_per_tok'"),
        ({}, {"num_experts_per_tok": 9}, "moe.chosen must be at most the 8 experts; got 9"),
        ({}, {"moe_intermediate_size": 21}, "the configuration is not that of the checkpoint"),
        ({}, {"model_type": "qwen3"}, "a mixture of experts .*style 'qwen3' are not; those of"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(changed, settings, message, tmp_path):
    published("qwen3_moe", tmp_path)
    if changed:
        change(tmp_path, **changed)
    described(tmp_path, **settings)
    with pytest.raises(ValueError, match=message) as refusal:
        load_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


def test_settings_that_no_layer_has_are_refused(tmp_path):
    published("olmoe", tmp_path)
    described(tmp_path, clip_qkv=8.0)
    with pytest.raises(ValueError, match=r"clip_qkv 8\.0"):
        load_checkpoint(tmp_path)


def test_every_family_with_experts_is_tried():
    tried = {name.split()[0] for name in MODELS}
    families = {
        name
        for name, family in FAMILIES.items()
        if family.router is not None and name not in RECURRENT  # test_recurrent_families.py
    }
    # test_deepseek_v4.py and test_inkling2.py try these.
    elsewhere = {"deepseek_v4", "inkling2_loop", "inkling2_loop_text"}
    assert families - {"qwen3_5_moe_text", *elsewhere} == tried
