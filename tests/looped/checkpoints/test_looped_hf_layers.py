"""Against Hugging Face transformers: each layer with a published model's weights, read from file.

A tiny model with random weights is saved as its authors publish theirs; our layer, filled by the
names in that file, must give the same numbers for a whole sequence and token by token. RWKV-7 is
not in transformers: its equations are restated here in PyTorch.
"""

import dataclasses
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import by_night

from toolkit.looped import LoopedConfig, load_layer
from toolkit.looped.mixing import LAYERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Together they compute for longer than the first tier has time.
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

LAYER_TOLERANCE = 1e-5  # of the largest number: both sides run their recurrence in float32
# Large enough to count, and not to magnify the float32 rounding of outputs that nearly cancel.
NORM_EPSILON = 1e-3
WIDTH, TIME, STEPS = 24, 75, 20
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
    norm_epsilon=NORM_EPSILON,
    options={"gdn": {"value_heads": 6, "key_size": 8, "value_size": 12}},
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
        dataclasses.replace(DELTA_CONFIG, norm_epsilon=1e-5).with_options(
            gdn={"negative_eigenvalues": True}
        ),
    ),
    "kimi_linear": Pair(
        "KimiLinear",
        {**LINEAR, "mlp_layer_types": ["dense"], "linear_num_heads": 2, "linear_head_dim": 8},
        "self_attn",
        "kda",
        LoopedConfig(
            width=WIDTH,
            heads=2,
            norm_epsilon=NORM_EPSILON,
            options={"kda": {"key_size": 8, "value_size": 8}},
        ),
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
        LoopedConfig(
            width=WIDTH,
            heads=2,
            norm_epsilon=NORM_EPSILON,
            options={"mamba2": {"value_heads": 4, "key_size": 8}},
        ),
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


def assert_close(ours, theirs):
    ours, theirs = np.asarray(ours), theirs.detach().numpy()
    assert np.std(theirs) > 0.1
    assert np.max(np.abs(ours - theirs)) < LAYER_TOLERANCE * np.max(np.abs(theirs))


@pytest.fixture(params=by_night({"olmo_hybrid"}, PAIRS))
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

    out, gradient = value_and_gradient(ours, x)
    assert_close(out, wanted)
    assert_close(gradient, x_torch.grad)


def test_decoding_with_their_cache(pair):
    ours, theirs, model_config, config = pair
    x = np.random.default_rng(1).standard_normal((2, STEPS, WIDTH)).astype(np.float32)
    their_cache = transformers.DynamicCache(config=model_config)
    cache, step = type(ours).empty_cache(config, 2, STEPS), jax.jit(type(ours).step)
    out, wanted = [], []
    # Newer transformers call it `cache`, and warn of the old name.
    names = inspect.signature(theirs.forward).parameters
    given = {"cache" if "cache" in names else "cache_params": their_cache}
    with torch.no_grad():
        for t in range(STEPS):
            wanted.append(theirs(torch.tensor(x[:, t : t + 1]), **given))
            out_t, cache = step(ours, x[:, t], cache)
            out.append(out_t)
    assert_close(np.stack(out, axis=1), torch.cat(wanted, dim=1))


HEADS = 2
RANK = {"w": 32, "a": 32, "g": 32}
RWKV7_SHAPES = {
    **{f"x_{name}": (1, 1, WIDTH) for name in "rwkvag"},
    **{f"{name}1": (WIDTH, rank) for name, rank in RANK.items()},
    **{f"{name}2": (rank, WIDTH) for name, rank in RANK.items()},
    **{f"{name}0": (1, 1, WIDTH) for name in "wa"},
    **{f"{name}.weight": (WIDTH, WIDTH) for name in ("receptance", "key", "value", "output")},
    **{"k_k": (1, 1, WIDTH), "k_a": (1, 1, WIDTH), "r_k": (HEADS, WIDTH // HEADS)},
    **{"ln_x.weight": (WIDTH,), "ln_x.bias": (WIDTH,)},
}


def rwkv7_time_mixing(p, x):
    """The paper's equations, one token after the other; p holds its parameters by their names."""
    batch, time, width = x.shape
    functional, size = torch.nn.functional, width // HEADS
    heads = lambda a: a.reshape(batch, HEADS, size)  # noqa: E731
    state, before, outputs = torch.zeros(batch, HEADS, size, size), torch.zeros(batch, width), []
    for t in range(time):
        now = x[:, t]
        r, w, k, v, a, g = (now + (before - now) * p[f"x_{name}"][0, 0] for name in "rwkvag")
        r, k, v = r @ p["receptance.weight"].T, k @ p["key.weight"].T, v @ p["value.weight"].T
        w = p["w0"][0, 0] + torch.tanh(w @ p["w1"]) @ p["w2"]
        w = torch.exp(-torch.exp(-functional.softplus(-w) - 0.5))
        a = torch.sigmoid(p["a0"][0, 0] + a @ p["a1"] @ p["a2"])
        g = torch.sigmoid(g @ p["g1"]) @ p["g2"]
        kappa = functional.normalize(heads(k * p["k_k"][0, 0]), dim=-1)
        k = k * (1 + (a - 1) * p["k_a"][0, 0])
        # Rows of the state are values, columns keys.
        erased = (state @ kappa[..., None]) @ (heads(a) * kappa)[..., None, :]
        state = state * heads(w)[..., None, :] - erased
        state = state + heads(v)[..., None] @ heads(k)[..., None, :]
        out = (state @ heads(r)[..., None]).reshape(batch, width)
        out = functional.group_norm(out, HEADS, p["ln_x.weight"], p["ln_x.bias"], eps=64e-5)
        bonus = (heads(r) * heads(k) * p["r_k"]).sum(-1, keepdim=True) * heads(v)
        outputs.append(((out + bonus.reshape(batch, width)) * g) @ p["output.weight"].T)
        before = now
    return torch.stack(outputs, dim=1)


def test_rwkv7_layer(tmp_path):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: 0.4 * torch.randn(shape, generator=generator) for name, shape in RWKV7_SHAPES.items()
    }
    named = {f"blocks.0.att.{name}": tensor for name, tensor in parameters.items()}
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file(named, tmp_path / "rwkv7.safetensors")
    layer = nnx.eval_shape(
        lambda: LAYERS["rwkv7"](LoopedConfig(width=WIDTH, heads=HEADS), rngs=nnx.Rngs(0))
    )
    load_layer(layer, tmp_path, style="rwkv7", prefix="blocks.0.att.")
    x = np.random.default_rng(2).standard_normal((2, TIME, WIDTH)).astype(np.float32)
    assert_close(
        jax.jit(lambda layer, x: layer(x)[0])(layer, x),
        rwkv7_time_mixing(parameters, torch.tensor(x)),
    )
