"""Models written for Hugging Face transformers: it reads them, and so do we, to the bit."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiers import by_night

from toolkit.looped import LoopedConfig, LoopedLM, load_checkpoint, save_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.settings import ARCHITECTURES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # relative to the largest logit
SMALL: dict[str, Any] = {
    "vocabulary": 61,
    "width": 32,
    "heads": 4,
    "loops": 1,
    "residual_gate": False,
}
GROUPED = {"key_value_heads": 2, "head_size": 12}
MOE = {"experts": 8, "chosen": 3, "hidden": 20}
ADDED = MOE | {"shared_hidden": 40, "choice_bias": True, "scores": "sigmoid", "scale": 2.5}
LATENT = {"latent_epsilon": 1e-6, "latent_size": 16, "key_size": 8, "rope_size": 4, "value_size": 6}
QWEN = {"query_key_norm": True, "output_gate": True, "rotary_fraction": 0.25, "head_size": 16}
GDN = {"heads": 2, "value_heads": 6, "key_size": 8, "value_size": 12, "convolution_size": 3}
LLAMA3 = {"rotary_factor": 8.0, "rotary_original_length": 64}
OSS = GROUPED | {"projection_biases": True, "output_bias": True, "sinks": True}
YARN = {
    "rotary_rule": "yarn",
    "rotary_factor": 4.0,
    "rotary_original_length": 8,
    "rotary_high": 32.0,
    "rotary_truncate": False,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"pattern": "full full", "options": {"full": GROUPED | LLAMA3}},
    "mistral": {"pattern": "window window", "options": {"window": {"sliding_window": 5}}},
    "qwen2": {
        "pattern": "full window",
        "tied_embedding": True,
        "options": {
            "full": {"projection_biases": True},
            "window": {"projection_biases": True, "sliding_window": 5},
        },
    },
    "qwen3": {"pattern": "full full", "options": {"full": GROUPED | {"query_key_norm": True}}},
    "qwen3_5_text": {"pattern": "gdn full", "options": {"gdn": GDN, "full": QWEN}},
    "deepseek_v3": {
        "pattern": "mla mla",
        "feed_forwards": "swiglu moe",
        "options": {"mla": LATENT | {"query_latent_size": 12}, "moe": ADDED},
    },
    "deepseek_v2": {
        "pattern": "mla mla",
        "feed_forwards": "swiglu moe",
        "options": {
            "mla": LATENT,
            "moe": MOE | {"shared_hidden": 20, "normalise": False, "group_score": "max"},
        },
    },
    "mixtral": {"pattern": "full full", "feed_forwards": "moe", "options": {"moe": MOE}},
    "qwen3_moe": {
        "pattern": "full full",
        "feed_forwards": "swiglu moe",
        "options": {"full": GROUPED | {"query_key_norm": True}, "moe": MOE},
    },
    "qwen3_next": {
        "pattern": "gdn full",
        "feed_forwards": "moe",
        "options": {
            "gdn": GDN,
            "full": QWEN,
            "moe": MOE | {"shared_hidden": 24, "shared_gate": True},
        },
    },
    "glm4_moe": {
        "pattern": "full full",
        "feed_forwards": "swiglu moe",
        "options": {"full": GROUPED | {"rotary_fraction": 0.5}, "moe": ADDED},
    },
    "gpt_oss": {
        "pattern": "window full",
        "feed_forwards": "moe",
        "options": {
            "full": OSS | YARN,
            "window": OSS | YARN | {"sliding_window": 5},
            "moe": MOE | {"router_bias": True, "activation": "clamped", "biases": True},
        },
    },
    "glm4_moe_lite": {
        "pattern": "mla mla",
        "norm_epsilon": 1e-3,
        "feed_forwards": "swiglu moe",
        "options": {"mla": LATENT | {"query_latent_size": 12}, "moe": ADDED},
    },
    "olmoe": {
        "pattern": "full full",
        "feed_forwards": "moe",
        "options": {"full": {"projection_norm": True}, "moe": MOE | {"normalise": False}},
    },
}

BY_DAY = {"llama", "qwen3_next", "deepseek_v3"}


def small(**fields: Any) -> LoopedLM:
    return LoopedLM(LoopedConfig(**SMALL | fields), rngs=nnx.Rngs(0))


def drawn(style):
    """A model with weights far enough from initial values that a swapped pair would show."""
    model = small(**{"feed_forward": 48, "rope_theta": 300.0} | CASES[style])
    rng = np.random.default_rng(0)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if np.issubdtype(variable[...].dtype, np.floating):
            spread = 0.2 * rng.normal(size=variable.shape).astype("f")
            is_scale = path[-1] == "scale"
            nnx.update(model, nnx.from_flat_state([(path, variable.replace(is_scale + spread))]))
    return model


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("style", by_night({*CASES} - BY_DAY, CASES))
def test_transformers_reads_what_was_written(style, tmp_path):
    model, folder = drawn(style), tmp_path / "model"
    ids = {"bos_token_id": 0, "eos_token_id": 60, "max_position_embeddings": 128}
    save_checkpoint(model, folder, style=style, settings=ids, shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(theirs).__name__ == f"{ARCHITECTURES[style]}ForCausalLM"
    tokens = np.random.default_rng(0).integers(0, 61, (2, 13))
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(jax.jit(type(model).__call__)(model, tokens))
    assert np.std(wanted) > 0.3
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    assert theirs.generation_config.eos_token_id == 60
    again = load_checkpoint(folder)
    ours, read = parameters(model), parameters(again)
    assert list(ours) == list(read)
    for name, array in ours.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)


def test_every_family_has_a_class_in_transformers():
    with_images = {style for style in FAMILIES if f"{style}_text" in FAMILIES}
    assert set(FAMILIES) - with_images == set(ARCHITECTURES)
    of_their_authors = ("ouro", "huginn_raven", "parcae", "rwkv7")
    for style, name in ARCHITECTURES.items():
        assert style in of_their_authors or hasattr(transformers, f"{name}ForCausalLM"), style


def test_a_looped_model_is_written_as_one(tmp_path):
    switches = {"norm_every_loop": True, "exit_gate": True, "sandwich_norm": True}
    model = small(**switches, loops=3, pattern="full")
    save_checkpoint(model, tmp_path / "ouro", style="ouro")
    again = load_checkpoint(tmp_path / "ouro")
    assert again.config.loops == 3
    ours, read = parameters(model), parameters(again)
    assert all((read[name] == array).all() for name, array in ours.items())


def test_what_a_family_cannot_express_is_refused_before_anything_is_written(tmp_path):
    def refused(message, style="llama", error=ValueError, **fields):
        model = small(**{"pattern": "full"} | fields)
        with pytest.raises(error, match=message):
            save_checkpoint(model, tmp_path / "no", style=style)
        assert not (tmp_path / "no").exists()

    refused("style must be one of", style="bert")
    refused("'qwen3_5_text' is its text", style="qwen3_5")
    refused("cannot express loops 2", loops=2)
    refused("cannot express residual_gate True", residual_gate=True, loops=1)
    refused("query_key_norm True", options={"full": {"query_key_norm": True}})
    refused("gla", pattern="gla")
    refused("cannot express", style="qwen3_moe", pattern="full", options={"full": GROUPED})


def test_nothing_is_overwritten_and_the_tokenizer_comes_along(tmp_path):
    model = small(pattern="full")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "notes.txt").write_text("mine")
    here = tmp_path / "model"
    save_checkpoint(model, here, style="llama", tokenizer=tmp_path / "tokenizer", dtype="bfloat16")
    assert sorted(file.name for file in here.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((here / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(FileExistsError, match="has files in it"):
        save_checkpoint(model, here, style="llama")
    huge = nnx.clone(model)
    nnx.update(huge, {"norm": {"scale": nnx.Param(np.full(32, 1e30, "f"))}})
    with pytest.raises(ValueError, match="dtype float16 cannot hold"):
        save_checkpoint(huge, tmp_path / "other", style="llama", dtype="float16")
    assert not (tmp_path / "other").exists()


def test_two_writers_of_a_folder_do_not_mix(tmp_path, monkeypatch):
    """Each writes beside the other; the first to end is kept whole, the second is told."""
    from toolkit.looped.checkpoints import write

    mine, other = small(pattern="full"), small(pattern="full full")
    inner = write._write_tensors

    def interrupted(*args):
        monkeypatch.setattr(write, "_write_tensors", inner)
        save_checkpoint(other, tmp_path / "model", style="llama")
        inner(*args)

    monkeypatch.setattr(write, "_write_tensors", interrupted)
    with pytest.raises(FileExistsError, match="was written by another process meanwhile"):
        save_checkpoint(mine, tmp_path / "model", style="llama")
    assert load_checkpoint(tmp_path / "model").config.pattern == "full full"
    mine.norm.scale[...] *= 1e6  # beyond float16
    with pytest.raises(ValueError, match="dtype float16 cannot hold"):
        save_checkpoint(mine, tmp_path / "half", style="llama", dtype="float16")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
