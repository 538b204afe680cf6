"""What a token costs as the context grows: softmax against Gated DeltaNet, measured here."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from toolkit.attention import MIXERS, KVCache, gated_delta_net, softmax_attention_step
from toolkit.measure import time_contenders

PREFILL_CONTEXTS = (512, 1024, 2048, 4096, 8192)
DECODE_CONTEXTS = (1024, 4096, 16384, 65536)
HEADS, SIZE = 8, 64
NAMES = ("full", "gdn")
REFERENCE_TOLERANCE = 1e-4


def mixer_inputs(name: str, time: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random inputs of one mixer with unit keys, mild decay and beta in (0, 1).

    Args:
        name: a key of `MIXERS`.
        time: tokens.
        seed: of the draw.

    Returns:
        q, k, v `[1, time, HEADS, SIZE]`, then the mixer's gates `[1, time, HEADS]`.

    Cost:
        Five random draws.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k, v = (jax.random.normal(key, (1, time, HEADS, SIZE)) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    gates = {
        "g": -jnp.exp(jax.random.uniform(keys[3], (1, time, HEADS), minval=-6.0, maxval=0.0)),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (1, time, HEADS))),
    }
    return q, k, v, *(gates[gate] for gate in MIXERS[name].gates)


def measure_costs() -> dict[str, list[dict[str, Any]]]:
    """Seconds of a prefill and of a decode step at each context, and the decode state's bytes.

    Every mixer is first compared with its reference on 256 tokens; nothing is timed otherwise.

    Returns:
        {"prefill": rows, "decode": rows}; a row holds mixer, context, seconds, spread, bytes.

    Raises:
        RuntimeError: when a mixer disagrees with its reference.

    Cost:
        About 15 seconds on two cores and 400 MB.
    """
    for name in NAMES:
        _compare_with_reference(name)
    rows: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
    for context in tqdm(PREFILL_CONTEXTS, desc="prefill", unit="context"):
        rows["prefill"] += _time(context, {name: _prefill(name, context) for name in NAMES})
    for context in tqdm(DECODE_CONTEXTS, desc="decode", unit="context"):
        steps = {"full": _softmax_step(context), "gdn": _delta_step()}
        rows["decode"] += _time(context, steps)
    for row in rows["decode"]:
        row["bytes"] = state_bytes(row["mixer"], row["context"])
    return rows


def state_bytes(name: str, context: int) -> int:
    """Bytes a mixer keeps to write the next token (modelled by its row of `MIXERS`).

    Args:
        name: a key of `MIXERS`.
        context: tokens read so far.

    Returns:
        Bytes for one sequence in float32.

    Cost:
        Arithmetic.
    """
    return MIXERS[name].state_bytes(1, context, HEADS, SIZE, SIZE)


def _time(context: int, calls: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    timings = time_contenders(calls, rounds=3)
    return [
        {"mixer": name, "context": context, "seconds": timing.median, "spread": timing.spread}
        for name, timing in timings.items()
    ]


def _compare_with_reference(name: str) -> None:
    arguments = mixer_inputs(name, 256)
    fast, slow = MIXERS[name].function(*arguments)[0], MIXERS[name].reference(*arguments)[0]
    error = float(jnp.max(jnp.abs(fast - slow)) / jnp.max(jnp.abs(slow)))
    if not error < REFERENCE_TOLERANCE:
        raise RuntimeError(
            f"{name}: differs from its reference by {error:.1e}, "
            f"wanted less than {REFERENCE_TOLERANCE:.0e}; its cost is not measured"
        )


def _prefill(name: str, context: int) -> Callable[[], jax.Array]:
    arguments = mixer_inputs(name, context)
    function = jax.jit(lambda *arguments: MIXERS[name].function(*arguments)[0])
    return functools.partial(function, *arguments)


def _softmax_step(context: int) -> Callable[[], jax.Array]:
    q, k, v = (x[:, 0] for x in mixer_inputs("full", 1))
    random = np.random.default_rng(0)
    shape = (1, HEADS, SIZE, context)
    keys, values = (jnp.asarray(random.standard_normal(shape, np.float32)) for _ in range(2))
    held = [KVCache(keys, values, jnp.int32(context - 1))]

    def step(cache: KVCache) -> tuple[jax.Array, KVCache]:
        out, new = softmax_attention_step(q, k, v, cache)
        # The same slot is written every time, so the call can be repeated.
        return out, KVCache(new.keys, new.values, cache.length)

    jitted = jax.jit(step, donate_argnums=0)

    def call() -> jax.Array:
        out, held[0] = jitted(held[0])
        return out

    return call


def _delta_step() -> Callable[[], Any]:
    arguments = mixer_inputs("gdn", 256)
    _, state = gated_delta_net(*arguments)
    token = [x[:, -1] for x in arguments]
    return functools.partial(jax.jit(MIXERS["gdn"].step), *token, state)
