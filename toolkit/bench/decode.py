"""One token of decoding: Gated DeltaNet's constant step, and softmax at the speed of memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import (
    KVCache,
    gated_delta_net,
    gated_delta_net_step,
    mixer,
    softmax_attention_step,
)
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case
from toolkit.bench.mixer_inputs import mixer_inputs
from toolkit.bench.peers import torch_sdpa

TOLERANCE = 1e-4
HEADS, SIZE = 8, 64
CONTEXTS = (1024, 8192, 131072)


def cases(cores: int) -> Iterator[Case]:
    """GDN's step after contexts of growing length; softmax's step at 131,072 tokens.

    Args:
        cores: cores this process may use.

    Returns:
        The comparisons.

    Source:
        Peer: torch `scaled_dot_product_attention` on the same cache.
    """
    contenders = {f"after {context} tokens": _delta_step(context) for context in CONTEXTS}
    yield Case(
        name=f"gated_delta_net_step B=1 H={HEADS} D={SIZE} float32",
        contenders=contenders,
        check=_finite,
        ours=f"after {CONTEXTS[0]} tokens",
        note=f"state: {HEADS * SIZE * SIZE * 4 / 1024:.0f} KiB, whatever the context",
    )

    context = CONTEXTS[-1]
    q, new_key, new_value = (
        jax.random.normal(key, (1, HEADS, SIZE)) for key in jax.random.split(jax.random.key(0), 3)
    )
    keys, values = (
        jax.random.normal(key, (1, HEADS, SIZE, context))
        for key in jax.random.split(jax.random.key(1), 2)
    )
    # The last slot is free: the step writes its token there and attends to all of them.
    cache = KVCache(keys, values, jnp.int32(context - 1))
    whole = [
        np.concatenate([np.asarray(x)[..., :-1], np.asarray(new)[..., None]], -1)
        for x, new in ((keys, new_key), (values, new_value))
    ]
    peer = torch_sdpa(
        [np.asarray(q)[:, None], *(np.moveaxis(x, 3, 1) for x in whole)],
        None,
        cores,
        is_causal=False,
    )
    softmax: dict[str, Callable[[], Any]] = {"toolkit": _softmax_step(q, new_key, new_value, cache)}
    if peer is not None:
        softmax["torch SDPA"] = lambda: peer()[:, 0]
    yield Case(
        name=f"softmax_attention_step B=1 H={HEADS} D={SIZE} context={context} float32",
        contenders=softmax,
        check=agree(TOLERANCE),
        ours="toolkit",
        targets={"torch SDPA": 1 / 1.1},
        note=f"cache: {2 * HEADS * SIZE * context * 4 / 2**20:.0f} MiB, read once a token",
    )


def _softmax_step(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache
) -> Callable[[], jax.Array]:
    """A step that always writes the same slot, so that it can be repeated."""

    def step(cache: KVCache) -> tuple[jax.Array, KVCache]:
        out, new = softmax_attention_step(q, k, v, cache)
        return out, KVCache(new.keys, new.values, cache.length)

    jitted = jax.jit(step, donate_argnums=0)
    held = [cache]

    def call() -> jax.Array:
        out, held[0] = jitted(held[0])
        return out

    return call


def _delta_step(context: int) -> Callable[[], Any]:
    """The step after a context: the state has the same size after any number of tokens."""
    q, k, v, g, beta = mixer_inputs(mixer("gdn"), min(context, 1024), HEADS, SIZE)
    jitted = jax.jit(gated_delta_net_step)
    # Continuing a 1024-token state reaches any longer context without an hour of prefill.
    state = None
    for _ in range(max(1, context // 1024)):
        _, state = gated_delta_net(q, k, v, g, beta, initial_state=state)
    arguments = (q[:, -1], k[:, -1], v[:, -1], g[:, -1], beta[:, -1], state)
    return lambda: jitted(*arguments)


def _finite(results: Mapping[str, Any]) -> None:
    for name, result in results.items():
        if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(result)):
            raise ValueError(f"{name!r} gave a value that is not finite")
