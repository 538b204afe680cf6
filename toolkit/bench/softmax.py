"""Blockwise softmax attention against jax's own and PyTorch's fused form, with its memory."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from toolkit.attention import mixer, softmax_attention
from toolkit.attention.softmax.forms import attend_to_keys
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.softmax.tiles import largest_tile
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, bound, weighted_gradient
from toolkit.bench.peers import plain_and_spread, torch_sdpa
from toolkit.measure import program_cost

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
HEADS, SIZE = 8, 64


def cases(cores: int) -> Iterator[Case]:
    """Causal attention forward and forward+backward at 2048 and 4096 tokens."""
    for time in (2048, 4096):
        other_side = 512 if largest_tile(time) == 256 else 256  # than what follows the cores
        q, k, v, weight = (
            jax.random.normal(key, (1, time, HEADS, SIZE))
            for key in jax.random.split(jax.random.key(0), 4)
        )

        def blockwise(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return softmax_attention(q, k, v, implementation="blockwise")[0]

        def other_tiles(
            q: jax.Array, k: jax.Array, v: jax.Array, other_side: int = other_side
        ) -> jax.Array:
            inputs = Inputs(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1))
            options = Options(SIZE**-0.5)
            return attend_to_keys(inputs, Context(), options, "blockwise", other_side)[0]

        def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        for direction in ("forward", "forward+backward"):
            backward = direction == "forward+backward"
            args = (weight, q, k, v) if backward else (q, k, v)
            contenders: dict[str, Callable[[], Any]] = {}
            memory = []
            for name, form in {
                "toolkit, blockwise": blockwise,
                f"toolkit, tiles of {other_side}": other_tiles,
                "jax.nn": dense,
            }.items():
                compiled = (
                    jax.jit(weighted_gradient(form, 3) if backward else form).lower(*args).compile()
                )
                contenders[name] = bound(compiled, args)
                memory.append(f"{name} {program_cost(compiled).temp_bytes / 2**20:.0f} MiB")
            form = weighted_gradient(blockwise, 3) if backward else blockwise
            spread = plain_and_spread("toolkit, blockwise", form, args, cores)
            ours = list(spread)[-1]
            contenders = spread | contenders
            peer = torch_sdpa(
                [np.asarray(x) for x in (q, k, v)], np.asarray(weight) if backward else None, cores
            )
            if peer is not None:
                contenders["torch SDPA"] = peer
            flops = mixer("full").forward_flops(1, time, HEADS, SIZE, SIZE)
            yield Case(
                name=f"softmax {direction} causal B=1 T={time} H={HEADS} D={SIZE} float32",
                contenders=contenders,
                check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE),
                ours=ours,
                targets={"jax.nn": 5.0, "torch SDPA": 1 / 1.2 if cores == 1 else 1 / 1.3},
                note=f"modelled forward work: {flops / 1e9:.2f} GFLOP; "
                f"compiled temporary memory: {', '.join(memory)}",
            )
