"""Queries, keys and values of grouped heads: peaked on topics, flat, and Gaussian."""

from typing import NamedTuple

import numpy as np

TOPICS, RUN = 64, 20  # how many, and tokens that follow one on average


class Drawn(NamedTuple):
    """Rows of queries [queries, heads, size], and what they attend to [key heads, tokens, size]."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def topics(seed, group, *, key_heads=4, tokens=4096, queries=8, size=128, sharpness=1.5):
    """Every query head asks for a topic of its own; runs of keys are about one topic each."""
    drawn = []
    for head in range(key_heads):
        generator = np.random.default_rng((seed, head))
        normal = generator.standard_normal
        centres = normal((TOPICS, size))
        moves = np.flatnonzero(np.r_[True, generator.random(tokens - 1) < 1 / RUN])
        topic = generator.integers(TOPICS, size=moves.size)
        topic = np.repeat(topic, np.diff(np.r_[moves, tokens]))
        keys = 0.7 * centres[topic] + 0.7 * normal((tokens, size))
        asked = centres[generator.integers(TOPICS, size=(queries, group))]
        q = sharpness * (asked + 0.5 * normal((queries, group, size)))
        drawn.append((q, keys, normal((tokens, size))))
    return _drawn(*(np.stack(x) for x in zip(*drawn, strict=True)))


def gaussian(seed, group, *, key_heads=4, tokens=4096, queries=8, size=128, sharpness=1.0):
    """Independent normal numbers: flat at a sharpness of 1, with some large weights at 2."""
    normal = np.random.default_rng((seed, 99)).standard_normal
    q = sharpness * normal((key_heads, queries, group, size))
    return _drawn(q, normal((key_heads, tokens, size)), normal((key_heads, tokens, size)))


def _drawn(q, keys, values):
    q = np.moveaxis(q, 0, 1).reshape(q.shape[1], -1, q.shape[-1])
    return Drawn(*(x.astype(np.float32) for x in (q, keys, values)))


def shares(drawn):
    """The softmax of every query head [queries, key heads, group, tokens]."""
    q = drawn.q.reshape(len(drawn.q), drawn.keys.shape[0], -1, drawn.q.shape[-1])
    scores = np.einsum("qhgd,hsd->qhgs", q, drawn.keys) * drawn.q.shape[-1] ** -0.5
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
