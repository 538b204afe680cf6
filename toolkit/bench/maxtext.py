"""Gated DeltaNet as MaxText calls it, against MaxText's own form in JAX, where it is installed.

Both in float32, of which MaxText's products are at the highest precision. What the compiler counts
as temporary memory stands beside the seconds, and how far the second of two packed documents is
from the same document alone: MaxText's function knows no documents, ours is told their numbers.
"""

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.attention import chunk_gated_delta_rule, log_decay
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, bound, weighted_gradient
from toolkit.bench.peers import plain_and_spread
from toolkit.measure import program_cost

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
TIME, HEADS, SIZE = 4096, 8, 128
OURS, PEER = "toolkit", "maxtext"
# The arguments after the five arrays: of a chunk, the initial state, unit length, the dtype.
HOW = 64, None, True, jnp.float32


def cases(cores: int) -> Iterator[Case]:
    """Forward, and forward and backward, of the layer's core in Qwen3-Next's head size."""
    keys = jax.random.split(jax.random.key(0), 6)
    *tokens, weight = (jax.random.normal(key, (1, TIME, HEADS, SIZE)) for key in keys[:4])
    decay, strength = (jax.random.normal(key, (1, TIME, HEADS)) for key in keys[4:])
    arrays = *tokens, log_decay(decay, jnp.zeros(HEADS)), jax.nn.sigmoid(strength)
    functions: dict[str, Callable[..., Any]] = {OURS: chunk_gated_delta_rule}
    if importlib.util.find_spec("maxtext") is not None:
        functions[PEER] = pkgutil.resolve_name("maxtext.models.qwen3:jax_chunk_gated_delta_rule")
    for direction in ("forward", "forward+backward"):
        backward = direction == "forward+backward"
        args = (weight, *arrays) if backward else arrays
        forms = {
            name: weighted_gradient(partial(_output, function), 5)
            if backward
            else partial(_output, function)
            for name, function in functions.items()
        }
        contenders = plain_and_spread(OURS, forms[OURS], args, cores)
        compiled = {name: jax.jit(form).lower(*args).compile() for name, form in forms.items()}
        if PEER in compiled:
            contenders[PEER] = bound(compiled[PEER], args)
        yield Case(
            name=f"maxtext gated delta rule {direction} B=1 T={TIME} H={HEADS} D={SIZE} float32",
            contenders=contenders,
            check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE),
            ours=OURS,
            targets={PEER: 3.0},
            facts=partial(_facts, compiled, {} if backward else functions, arrays),
        )


def _output(function: Callable[..., Any], *arrays: jax.Array, **more: jax.Array) -> jax.Array:
    return function(*arrays, *HOW, **more)[0]


def _facts(
    compiled: Mapping[str, Any], functions: Mapping[str, Any], arrays: tuple[jax.Array, ...]
) -> dict[str, dict[str, tuple[Any, ...]]]:
    facts: dict[str, dict[str, tuple[Any, ...]]] = {
        name: {"temporary memory": (program_cost(program).temp_bytes / 2**20, "MiB")}
        for name, program in compiled.items()
    }
    half = TIME // 2
    documents = (jnp.arange(TIME, dtype=jnp.int32) // half)[None]
    for name, function in functions.items():
        run = jax.jit(partial(_output, function))
        more = {"segment_ids": documents} if name == OURS else {}
        alone = run(*(x[:, half:] for x in arrays))
        error = float(abs(run(*arrays, **more)[:, half:] - alone).max() / abs(alone).max())
        facts[name]["error of the second packed document"] = error, "1", "measured"
    return facts
