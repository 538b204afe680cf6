"""Checkpoints from elsewhere that are not what they say are refused in one line."""

import json

import jax.numpy as jnp
import pytest
from safetensors.flax import save_file
from yardstick import assert_quick

from toolkit.looped import load_checkpoint
from toolkit.looped.checkpoints.tensors import INDEX

MOST_SECONDS = 2
SETTINGS = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def llama_tensors():
    here = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    shapes |= {f"{here}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
    shapes |= {f"{here}mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
    shapes |= {f"{here}mlp.down_proj.weight": (8, 12)}
    shapes |= {f"{here}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def refused(folder, words):
    def refuse():
        with pytest.raises(ValueError, match=words) as error:
            load_checkpoint(folder)
        assert "\n" not in str(error.value)

    assert_quick(refuse, MOST_SECONDS)


def test_a_sound_one_is_read_and_so_is_one_with_an_index(folder):
    assert load_checkpoint(folder).config.width == 8
    index = {"weight_map": dict.fromkeys(llama_tensors(), "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_bytes(b"a second copy, which is not in the index")
    assert load_checkpoint(folder).config.width == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "big"}, "config.json has hidden_size 'big'; it must be a whole number"),
        ({"hidden_size": None}, "config.json does not say 'hidden_size'"),
        ({"hidden_size": 2**30}, "describes .* parameters and holds"),
        ({"hidden_size": -8}, "width must be at least 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000; the checkpoint has 11 tensors"),
        ({"num_hidden_layers": 2}, "missing .*layers.1"),
        ({"layer_types": ["full_attention"] * 10**6}, "1000000 layer_types"),
        ({"layer_types": "full_attention"}, "config.json has layer_types 'full_attention'"),
        ({"layer_types": [["full_attention"]]}, "config.json has layer_types"),
        ({"rope_theta": "inf"}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "norm_epsilon must be a finite number"),
        ({"rope_scaling": [1]}, "config.json has rope_scaling"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"model_type": ["llama"]}, "style must be one of"),
        ({"total_ut_steps": 10**9}, "total_ut_steps 1000000000, which models of this family"),
    ],
)
def test_settings_that_make_no_sense(folder, change, words):
    (folder / "config.json").write_text(json.dumps(SETTINGS | change))
    refused(folder, words)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, "\0"])
def test_settings_that_are_no_json_object(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json is damaged")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "absent.safetensors"}}, "'absent.safetensors', which is not there"),
        ({"weight_map": {"a": "../model.safetensors"}}, "must be a file of the same folder"),
        ({"weight_map": {"a": "/dev/zero"}}, "must be a file of the same folder"),
        ({"weight_map": {"a": 3}}, "weight_map must say which file"),
        ({}, "weight_map must say which file"),
        ([], "is damaged"),
    ],
)
def test_an_index_that_leads_astray(folder, index, words):
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, words)


@pytest.mark.parametrize("change", [lambda x: x.at[0].set(jnp.nan), lambda x: x.astype(jnp.int32)])
def test_weights_that_are_no_finite_numbers(folder, change):
    tensors = llama_tensors()
    tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "tensor 'model.norm.weight' (must hold finite|holds I32)")


def test_a_tied_head_with_other_numbers_is_a_question(folder):
    """transformers 5 would leave it apart, transformers 4 would tie it."""
    head, file = jnp.ones((11, 8)), folder / "model.safetensors"
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"tie_word_embeddings": True}))
    save_file(llama_tensors() | {"lm_head.weight": head}, file)
    assert load_checkpoint(folder).unembedding is None
    save_file(llama_tensors() | {"lm_head.weight": head.at[3].set(2.0)}, file)
    refused(folder, "has other numbers; choose by tied_embedding=True")
    assert load_checkpoint(folder, tied_embedding=True).unembedding is None
    apart = load_checkpoint(folder, tied_embedding=False).unembedding
    assert apart[...][3, 0] == 2.0


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({"model.norm.weight": 2 * jnp.ones(8)}, folder / "other.safetensors")
    refused(folder, "has the tensor 'model.norm.weight', and so has another file")
