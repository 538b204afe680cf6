"""The forms of a mixture of experts side by side, and `jax.lax.ragged_dot`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, bound, weighted_gradient
from toolkit.experts import mixture, route, router_logits, silu_gate
from toolkit.experts.products import Weights, grouped

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
SIZES = ((512, 8, 2, 256, 512), (256, 32, 4, 128, 64), (2, 32, 4, 128, 64))
"""Tokens, experts, experts per token, width and hidden size of each case."""


def cases(cores: int) -> Iterator[Case]:
    """Forward and forward+backward of few wide experts, of many narrow ones, and of a step."""
    for tokens, experts, chosen, width, hidden in SIZES:
        shapes = (
            (tokens, width),
            (experts, width, hidden),
            (experts, width, hidden),
            (experts, hidden, width),
        )
        keys = jax.random.split(jax.random.key(0), 6)
        x, gate, up, down = (
            jax.random.normal(key, shape) * width**-0.5
            for key, shape in zip(keys[:4], shapes, strict=True)
        )
        weight = jax.random.normal(keys[4], x.shape)
        logits = router_logits(x * width**0.5, jax.random.normal(keys[5], (width, experts)))
        routing = route(logits, chosen)

        def form(name: str, x: jax.Array, *weights: jax.Array, routing: Any = routing) -> jax.Array:
            return mixture(x, routing, *weights, implementation=name)  # pyright: ignore

        def ragged(x: jax.Array, *weights: jax.Array, routing: Any = routing) -> jax.Array:
            def times(sizes: jax.Array, rows: jax.Array, matrices: jax.Array) -> jax.Array:
                return jax.lax.ragged_dot(rows, matrices, sizes)

            out = grouped(times, 1, silu_gate, x, routing.experts, Weights(*weights))
            return (routing.weights[..., None] * out).sum(1)

        for direction in ("forward", "forward+backward"):
            is_backward = direction == "forward+backward"
            args = (weight, x, gate, up, down) if is_backward else (x, gate, up, down)
            contenders: dict[str, Callable[[], Any]] = {}
            forms: dict[str, Callable] = {
                f"toolkit, {name}": functools.partial(form, name)
                for name in ("blocks", "dense", "padded", "gather")
                if name != "gather" or 2 * routing.experts.size <= experts
            }
            for name, function in {**forms, "jax.lax.ragged_dot": ragged}.items():
                program = jax.jit(weighted_gradient(function, 4) if is_backward else function)
                contenders[name] = bound(program.lower(*args).compile(), args)
            flops = 6 * tokens * chosen * width * hidden * (3 if is_backward else 1)
            yield Case(
                name=f"experts {direction} T={tokens} E={experts} k={chosen} D={width} F={hidden} "
                "float32",
                contenders=contenders,
                check=agree(GRADIENT_TOLERANCE if is_backward else FORWARD_TOLERANCE),
                ours="toolkit, blocks",
                note=f"modelled work of the chosen experts: {flops / 1e9:.3f} GFLOP",
            )
