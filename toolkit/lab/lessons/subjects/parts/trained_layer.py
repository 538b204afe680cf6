"""The layer that lesson 11 skips and compresses: what a small trained model makes of 128 bytes."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention.latent import principal_basis
from toolkit.attention.latent.weights import project
from toolkit.attention.sparse import build, choose, decode_step
from toolkit.lab.latent.slice import small_layers

TOKENS, EARLY = 128, 64
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)


class Trained(NamedTuple):
    """What attention in the second layer of a small trained model works on; queries are scaled."""

    q: np.ndarray  # [tokens, heads, key]
    k: np.ndarray  # [tokens, heads, key]
    v: np.ndarray  # [tokens, heads, value]
    weights: np.ndarray  # of the softmax [heads, tokens, tokens]


@functools.cache
def projected() -> tuple[np.ndarray, ...]:
    """What the layer makes of 128 bytes: queries without position, rotated ones, latents, rotary
    keys; and how keys and values come out of latents."""
    config, weights, _, x = small_layers()[1]
    made = project(x[:, :TOKENS], weights, jnp.arange(TOKENS)[None], config)
    rows = (np.asarray(each[0]) for each in made)
    return (*rows, np.asarray(weights.key_up), np.asarray(weights.value_up))


@functools.cache
def trained() -> Trained:
    """The layer on 128 bytes of text."""
    queries, rope_queries, latents, rope, key_up, value_up = projected()
    heads = queries.shape[1]
    rope = np.repeat(rope[:, None], heads, axis=1)
    q = small_layers()[1].config.scale * np.concatenate([queries, rope_queries], axis=-1)
    k = np.concatenate([np.einsum("tr,rhk->thk", latents, key_up), rope], axis=-1)
    scores = np.einsum("ihk,jhk->hij", q, k)
    p = np.where(np.tri(TOKENS, dtype=bool), np.exp(scores - scores.max(-1, keepdims=True)), 0)
    v = np.einsum("tr,rhv->thv", latents, value_up)
    return Trained(q, k, v, p / p.sum(-1, keepdims=True))


@functools.cache
def masses() -> tuple[np.ndarray, np.ndarray]:
    """Share of the softmax in the n heaviest tokens and in the n newest ones, n from 1 to 64."""
    p = trained().weights[:, EARLY:]
    heaviest = np.cumsum(-np.sort(-p, axis=-1), axis=-1)[..., :EARLY].mean(axis=(0, 1))
    rows = [p[:, i, : EARLY + i + 1][:, ::-1][:, :EARLY] for i in range(TOKENS - EARLY)]
    return heaviest, np.cumsum(np.stack(rows), axis=-1).mean(axis=(0, 1))


@functools.cache
def errors_by_share() -> dict[str, np.ndarray]:
    """Error of the heads' outputs by what is read, at each of `SHARES`."""
    seen = trained()
    queries, _, latents, _, key_up, value_up = projected()
    scale, size = small_layers()[1].config.scale, latents.shape[1]
    basis = principal_basis(jnp.asarray(latents))
    exact = np.einsum("hij,jhv->ihv", seen.weights, seen.v)
    place = np.arange(TOKENS)
    rank = np.argsort(np.argsort(-seen.weights, axis=-1), axis=-1)
    errors: dict[str, list[float]] = {"heaviest": [], "latents": [], "newest": []}
    for share in SHARES:
        most = np.ceil(share * (place + 1))[:, None]
        for name, mask in (("heaviest", rank < most), ("newest", place[:, None] - place < most)):
            p = seen.weights * mask
            p /= p.sum(axis=-1, keepdims=True)
            errors[name].append(_error(np.einsum("hij,jhv->ihv", p, seen.v), exact))
        first = basis[:, : round(share * size)]
        lost = latents - latents @ first @ first.T
        scores = scale * np.einsum("ihk,rhk,jr->hij", queries, key_up, lost, optimize=True)
        p = seen.weights * np.exp(-scores)
        p /= p.sum(axis=-1, keepdims=True)
        out = np.einsum("hij,jr,rhv->ihv", p, latents - lost, value_up, optimize=True)
        errors["latents"].append(_error(out, exact))
    return {name: np.array(each) for name, each in errors.items()}


def read_by(words: str) -> tuple[float, float, float, float]:
    """What the last query loses by a system and budget, such as "quest:48": the recovered mass, the
    relative error of the output, tokens and bytes read per head, index included."""
    seen, chosen = trained(), choose(words)
    sinks = 4 if words.startswith("window") else 0
    selector = replace(chosen.selector, sinks=sinks, recent=1)
    keys, values = (jnp.asarray(np.moveaxis(x, 1, 0)[None]) for x in (seen.k, seen.v))
    cache = build(selector, keys, values, jnp.array([TOKENS]))
    q = jnp.asarray(seen.q[-1:])
    found = decode_step(cache, q, selector, chosen.budget, scale=1.0)
    exact = np.einsum("hj,jhv->hv", seen.weights[:, -1], seen.v)[None]
    scores = np.einsum("qhk,jhk->qhj", q, seen.k)
    mass = np.exp(np.asarray(found.lse) - np.log(np.exp(scores).sum(axis=-1)))
    read = (np.asarray(each) for each in (mass, found.tokens, found.bytes_read))
    mass, tokens, read = (float(each.mean()) for each in read)
    jax.clear_caches()  # every operation was a program of its own; small machines have 1 GB
    return mass, _error(np.asarray(found.out), exact), tokens, read


def _error(out: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
