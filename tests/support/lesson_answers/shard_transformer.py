"""Answers to the exercises on a sharded transformer block."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from toolkit.lab.lessons.subjects.shard_transformer import MEGATRON, SHAPES, three_products


def feed_forward(x, up, down, bias, axis):
    return jax.lax.psum(jax.nn.gelu(x @ up) @ down, axis) + bias


def gathered(x, up, down, bias, axis):
    up = jax.lax.all_gather(up, axis, axis=1, tiled=True)
    down = jax.lax.all_gather(down, axis, axis=0, tiled=True)
    return jax.nn.gelu(x @ up) @ down + bias


def one_product(h, weights):
    stacked = jnp.stack([weights[name] for name in ("query", "key", "value")])
    query, key, value = jnp.einsum("btw,cwhs->cbths", h, stacked)
    return query, key, value


ANSWERS = {
    "megatron": (
        lambda: MEGATRON,
        [
            (lambda: dict.fromkeys(SHAPES, P()), "query: every device holds 4 KiB"),
            (lambda: MEGATRON | {"out": P(None, "model")}, "all-to-all"),
            (lambda: MEGATRON | {"up": P("model")}, "It runs, but sends 39.2 KiB"),
            (lambda: MEGATRON | {"down": P(None, "model")}, "all-gather"),
            (lambda: MEGATRON | {"up": ("model",)}, "up is tuple; wanted a PartitionSpec"),
            (lambda: {"up": P()}, "Wanted a dict"),
            (lambda: MEGATRON | {"up": P("modle")}, "raised ValueError"),
        ],
    ),
    "feed_forward": (
        feed_forward,
        [
            (lambda x, up, down, bias, axis: jax.nn.gelu(x @ up) @ down + bias, "different"),
            (
                lambda x, up, down, bias, axis: jax.lax.psum(
                    jax.nn.gelu(x @ up) @ down + bias, axis
                ),
                "The bias is in the sum four times",
            ),
            (
                lambda x, up, down, bias, axis: feed_forward(x, up, down, bias, axis) - bias,
                "All devices agree, but are off",
            ),
            (gathered, "Right, but it needs all-gather"),
            (lambda x, up, down, bias, axis: x[0], "wanted [4, 16, 32]"),
            (lambda x, up, down, bias, axis: x + 1 / 0, "<lambda> raised ZeroDivisionError"),
        ],
    ),
    "projections": (
        one_product,
        [
            (three_products, "send 36 KiB over 'model'; 24 are enough"),
            (lambda h, weights: one_product(h, weights)[::-1], "query is not the product"),
            (lambda h, weights: one_product(h, weights)[:2], "Wanted three arrays"),
            (lambda h, weights: (h, h, h), "query has shape [2, 16, 32]"),
        ],
    ),
}
