"""Training at 600M parameters on one GPU: LT2's looped transformer and the same layers run once.

Beside ours stands the model as plain JAX: a dict of arrays, `jax.nn.dot_product_attention`, optax.
Both compute in bfloat16 from float32 parameters, and recompute each loop in the backward pass. The
share of the floor that is printed is the model FLOPs utilisation: 6 FLOPs per parameter that
multiplies, loop and token, and those of the scores (recomputing not counted), over the chip's peak.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.attention import MIXERS
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.training import cross_entropy, jax_step, our_loss, plain_parameters, rms_norm
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.layers import rotary_embedding
from toolkit.looped.presets import PRESETS
from toolkit.measure import published_peak

OURS, PLAIN = "toolkit", "plain JAX"
TOLERANCE = 0.02  # of the losses of the first and the second update, in bfloat16
BATCH, TIME = 8, 2048


def cases(cores: int) -> Iterator[PlannedCase]:
    """16,384 tokens per update; on GPUs alone, elsewhere it would take hours."""
    if jax.default_backend() != "gpu":
        print("suite utilisation times 600M parameters: it wants a GPU, and runs no case here.")
        return
    looped = dataclasses.replace(PRESETS["lt2-looped-600m"], remat=True)
    for name, loops in (("looped 600m, 4 loops", 4), ("plain 600m", 1)):
        config = dataclasses.replace(looped, loops=loops)
        title = f"training step, {name}, B={BATCH} T={TIME} bfloat16"
        yield PlannedCase(title, partial(utilisation_case, config, BATCH, TIME))


def utilisation_case(config: LoopedConfig, batch: int, time: int, name: str) -> Case:
    """The step of a model of "full" layers, ours and plain."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, time + 1))
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    params = plain_parameters(model)
    work = model_flops(config, params, batch, time)
    # Copies: a step gives its arrays away, and the two begin with the same.
    state = jax.tree.map(jnp.copy, nnx.state(model))
    contenders = {
        OURS: jax_step(our_loss(model), state, tokens),
        PLAIN: jax_step(partial(_plain_loss, config), params, tokens),
    }
    peak = published_peak(jax.devices()[0].device_kind)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(TOLERANCE),
        ours=OURS,
        targets={PLAIN: 1.0},
        floor=None if peak is None else work / peak.flops_per_second,
        note=f"{work:.3g} model FLOPs per update; the share of the floor is the MFU",
    )


def model_flops(config: LoopedConfig, params: dict[str, Any], batch: int, time: int) -> float:
    """FLOPs of a step that the model asks for: matrices and scores, backward twice the forward."""
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(params["layers"]) if x.ndim == 2)
    head = math.prod(params["table"].shape)
    size = config.width // config.heads
    scores = MIXERS["full"].forward_flops(batch, time, config.heads, size, size)
    products = 2 * batch * time * (config.loops * weights + head)
    return 3.0 * (products + config.loops * len(config.layers) * scores)


def _plain_loss(config: LoopedConfig, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    dtype = config.compute_dtype
    table, layers = params["table"].astype(dtype), params["layers"]
    start = table[tokens[:, :-1]]
    positions = jnp.arange(start.shape[1])[None]
    heads = partial(jnp.reshape, shape=(*start.shape[:2], config.heads, -1))

    def block(h: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        w = {name: x.astype(dtype) for name, x in layer.items()}
        x = rms_norm(h, layer["norm"])
        q, k, v = (heads(x @ w[name]) for name in "qkv")
        q, k = (rotary_embedding(x, positions, theta=config.rope_theta) for x in (q, k))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h += mixed.reshape(h.shape) @ w["o"]
        x = rms_norm(h, layer["norm_2"])
        return h + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    @jax.checkpoint
    def loop(h: jax.Array, rho: jax.Array) -> tuple[jax.Array, None]:
        out = h
        for layer in layers:
            out = block(out, layer)
        return out + rho.astype(dtype) * h, None

    h, _ = jax.lax.scan(loop, start, params["rho"])
    h = rms_norm(h, params["norm"])
    logits = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.float32)
    return cross_entropy(logits, tokens[:, 1:])
