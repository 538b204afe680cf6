"""A model as one file: what comes back is what was written, and damage is named."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.flax import save_file
from tiers import by_night
from yardstick import assert_quick

from toolkit.looped import LAYERS, LoopedConfig, LoopedLM, load_model, save_model
from toolkit.looped.checkpoints.files import FORMAT, VERSION

# Half a unit in the last place of a number's 11 or 8 bits.
RELATIVE_ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
# Sizes are held against the file before anything is built.
MOST_SECONDS = 2
SMALLEST_NORMAL_FLOAT16 = 2**-14


def model_of(pattern: str = "gdn full", **overrides) -> LoopedLM:
    config = LoopedConfig.tiny(pattern, loops=2, width=32, vocabulary=16, **overrides)
    return LoopedLM(config, rngs=nnx.Rngs(0))


def rewrite(
    path,
    config=None,
    header=None,
    drop=None,
    reshape=None,
    without=None,
    poison=None,
    integers=None,
) -> None:
    """The same file with something changed."""
    with safe_open(path, framework="flax") as opened:
        metadata = opened.metadata()
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if config:
        metadata["config"] = json.dumps(json.loads(metadata["config"]) | config)
    if drop:
        del arrays[drop]
    if reshape:
        arrays[reshape] = arrays[reshape].reshape(-1)
    if poison:
        arrays[poison] = arrays[poison].at[0].set(jnp.nan)
    if integers:
        arrays[integers] = arrays[integers].view(jnp.int32)
    kept = {name: text for name, text in (metadata | (header or {})).items() if name != without}
    save_file(arrays, path, metadata=kept)


@pytest.fixture
def path(tmp_path):
    save_model(model_of(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def written() -> LoopedLM:
    """A model that has every layer and every array there is."""
    switches = {"loop_embedding": True, "input_injection": True}
    switches |= {"options": {"full": {"output_gate": True}}}
    return model_of(" ".join(LAYERS), prelude="full", **switches)


@pytest.mark.parametrize("dtype", by_night({"float16"}, RELATIVE_ROUNDING))
def test_every_parameter_comes_back_as_the_dtype_rounds_it(dtype, written, tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    written = written if dtype == "float32" else model_of()
    save_model(written, file, dtype=dtype)
    read = load_model(file)
    assert read.config == written.config
    pairs = zip(nnx.iter_graph(written), nnx.iter_graph(read), strict=True)
    parameters = [(a, b) for (_, a), (_, b) in pairs if isinstance(a, nnx.Param)]
    assert parameters
    for one, other in parameters:
        assert other.dtype == one.dtype == jnp.float32
        np.testing.assert_allclose(
            other[...], one[...], rtol=RELATIVE_ROUNDING[dtype],
            atol=RELATIVE_ROUNDING[dtype] * SMALLEST_NORMAL_FLOAT16,
        )  # fmt: skip


def test_the_same_model_makes_the_same_bytes(path, tmp_path) -> None:
    for _ in range(3):
        save_model(model_of(), tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_the_model_that_comes_back_computes_the_same(path) -> None:
    tokens = jnp.arange(12)[None] % 16
    np.testing.assert_array_equal(load_model(path)(tokens), model_of()(tokens))


def test_a_configuration_from_before_a_field_existed_gets_its_default(path) -> None:
    with safe_open(path, framework="flax") as opened:
        fields = json.loads(opened.metadata()["config"])
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert fields == dataclasses.asdict(model_of().config)
    del fields["remat"]
    header = {"format": FORMAT, "version": VERSION, "config": json.dumps(fields)}
    save_file(arrays, path, metadata=header)
    assert load_model(path).config == model_of().config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"wings": 2}}, "'wings', which this version of the toolkit does not know"),
        ({"config": {"width": 30}}, "width"),
        ({"header": {"version": "7"}}, "has version 7; this toolkit reads 2"),
        ({"header": {"format": "other"}}, "is not a looped model"),
        ({"drop": "norm.scale"}, "lacks tensor 'norm.scale'"),
        ({"config": {"residual_gate": False}}, "has the unknown tensor 'rho'"),
        ({"reshape": "rho"}, r"has rho of shape \(64,\); its configuration makes it \(2, 32\)"),
        ({"without": "version"}, "has version None; this toolkit reads 2"),
        ({"without": "config"}, "config is wrong: it must be a JSON object, got NoneType"),
        ({"header": {"config": "null"}}, "config is wrong: it must be a JSON object, got NoneType"),
        ({"header": {"config": "[" * 100_000}}, "config is wrong: it is JSON nested"),
        ({"config": {"width": "32"}}, "config is wrong: width must be an int; got '32'"),
        ({"config": {"rope_theta": None}}, "rope_theta must be a finite number; got None"),
        ({"config": {"remat": "no"}}, "remat must be True or False; got 'no'"),
        ({"config": {"options": [1]}}, r"options must be a Mapping; got \[1\]"),
        ({"config": {"pattern": "full " * 3000}}, "describes 3,000 layers and holds 26 tensors"),
        ({"config": {"width": 2**20, "vocabulary": 2**20}}, "describes .* and holds .* numbers"),
        ({"config": {"vocabulary": 10**30}}, "vocabulary must be at most"),
        ({"config": {"loops": 10**9}}, "loops must be at most 4,096; got 1000000000"),
        ({"poison": "rho"}, "tensor 'rho' must hold finite"),
        ({"integers": "rho"}, "tensor 'rho' holds I32; it must hold one of"),
    ],
)
def test_a_file_that_does_not_fit_says_why(path, change, words) -> None:
    rewrite(path, **change)

    def refuse():
        with pytest.raises(ValueError, match=words) as error:
            load_model(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)

    assert_quick(refuse, MOST_SECONDS)


def test_damage_absence_and_overflow_are_named(path, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load_model(tmp_path / "absent.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        load_model(path)
    with pytest.raises(ValueError, match="dtype must be one of 'float32'"):
        save_model(model_of(), path, dtype="int8")
    model = model_of()
    assert model.rho is not None
    model.rho[...] += 1e6
    with pytest.raises(ValueError, match="float16 cannot hold rho"):
        save_model(model, path, dtype="float16")
