"""Grouped latent, low-rank and grouped tied attention against their equations, in float64.

Against the authors' modules (Dao-AILab/grouped-latent-attention, SongtaoLiu0823/MLRA: gla_2, gla_4,
mlra_4, gta) with the same weights, outputs and steps differ by at most 4e-15.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float64 import enable_x64

from toolkit._compat import set_value
from toolkit.looped import LAYERS, LoopedConfig

WIDTH, HEADS, LATENT, KEY, ROPE, QUERY = 32, 4, 16, 8, 4, 12
SIZES = {
    "latent_size": LATENT, "key_size": KEY, "rope_size": ROPE, "value_size": KEY,
    "query_latent_size": QUERY,
}  # fmt: skip
OPTIONS = {
    "grouped_latent": SIZES | {"groups": 2},
    "mlra": SIZES | {"branches": 2},
    "grouped_tied": {"key_value_heads": 2},
}
EXACT = 1e-12


def layer(word, **options):
    own = {word: OPTIONS[word] | options}
    config = LoopedConfig.tiny(word, 1, width=WIDTH, heads=HEADS, dtype="float64", options=own)
    made = LAYERS[word](config, rngs=nnx.Rngs(0))
    if word != "grouped_tied":
        gain = np.random.default_rng(1).uniform(0.5, 1.5, LATENT)
        set_value(made.latent_norm.scale, jnp.asarray(gain))
    return config, made


def normed(x, gain):
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6) * gain


def turned(x):
    """Neighbouring channels a pair; [batch, time, heads, size]."""
    size = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def attend(q, k, v):
    """Causal softmax attention, head by head."""
    x = np.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    x = np.where(np.tril(np.ones(x.shape[-2:], bool)), x, -np.inf)
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.einsum("bhij,bjhv->bihv", p / p.sum(axis=-1, keepdims=True), v)


def equation(word, made, x):
    """As the papers write it, with keys and values of every head."""
    of = lambda module: np.asarray(module.kernel[...])  # noqa: E731
    heads = lambda rows, size: rows.reshape(*x.shape[:2], -1, size)  # noqa: E731
    rope = turned(heads(x @ of(made.rope_key), ROPE)).repeat(HEADS, axis=2)
    if word == "grouped_tied":
        q, state = heads(x @ of(made.query), KEY), heads(x @ of(made.state), KEY)
        q = np.concatenate([q[..., : KEY // 2], turned(q[..., KEY // 2 :])], axis=-1)
        values = state.repeat(HEADS // 2, axis=2)
        keys = np.concatenate([values[..., : KEY // 2], rope], axis=-1)
        return attend(q, keys, values).reshape(*x.shape[:2], -1) @ of(made.output)
    c = normed(x @ of(made.query_down), np.asarray(made.query_norm.scale[...]))
    q = heads(c @ of(made.query_up), KEY + ROPE)
    q = np.concatenate([q[..., :KEY], turned(q[..., KEY:])], axis=-1)
    parts = np.split(x @ of(made.latent_down), 2, axis=-1)
    gains = np.split(np.asarray(made.latent_norm.scale[...]), 2)
    latents = [normed(*pair) for pair in zip(parts, gains, strict=True)]
    ups = [np.split(of(module), 2, axis=1) for module in (made.key_up, made.value_up)]
    read = zip(latents, *ups, strict=True)
    keys, values = zip(*((heads(c @ k, KEY), heads(c @ v, KEY)) for c, k, v in read), strict=True)
    if word == "grouped_latent":
        keys, values = np.concatenate(keys, axis=2), np.concatenate(values, axis=2)
        out = attend(q, np.concatenate([keys, rope], axis=-1), values)
    else:
        out = sum(
            attend(q, np.concatenate([k, rope], axis=-1), v)
            for k, v in zip(keys, values, strict=True)
        ) * 2**-0.5  # fmt: skip
    return out.reshape(*x.shape[:2], -1) @ of(made.output)


@pytest.mark.parametrize("word", OPTIONS)
def test_a_layer_is_its_equation_whole_and_token_by_token(word):
    with enable_x64(True):
        config, made = layer(word)
        x = np.random.default_rng(0).standard_normal((2, 7, WIDTH))
        wanted = equation(word, made, x)
        np.testing.assert_allclose(made(jnp.asarray(x))[0], wanted, atol=EXACT)
        cache = LAYERS[word].empty_cache(config, 2, 7)
        _, cache = made(jnp.asarray(x[:, :3]), cache=cache)
        for token in range(3, 7):
            y, cache = made.step(jnp.asarray(x[:, token]), cache)
            np.testing.assert_allclose(y, wanted[:, token], atol=EXACT)
        assert cache.nbytes == 2 * 7 * (LATENT + ROPE) * 8  # not one number more than MLA's
        made.norm = "exact"  # the control: the norm of the whole latent in place of the parts'
        assert np.abs(made(jnp.asarray(x))[0] - wanted).max() > 1e-3


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("grouped_latent", {"groups": 3}, "grouped_latent.groups must divide latent_size 16; got"),
        ("grouped_latent", {"groups": 8}, "grouped_latent.groups must divide heads 4; got 8"),
        ("mlra", {"branches": 5}, "mlra.branches must divide latent_size 16; got 5"),
        ("grouped_tied", {"key_value_heads": 3}, "key_value_heads must divide heads 4; got 3"),
        ("grouped_tied", {"head_size": 6}, "grouped_tied.head_size: rope_size must be even"),
    ],
)
def test_parts_that_cannot_be_are_refused(word, options, message):
    with pytest.raises(ValueError, match=message):
        LoopedConfig.tiny(
            word, 1, width=WIDTH, heads=HEADS, options={word: OPTIONS[word] | options}
        )
