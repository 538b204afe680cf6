"""Answers to the exercises on what to skip and what to compress."""

import jax.numpy as jnp
import numpy as np


def attend_selected(q, k, v, mask):
    scores = k @ q
    every = np.exp(scores - scores.max())
    kept = np.where(mask, every, 0)
    return kept @ v / kept.sum(), kept.sum() / every.sum()


def not_divided(q, k, v, mask):
    every = np.exp(k @ q)
    every = every / every.sum()
    kept = np.where(mask, every, 0)
    return kept @ v, kept.sum()


def zeroed_scores(q, k, v, mask):
    """A skipped token gets score 0, and with it a weight."""
    out, _ = attend_selected(q, np.where(mask[:, None], k, 0), v, mask | True)
    return out, attend_selected(q, k, v, mask)[1]


def overflowing(q, k, v, mask):
    with np.errstate(over="ignore", invalid="ignore"):
        every = np.exp(k @ q)
        kept = np.where(mask, every, 0)
        return kept @ v / kept.sum(), kept.sum() / every.sum()


def page_bound(q, largest, smallest):
    return np.maximum(q * largest, q * smallest).sum(axis=-1)


def latent_scores(q, key_up, latents):
    return jnp.einsum("hr,tr->ht", jnp.einsum("rhk,hk->hr", key_up, q), latents)


def expanded(q, key_up, latents):
    return jnp.einsum("thk,hk->ht", jnp.einsum("tr,rhk->thk", latents, key_up), q)


def best_basis(latents):
    return np.linalg.eigh(latents.T @ latents)[1][:, ::-1]


ANSWERS = {
    "attend_selected": (
        attend_selected,
        [
            (not_divided, "divide by their sum over the selection"),
            (zeroed_scores, "not the softmax over the selected tokens alone"),
            (overflowing, "subtract the largest"),
            (
                lambda q, k, v, mask: attend_selected(q, k, v, mask | True),
                "attention to all tokens",
            ),
            (
                lambda q, k, v, mask: (attend_selected(q, k, v, mask)[0], mask.mean()),
                "the share of the tokens",
            ),
            (lambda q, k, v, mask: (attend_selected(q, k, v, mask)[0], 1.0), "The mass is 1"),
            (lambda q, k, v, mask: attend_selected(q, k, v, mask)[0], "two things"),
        ],
    ),
    "page_bound": (
        page_bound,
        [
            (lambda q, high, low: high @ q, "No bound: a key among"),
            (lambda q, high, low: (high + low) @ q / 2, "Which end of a channel's range"),
            (
                lambda q, high, low: np.maximum(abs(high), abs(low)) @ abs(q),
                "looser than it needs to be",
            ),
            (lambda q, high, low: np.maximum(high @ q, low @ q), "No bound"),
            (lambda q, high, low: high, "returned shape [8, 48]; wanted [8]"),
        ],
    ),
    "latent_scores": (
        latent_scores,
        [
            (expanded, "project the query, not the tokens"),
            (lambda q, up, c: 2 * latent_scores(q, up, c), "not the scores"),
            (lambda q, up, c: latent_scores(q, up, c).T, "returned shape [128, 4]"),
        ],
    ),
    "best_basis": (
        best_basis,
        [
            (lambda c: np.eye(c.shape[1]), "is possible"),
            (lambda c: best_basis(c)[:, ::-1], "order by falling energy"),
            (lambda c: 2 * best_basis(c), "the norm of a latent"),
            (lambda c: best_basis(c)[:, :32], "returned shape [64, 32]"),
        ],
    ),
}
