"""Loading a layer by names: from memory and from files; refusals that say what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file

from toolkit.looped import LoopedConfig, load_layer
from toolkit.looped.checkpoints.names import STYLES
from toolkit.looped.checkpoints.softmax_names import FLEXIBLE
from toolkit.looped.checkpoints.weights import parameter_paths
from toolkit.looped.mixing import LAYERS
from toolkit.testing.layers import everywhere

CONFIG = LoopedConfig(width=8, heads=2, options=everywhere(key_value_heads=1))
PREFIX = "model.layers.3.self_attn."


def empty_layer(word="full", config=CONFIG, **how):
    return nnx.eval_shape(lambda: LAYERS[word](config, rngs=nnx.Rngs(0), **how))


def some_tensors(dtype=jnp.float32):
    shapes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
    generator = np.random.default_rng(0)
    return {
        f"{PREFIX}{name}.weight": jnp.asarray(generator.standard_normal(shape), dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_files_and_arrays_in_memory_alike(tmp_path, dtype):
    tensors = some_tensors(dtype)
    # In two files, among tensors of other layers.
    halves = list(tensors.items())
    save_file(dict(halves[:2]), tmp_path / "model-1.safetensors")
    save_file(
        {**dict(halves[2:]), "lm_head.weight": jnp.zeros(3)}, tmp_path / "model-2.safetensors"
    )
    for source in (tmp_path, tensors):
        layer = load_layer(empty_layer(), source, style="llama", prefix=PREFIX)
        assert layer.key.kernel.dtype == jnp.float32
        np.testing.assert_array_equal(layer.key.kernel[...], tensors[f"{PREFIX}k_proj.weight"].T)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"style": "gpt"}, ["style must be one of", "'llama'", "'gpt'"]),
        ({}, {"style": "mamba2"}, ["mamba2", "'full'"]),
        ({}, {"prefix": "layers.0."}, ["'layers.0.'", "missing k_proj.weight", "o_proj.weight"]),
        ({"q_norm.weight": (4,)}, {}, ["unused q_norm.weight"]),
        ({"k_proj.weight": (8, 8)}, {}, ["k_proj.weight (8, 8)", "key.kernel", "(8, 4)"]),
        ({}, {"style": "qwen3"}, ["missing k_norm.weight, q_norm.weight"]),
    ],
)
def test_what_does_not_fit_is_named(change, options, words):
    tensors = some_tensors() | {PREFIX + name: jnp.zeros(s) for name, s in change.items()}
    layer = empty_layer()
    with pytest.raises(ValueError, match=r".") as error:
        load_layer(layer, tensors, **({"style": "llama", "prefix": PREFIX} | options))
    for word in words:
        assert word in str(error.value)
    # Nothing has been changed: the layer still has no arrays.
    assert not isinstance(jax.tree.leaves(layer.query)[0], jax.Array)


def test_options_the_checkpoint_does_not_know():
    gated = empty_layer(config=CONFIG.with_options(full={"output_gate": True}))
    with pytest.raises(ValueError, match=r"does not fill gate\.kernel"):
        load_layer(gated, some_tensors(), style="llama", prefix=PREFIX)


def test_heads_that_cannot_be_split():
    config = CONFIG.with_options(full={"query_key_norm": True, "output_gate": True})
    norms = {f"{PREFIX}{name}_norm.weight": jnp.zeros(4) for name in "qk"}
    # Queries without the gates that belong beside them.
    tensors = some_tensors() | norms | {f"{PREFIX}q_proj.weight": jnp.zeros((12, 8))}
    with pytest.raises(ValueError, match=r"q_proj\.weight \(12, 8\) cannot make query\.kernel"):
        load_layer(empty_layer(config=config), tensors, style="qwen3_next", prefix=PREFIX)


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(FileNotFoundError, match="safetensors"):
            load_layer(empty_layer(), path, style="llama")


PER_HEAD = ("qwen3", "glm4", "softmax", "interleaved", "gemma3", "lfm2")


@pytest.mark.parametrize("style", STYLES)
def test_styles_fill_every_parameter_once(style):
    for word, rules in STYLES[style].items():
        switches = everywhere(
            query_key_norm=style.startswith(PER_HEAD),
            biases=style == "lfm2",
            output_gate=style in ("qwen3_next", "qwen3_5"),
            projection_biases=style in ("qwen2", "glm4_moe", "gpt_oss", "huginn", *FLEXIBLE),
            output_bias=style in ("gpt_oss", *FLEXIBLE),
            value_residual=style.startswith("rwkv7"),
            **({"query_latent_size": 6} if style in ("deepseek_v3", "minicpm3") else {}),
        )
        if style in ("gpt_oss", "softmax", "interleaved"):
            switches[word]["sinks"] = True
        switches.pop("value_embedding", None)  # which has no such biases
        # Not the first layer, which mixes in no other's values.
        how = {"depth": (1, 2)} if word == "rwkv7" else {}
        layer = empty_layer(word, CONFIG.with_options(**switches), **how)
        filled = [path for rule in rules for path in rule.ours]
        # A table by token is named by its place among the model's tables.
        assert sorted(filled) == sorted({*parameter_paths(layer)} - {"table.embedding"})
        names = [name for rule in rules for name in rule.theirs]
        assert len(set(names)) == len(names)
