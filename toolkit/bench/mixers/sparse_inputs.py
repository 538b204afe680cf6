"""Queries, keys and values for the benchmarks of sparse attention, and the systems that read them.

They are heavy-tailed, as a model's are and normal numbers are not: topics that stay for a while,
channels with a large bias, sinks.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from toolkit.attention import sparse

HEADS, SIZE, QUERIES = 8, 128, 8  # heads of keys
# system -> settings, budget (None: as many tokens as the context's), least ratio wanted at
# the longest context, against each dense step.
SYSTEMS: dict[str, tuple[dict[str, Any], sparse.MassTarget | None, float]] = {
    "window": ({}, None, 5),
    "quest": ({"page_size": 64}, None, 5),
    "tactic": ({"cluster_size": 32}, None, 5),
    "tactic to mass 0.9": ({"cluster_size": 32}, sparse.MassTarget(0.9, 2048), 5),
    "hata": ({}, None, 5),
    "pqcache": ({}, None, 5),
    "oracle": ({}, None, 1),
}


@cache
def heavy_tailed(context: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [queries, heads, key], keys and values [heads, context, key] of one sequence."""
    random = np.random.default_rng(seed)
    normal = partial(random.standard_normal, dtype=np.float32)
    topics = 64
    keys = np.empty((HEADS, context, SIZE), np.float32)
    values, queries = np.empty_like(keys), np.empty((QUERIES, HEADS, SIZE), np.float32)
    for head in range(HEADS):
        centres, bias = normal((topics, SIZE)), np.zeros(SIZE, np.float32)
        outliers = random.choice(SIZE, 4, replace=False)
        bias[outliers] = 8 * random.choice([-1, 1], 4)
        chances = random.permutation(1 / np.arange(1, topics + 1))
        drawn = random.choice(topics, context, p=chances / chances.sum())
        changes = np.where(random.random(context) < 0.05, np.arange(context), 0)
        topic = drawn[np.maximum.accumulate(changes)]
        spread = np.exp(0.25 * normal((context, 1)))
        k = bias + 0.7 * centres[topic] + 0.7 * normal((context, SIZE)) * spread
        sharpness = np.exp(random.uniform(np.log(0.6), np.log(2.2)))
        needles = k[random.integers(4, context, (2, QUERIES))].sum(axis=0) - 2 * bias
        of_query = centres[random.integers(0, topics, QUERIES)]
        q = 0.8 * of_query + 0.35 * needles + 0.5 * normal((QUERIES, SIZE))
        q = sharpness * q + np.where(bias != 0, 2 * np.sign(bias), 0)
        # Sinks along the outliers, as long as makes them hold some 0.3 of the softmax.
        along = np.sign(bias)
        scores = (q @ k.T) * SIZE**-0.5
        most = scores.max(axis=1)
        total = most + np.log(np.exp(scores - most[:, None]).sum(axis=1))
        sinks = bias + 0.3 * normal((4, SIZE))
        missing = total + np.log(0.43 / 4) - (q @ sinks.T).mean(axis=1) * SIZE**-0.5
        k[:4] = sinks + (missing * SIZE**0.5 / (q @ along)).mean() * along
        v = normal((context, SIZE))
        v *= np.exp(0.1 * normal((context, 1))) / np.linalg.norm(v, axis=1, keepdims=True)
        v[:4] *= 0.1
        keys[head], values[head], queries[:, head] = k, v, q
    return queries, keys, values


def grouped(queries: np.ndarray, group: int) -> np.ndarray:
    """So many queries for each key head, those of the steps to come [queries, heads, key]."""
    rows = [np.roll(queries, -step, axis=0) for step in range(group)]
    return np.stack(rows, axis=2).reshape(len(queries), -1, SIZE)
