"""Models that planning is given by file, folder or object, not by one of its names."""

import dataclasses
import json

import pytest

from toolkit.looped import LoopedConfig, parameter_count
from toolkit.planning import MODELS, Strategy, predict
from toolkit.planning.models import model_of

SETTINGS = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 128_256,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_a_file_and_its_folder_are_the_model_that_they_describe(folder):
    cut = Strategy(fsdp=8, recompute="layer")
    known = predict("llama-3-8b", "h100:8", cut, batch=8)
    for given in (folder, str(folder), str(folder / "config.json")):
        found = predict(given, "h100:8", cut, batch=8)
        assert found.memory == known.memory
        assert found.step_seconds == known.step_seconds


def test_405b_is_known_and_its_size_is_the_published_one():
    assert parameter_count(MODELS["llama-3.1-405b"]) == pytest.approx(405.85e9, rel=1e-3)


def test_an_object_of_transformers_is_taken():
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in SETTINGS.items() if name != "model_type"}
    given = transformers.LlamaConfig(**sizes)
    found = model_of(given)
    assert isinstance(found, LoopedConfig)
    wanted = dataclasses.replace(MODELS["llama-3-8b"], norm_epsilon=found.norm_epsilon)
    assert parameter_count(found) == parameter_count(wanted)
    assert found.layers == wanted.layers
    predict(given, "h100:8", Strategy(fsdp=8), batch=8)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("llama-9", ValueError, "nor a known name"),
        (3, TypeError, "a name, a path or a configuration of transformers; got int"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(given, error, words):
    with pytest.raises(error, match=words) as refused:
        predict(given, "h100:8", Strategy(fsdp=8), batch=8)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        predict(tmp_path, "h100:8", Strategy(fsdp=8), batch=8)
