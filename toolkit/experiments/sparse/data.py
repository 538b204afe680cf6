"""Queries, keys and values as attention sees them, drawn from two laws.

`gaussian` is not sparse, the worst case for any selection: at sharpness 1 it takes 61 % of 4096
keys to hold 90 % of the mass. `heavy_tailed` resembles trained models: lasting topics, outlier
channels, sinks, heads of unequal sharpness; its heads need between some 80 and 1100 keys.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

TOPICS, STAY, OUTLIERS, SINKS, SINK_MASS = 64, 0.95, 4, 4, 0.3


class Drawn(NamedTuple):
    """One sequence's attention.

    Attributes:
        q: queries [queries, heads, size], those of a key head together; every one sees all keys.
        k: keys [key_heads, tokens, size].
        v: values [key_heads, tokens, size].
    """

    q: Float[np.ndarray, "queries heads size"]
    k: Float[np.ndarray, "key_heads tokens size"]
    v: Float[np.ndarray, "key_heads tokens size"]


def gaussian(
    seed: int, sharpness: float = 1.0, *, heads=4, tokens=4096, queries=32, size=128
) -> Drawn:
    """Independent normal numbers; scores q . k / sqrt(size) have the standard deviation given."""
    generator = np.random.default_rng(seed)
    draw = lambda *shape: generator.standard_normal(shape, dtype=np.float32)  # noqa: E731
    q, k = sharpness * draw(queries, heads, size), draw(heads, tokens, size)
    return Drawn(q, k, draw(heads, tokens, size) / np.float32(size**0.5))


def heavy_tailed(seed: int, *, heads=4, group=1, tokens=4096, queries=32, size=128) -> Drawn:
    """Topics in runs, outlier channels, sinks with some 30 % of the mass, two needles per query.

    Each of a key head's `group` query heads asks for a topic and for needles of its own.
    """
    asked = queries * group
    drawn = [_head(np.random.default_rng((seed, h)), tokens, asked, size) for h in range(heads)]
    q, k, v = (np.stack(x).astype(np.float32) for x in zip(*drawn, strict=True))
    q = q.reshape(heads, queries, group, size).swapaxes(0, 1)
    return Drawn(q.reshape(queries, heads * group, size), k, v)


def _head(generator, tokens, queries, size):
    normal = generator.standard_normal
    centres = normal((TOPICS, size))
    weights = generator.permutation(1 / np.arange(1, TOPICS + 1))
    moves = np.flatnonzero(np.r_[True, generator.random(tokens - 1) > STAY])
    topic = generator.choice(TOPICS, moves.size, p=weights / weights.sum())
    topic = np.repeat(topic, np.diff(np.r_[moves, tokens]))
    bias = np.zeros(size)
    channels = generator.choice(size, OUTLIERS, replace=False)
    bias[channels] = generator.choice([-8, 8], OUTLIERS)
    spread = np.exp(0.25 * normal((tokens, 1)))
    k = bias + 0.7 * centres[topic] + 0.7 * normal((tokens, size)) * spread
    sharpness = np.exp(generator.uniform(np.log(0.6), np.log(2.2)))
    needles = generator.integers(SINKS, tokens, (2, queries))
    wanted = generator.choice(TOPICS, queries, p=weights / weights.sum())
    q = 0.8 * centres[wanted] + 0.35 * (k[needles].sum(axis=0) - 2 * bias)
    q = sharpness * (q + 0.5 * normal((queries, size))) + 2 * np.sign(bias)
    v = normal((tokens, size))
    v *= np.exp(0.1 * normal((tokens, 1))) / np.linalg.norm(v, axis=1, keepdims=True)
    v[:SINKS] *= 0.1
    k[:SINKS] = _sinks(generator, bias, q, k[SINKS:])
    return q, k, v


def _sinks(generator, bias, q, others):
    """Keys along the outlier channels, as far out as gives them `SINK_MASS` on average."""
    scale = q.shape[1] ** -0.5
    base = bias + 0.3 * generator.standard_normal((SINKS, bias.size))
    rest = np.logaddexp.reduce(scale * q @ others.T, axis=1)
    low, high = -50.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        x = np.logaddexp.reduce(scale * q @ (base + middle * np.sign(bias)).T, axis=1)
        mass = np.mean(1 / (1 + np.exp(np.clip(rest - x, -500, 500))))
        low, high = (middle, high) if mass < SINK_MASS else (low, middle)
    return base + middle * np.sign(bias)
