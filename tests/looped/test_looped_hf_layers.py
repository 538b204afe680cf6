"""Against Hugging Face transformers: each layer with a published model's weights, read from file.

A tiny model with random weights is saved as its authors publish theirs; our layer, filled by the
names in that file, must give the same numbers for a whole sequence and token by token.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, load_layer
from toolkit.looped.mixing import LAYERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

LAYER_TOLERANCE = 1e-5  # of the largest number: both sides run their recurrence in float32
# Large enough to count, and not to magnify the float32 rounding of outputs that nearly cancel.
NORM_EPSILON = 1e-3
WIDTH, TIME, PROMPT = 24, 75, 70
COMMON = {
    "vocab_size": 8,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DENSE = {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
LINEAR = {**COMMON, **DENSE, "layer_types": ["linear_attention"], "rms_norm_eps": NORM_EPSILON}
DELTA = {
    **LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Three value heads to a key head: the order of grouped heads shows.
DELTA_CONFIG = LoopedConfig(
    width=WIDTH,
    heads=2,
    gdn_value_heads=6,
    gdn_key_size=8,
    gdn_value_size=12,
    norm_epsilon=NORM_EPSILON,
)


class Pair(NamedTuple):
    """A published architecture and our layer for it: model, its options, our word and sizes."""

    model: str
    options: dict
    module: str
    word: str
    config: LoopedConfig


PAIRS = {
    "qwen3_next": Pair(
        "Qwen3Next",
        {**DELTA, "mlp_only_layers": [0], "num_experts": 2},
        "linear_attn",
        "gdn",
        DELTA_CONFIG,
    ),
    "qwen3_5": Pair("Qwen3_5Text", DELTA, "linear_attn", "gdn", DELTA_CONFIG),
    "olmo_hybrid": Pair(
        "OlmoHybrid",
        {
            **DELTA,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_allow_neg_eigval": True,
        },
        "linear_attn",
        "gdn",
        # Its output norm has an epsilon of its own.
        dataclasses.replace(DELTA_CONFIG, norm_epsilon=1e-5, negative_eigenvalues=True),
    ),
    "mamba2": Pair(
        "Mamba2",
        {
            **COMMON,
            "num_heads": 4,
            "head_dim": 12,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 32,
            "layer_norm_epsilon": NORM_EPSILON,
        },
        "mixer",
        "mamba2",
        LoopedConfig(width=WIDTH, heads=2, value_heads=4, key_size=8, norm_epsilon=NORM_EPSILON),
    ),
}


def redraw(module, seed=0):
    """Weights far enough from initial values that a swapped pair would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_log"):
                # Decay rates near 1. At rates near 16 both chunked forms lose digits in the same
                # place, differences of summed log-decays, and agree to 2e-5 only.
                rates = torch.linspace(-1.0, 0.5, parameter.numel())
                parameter.copy_(rates.reshape(parameter.shape))
            else:
                centre = parameter if parameter.ndim == 1 else 0.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))


def close(ours, theirs):
    theirs = theirs.detach().numpy()
    assert np.std(theirs) > 0.1
    assert np.max(np.abs(ours - theirs)) < LAYER_TOLERANCE * np.max(np.abs(theirs))


@pytest.fixture(params=PAIRS)
def pair(request, tmp_path):
    """Our layer with the file's weights, their layer, and the configuration of their model."""
    name, options, module, word, config = PAIRS[request.param]
    model_config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}Model")(model_config).eval()
    redraw(model)
    model.save_pretrained(tmp_path)
    ours = nnx.eval_shape(lambda: LAYERS[word](config, rngs=nnx.Rngs(0)))
    load_layer(ours, tmp_path, style=request.param, prefix=f"layers.0.{module}.")
    return ours, getattr(model.layers[0], module), model_config, config


def test_a_sequence_and_its_gradient(pair):
    ours, theirs, _, _ = pair
    x, weight = np.random.default_rng(0).standard_normal((2, 2, TIME, WIDTH)).astype(np.float32)
    x_torch = torch.tensor(x, requires_grad=True)
    wanted = theirs(x_torch)
    (wanted * torch.tensor(weight)).sum().backward()

    @jax.jit
    def value_and_gradient(layer, x):
        out, pullback = jax.vjp(lambda x: layer(x)[0], x)
        return out, pullback(jnp.asarray(weight))[0]

    out, gradient = value_and_gradient(ours, jnp.asarray(x))
    close(out, wanted)
    close(gradient, x_torch.grad)


def test_decoding_with_their_cache(pair):
    ours, theirs, model_config, config = pair
    x = np.random.default_rng(1).standard_normal((2, TIME, WIDTH)).astype(np.float32)
    their_cache = transformers.DynamicCache(config=model_config)
    cache = type(ours).empty_cache(config, 2, TIME)
    prefill, step = jax.jit(lambda layer, *a: layer(a[0], cache=a[1])), jax.jit(type(ours).step)
    with torch.no_grad():
        wanted = theirs(torch.tensor(x[:, :PROMPT]), cache_params=their_cache)
        out, cache = prefill(ours, jnp.asarray(x[:, :PROMPT]), cache)
        close(out, wanted)
        for t in range(PROMPT, TIME):
            wanted = theirs(torch.tensor(x[:, t : t + 1]), cache_params=their_cache)
            out, cache = step(ours, jnp.asarray(x[:, t]), cache)
            close(out, wanted[:, 0])
