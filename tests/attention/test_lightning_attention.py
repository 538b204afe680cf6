"""MiniMax's lightning attention is retention, with other rates, no rotation and no scale.

Against Hugging Face transformers: the layer restated around `retention`, whole and token by token.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import retention, retention_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

TOLERANCE = 1e-12  # in float64, of the largest number
SHOWS = 1e-3
BATCH, TIME, PROMPT, WIDTH, HEADS, LAYERS = 2, 21, 17, 24, 3, 5
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "block_size": 8,
    "layer_types": ["linear_attention"] * LAYERS,
    "vocab_size": 4,
}


def log_decay(layer: int, shift: float = 0.0) -> np.ndarray:
    """Of all heads: half-lives grow with the head, and with the depth of the layer."""
    slopes = 2.0 ** (-8 * (np.arange(HEADS) + 1) / HEADS)
    return -slopes * (1 - layer / (LAYERS - 1 + 1e-5) + 1e-5 + shift)


@pytest.fixture(params=[0, 3])
def pair(request):
    """Their layer in float64, its parameters as arrays, and its number."""
    config = transformers.MiniMaxConfig(**SIZES)
    made = transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention
    layer = made(config, request.param).double().eval()
    # Their rates are made in float32; these are the same rule in float64.
    own = layer.get_slope_rate().double()
    exact = -log_decay(request.param)[:, None, None]
    np.testing.assert_allclose(own.numpy(), exact, rtol=1e-6)
    layer.slope_rate = torch.tensor(exact)
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    # Theirs takes the mean square in float32.
    layer.norm = torch.nn.RMSNorm(WIDTH, eps=1e-6).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.4 * torch.randn(parameter.shape, generator=generator))
    return layer, request.param


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def inputs_of(p, x):
    """Queries, keys and values, all after the SiLU."""
    mixed = x @ p["qkv_proj.weight"].T
    mixed = (mixed * sigmoid(mixed)).reshape(*x.shape[:-1], HEADS, -1)
    return [jnp.asarray(part) for part in np.split(mixed, 3, axis=-1)]


def finished(p, x, out, gate=sigmoid):
    """Norm over all heads together, then a gate of the layer's input."""
    out = np.asarray(out).reshape(*x.shape[:-1], -1)
    square = np.mean(np.square(out), axis=-1, keepdims=True)
    normed = out / np.sqrt(square + 1e-6) * p["norm.weight"]
    return (gate(x @ p["output_gate.weight"].T) * normed) @ p["out_proj.weight"].T


def distance(found, wanted):
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


def test_lightning_attention_is_retention(pair):
    layer, number = pair
    with enable_x64(True):
        _compare(layer, number)


def _compare(layer, number):
    p = {name: own.detach().numpy() for name, own in layer.named_parameters()}
    x = np.random.default_rng(0).standard_normal((BATCH, TIME, WIDTH))
    cache: Any = transformers.models.minimax.modeling_minimax.MiniMaxCache()
    with torch.no_grad():
        wanted = layer(torch.tensor(x), None, None)[0].numpy()
        prompt = layer(torch.tensor(x[:, :PROMPT]), None, None, cache=cache)[0].numpy()
        steps = [
            layer(torch.tensor(x[:, t : t + 1]), None, None, cache=cache)[0].numpy()
            for t in range(PROMPT, TIME)
        ]
    np.testing.assert_allclose(np.concatenate([prompt, *steps], 1), wanted, rtol=1e-9, atol=1e-12)

    q, k, v = inputs_of(p, x)
    rates = jnp.asarray(log_decay(number))
    out, _ = retention(q, k, v, log_decay=rates, scale=1.0)
    assert distance(finished(p, x, out), wanted) < TOLERANCE
    _, state = retention(
        *(a[:, :PROMPT] for a in (q, k, v)), log_decay=rates, scale=1.0,
        initial_state=jnp.zeros((BATCH, HEADS, WIDTH // HEADS, WIDTH // HEADS)),
    )  # fmt: skip
    for t in range(PROMPT, TIME):
        now = q[:, t], k[:, t], v[:, t]
        out_t, state = retention_step(*now, state, log_decay=rates, scale=1.0)
        assert distance(finished(p, x[:, t], out_t), wanted[:, t]) < TOLERANCE

    for wrong in (None, log_decay(number, 0.1), log_decay(number + 1)):
        other = None if wrong is None else jnp.asarray(wrong)
        out, _ = retention(q, k, v, log_decay=other, scale=1.0)
        assert distance(finished(p, x, out), wanted) > SHOWS
    out, _ = retention(q, k, v, log_decay=rates, scale=1.0)  # a gate as RetNet has it
    assert distance(finished(p, x, out, lambda z: z * sigmoid(z)), wanted) > SHOWS
