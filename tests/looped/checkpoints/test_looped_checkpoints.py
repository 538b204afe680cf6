"""Whole published models, read from their files: logits of a text, and of writing one.

Against Hugging Face transformers with random tiny weights; Ouro, which is not in transformers, is
restated here in PyTorch by its equations and the names of its tensors.
"""

import dataclasses
import json
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiers import by_night

from toolkit.looped import (
    PRESETS,
    LoopedConfig,
    decode_step,
    exit_probabilities,
    load_checkpoint,
    prefill,
)
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.reading import fields_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
save_file, load_file = safetensors.save_file, safetensors.load_file

# Together they compute for longer than the first tier has time.
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

LOGITS_TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
# Large enough to count, and not to magnify the float32 rounding of outputs that nearly cancel.
NORM_EPSILON = 1e-3
TIME, PROMPT = 21, 17
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": NORM_EPSILON,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Other head counts and sizes than attention, and three value heads to a key head.
QWEN = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.25,
    },
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 2,  # all of them: no layer is a mixture of experts
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 12, "rope_parameters": YARN}),
    "llama": (
        "Llama",
        {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "qwen3_next": ("Qwen3Next", {**QWEN, "mlp_only_layers": [0, 1], "num_experts": 2}),
    "qwen3_5": ("Qwen3_5", QWEN),
}


def published(style, folder, **options):
    """A random model of theirs, saved as its authors would."""
    name, sizes = MODELS[style]
    suffix = "TextConfig" if style == "qwen3_5" else "Config"
    config = getattr(transformers, name + suffix)(**SIZES | sizes | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    redraw(model.named_parameters())
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def redraw(named):
    """Weights far enough from initial values that a swapped pair would show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in named:
            centre = parameter if parameter.ndim == 1 and not name.endswith("A_log") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))


def some_tokens():
    return np.random.default_rng(0).integers(0, 61, (2, TIME))


def assert_same_text(model, tokens, wanted):
    """In one go, and a prompt followed by single tokens."""
    assert np.std(wanted) > 0.5
    np.testing.assert_allclose(
        jax.jit(type(model).__call__)(model, tokens), wanted, **LOGITS_TOLERANCE
    )
    logits, cache = prefill(model, tokens[:, :PROMPT], TIME)
    np.testing.assert_allclose(logits, wanted[:, PROMPT - 1], **LOGITS_TOLERANCE)
    for position in range(PROMPT, TIME):
        logits, cache = decode_step(model, tokens[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **LOGITS_TOLERANCE)


@pytest.mark.parametrize("style", by_night({"deepseek_v2", "mistral", "qwen2", "qwen3"}, MODELS))
def test_logits_of_transformers(style, tmp_path):
    theirs, tokens = published(style, tmp_path), some_tokens()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    assert_same_text(load_checkpoint(tmp_path), tokens, wanted)


OURO = {
    "model_type": "ouro",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": NORM_EPSILON,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
}


def ouro_tensors():
    width, hidden, vocabulary = 32, 48, 61
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "model.early_exit_gate.weight": (1, width),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (vocabulary, width),
    }
    for layer in range(2):
        here = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{here}self_attn.{name}_proj.weight"] = (width, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{here}{name}.weight": (width,), f"{here}{name}_2.weight": (width,)}
        for name in ("gate", "up"):
            shapes[f"{here}mlp.{name}_proj.weight"] = (hidden, width)
        shapes[f"{here}mlp.down_proj.weight"] = (width, hidden)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in shapes.items()
    }
    redraw(tensors.items())
    return tensors


def ouro_loops(p, tokens):
    """The paper's equations: logits after each loop, and the chance to stop there."""
    functional, heads, size, time = torch.nn.functional, 4, 8, tokens.shape[1]
    angles = torch.arange(time)[:, None] * 500.0 ** (-torch.arange(4) / 4)
    cos, sin = angles.cos(), angles.sin()
    linear = lambda x, name: x @ p[f"{name}.weight"].T  # noqa: E731
    norm = lambda x, name: (  # noqa: E731
        x * torch.rsqrt((x * x).mean(-1, keepdim=True) + NORM_EPSILON) * p[f"{name}.weight"]
    )

    def turned(x):
        first, second = x[..., :4], x[..., 4:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(x, here):
        q, k, v = (
            linear(x, f"{here}{name}_proj").reshape(2, time, heads, size).transpose(1, 2)
            for name in "qkv"
        )
        scores = turned(q) @ turned(k).transpose(-1, -2) / size**0.5
        scores += torch.full((time, time), float("-inf")).triu(1)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, time, -1)
        return linear(out, f"{here}o_proj")

    def swiglu(x, here):
        hidden = functional.silu(linear(x, f"{here}gate_proj")) * linear(x, f"{here}up_proj")
        return linear(hidden, f"{here}down_proj")

    h, stay, logits, chances = p["model.embed_tokens.weight"][tokens], 1.0, [], []
    for _ in range(3):
        for layer in range(2):
            here = f"model.layers.{layer}."
            mixed = attention(norm(h, f"{here}input_layernorm"), f"{here}self_attn.")
            h = h + norm(mixed, f"{here}input_layernorm_2")
            fed = swiglu(norm(h, f"{here}post_attention_layernorm"), f"{here}mlp.")
            h = h + norm(fed, f"{here}post_attention_layernorm_2")
        h = norm(h, "model.norm")
        logits.append(linear(h, "lm_head"))
        stop = torch.sigmoid(linear(h, "model.early_exit_gate") + p["model.early_exit_gate.bias"])
        chances.append(stay * stop[..., 0])
        stay = stay * (1 - stop[..., 0])
    chances[-1] = chances[-1] + stay
    return torch.stack(logits).numpy(), torch.stack(chances).numpy()


def test_ouro(tmp_path):
    tensors, tokens = ouro_tensors(), some_tokens()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OURO))
    wanted, chances = ouro_loops(tensors, torch.tensor(tokens))
    model = load_checkpoint(tmp_path)

    @jax.jit
    def loops(model):
        _, hidden = model(tokens, return_loops=True)
        return model.head(hidden), exit_probabilities(model, hidden)

    logits, probabilities = loops(model)
    np.testing.assert_allclose(logits, wanted, **LOGITS_TOLERANCE)
    np.testing.assert_allclose(probabilities, chances, **LOGITS_TOLERANCE)
    assert np.std(chances) > 0.1
    assert_same_text(model, tokens, wanted[-1])


# What the files say, and what cannot be read.


def test_the_preset_is_what_the_file_says():
    """The published sizes of Ouro-1.4B, by the names of a config.json."""
    published = {
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention"] * 24,
        "total_ut_steps": 4,
    }
    found = LoopedConfig(**fields_of(FAMILIES["ouro"], OURO | published))
    wanted = dataclasses.replace(PRESETS["ouro-1.4b"], dtype="float32")
    assert found == wanted.with_options(full={"key_value_heads": 16, "head_size": 128})


def test_sizes_may_come_from_the_caller():
    """Tensors in memory have no config.json; fields also replace what one says."""
    tensors = ouro_tensors()
    sizes = {
        "vocabulary": 61,
        "width": 32,
        "pattern": "full full",
        "heads": 4,
        "feed_forward": 48,
        "loops": 5,
    }
    config = load_checkpoint(tensors, style="ouro", **sizes).config
    assert (config.loops, config.sandwich_norm, config.tied_embedding) == (5, True, False)
    del tensors["lm_head.weight"]
    assert load_checkpoint(tensors, style="ouro", **sizes).config.tied_embedding


def test_a_model_that_also_sees(tmp_path):
    """Its language model lies deeper; what looks at images, or guesses ahead, is passed over."""
    published("qwen3_5", tmp_path, tie_word_embeddings=True)
    plain = load_checkpoint(tmp_path)
    tensors = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    tensors = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    unread = {"model.visual.merger.norm.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    save_file(tensors | unread, tmp_path / "all.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    deep = load_checkpoint(tmp_path / "all.safetensors")
    assert deep.config == plain.config
    same = jax.tree.map(np.array_equal, nnx.state(deep), nnx.state(plain))
    assert all(jax.tree.leaves(same))


def test_layers_where_the_file_does_not_list_them():
    def pattern(style, **settings):
        return fields_of(FAMILIES[style], SIZES | {"num_hidden_layers": 5} | settings)["pattern"]

    assert pattern("llama") == "full full full full full"
    assert pattern("qwen3_next") == "gdn gdn gdn full gdn"
    assert pattern("qwen3_next", full_attention_interval=2) == "gdn full gdn full gdn"
    assert pattern("mistral", sliding_window=8) == "window window window window window"
    sliding = {"sliding_window": 8, "max_window_layers": 3}
    assert pattern("qwen3", **sliding, use_sliding_window=False) == pattern("llama")
    assert pattern("qwen3", **sliding, use_sliding_window=True) == "full full full window window"


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({"model_type": "gpt3"}, {}, ["style must be one of", "'ouro'", "'gpt3'"]),
        ({"model_type": "gpt2"}, {}, ["'gpt2' are not read: its positions are a learned table"]),
        ({"hidden_size": None}, {}, ["config.json does not say 'hidden_size'"]),
        ({"hidden_act": "gelu"}, {}, ["hidden_act 'gelu'", "'silu'"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, {}, ["rope_type 'spiral'", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, {}, ["'factor' of its llama3 rope"]),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            {},
            ["full: rotary scaling wants", "low < high", "got 8.0, 1.0 and 1.0"],
        ),
        ({"layer_types": ["conv", "conv"]}, {}, ["layer_types 'conv'", "'full_attention'"]),
        ({"num_hidden_layers": 3, "layer_types": None}, {}, ["missing model.layers.2.input_"]),
        ({}, {"lm_head.weight": None}, ["missing lm_head.weight"]),
        (
            {},
            {"model.layers.0.self_attn.q_proj.bias": (32,)},
            ["unused model.layers.0.self_attn.q"],
        ),
        (
            {},
            {"model.layers.1.mlp.experts.0.up_proj.weight": (3,)},
            ["mixture of experts", "rts.0"],
        ),
        ({"intermediate_size": 40}, {}, ["mlp.gate_proj.weight (48, 32)", "kernel (32, 40)"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, settings, change, words):
    tensors = ouro_tensors() | {n: None if s is None else torch.ones(s) for n, s in change.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    settings = {name: value for name, value in (OURO | settings).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r".") as error:
        load_checkpoint(tmp_path)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": None}, "does not say 'kv_lora_rank'"),
        ({"kv_lora_rank": "16"}, "kv_lora_rank '16'; it must be a whole number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; known is 1"),
        ({"rope_interleave": False}, "rope_interleave False; known is True"),
        ({"rope_parameters": YARN | {"mscale": None}}, "does not say 'mscale' of its YaRN"),
        ({"rope_parameters": YARN | {"rope_type": "linear"}}, "known are 'default', 'yarn'"),
    ],
)
def test_latents_that_cannot_be_said_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        fields_of(FAMILIES["deepseek_v3"], SIZES | DEEPSEEK | {"q_lora_rank": 12} | change)


def test_options_the_checkpoint_does_not_know(tmp_path):
    published("llama", tmp_path)
    with pytest.raises(ValueError, match=r"does not fill rho"):
        load_checkpoint(tmp_path, residual_gate=True)
    with pytest.raises(ValueError, match=r"pattern 'gdn full' has gdn; .* are full, window"):
        load_checkpoint(tmp_path, pattern="gdn full")


class OneAtATime(Mapping):
    """Tensors that are made when they are asked for, and may not pile up."""

    def __init__(self, tensors):
        self.tensors, self.made, self.most = tensors, [], 0

    def __getitem__(self, name):
        tensor = self.tensors[name].numpy().astype(np.float16)
        self.made.append(weakref.ref(tensor))
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return tensor

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_two_copies_never_exist():
    tensors = OneAtATime(ouro_tensors())
    sizes = {"vocabulary": 61, "width": 32, "pattern": "full full", "heads": 4, "feed_forward": 48}
    load_checkpoint(tensors, style="ouro", **sizes)
    assert tensors.most <= 2
