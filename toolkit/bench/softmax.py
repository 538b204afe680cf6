"""Blockwise softmax attention against jax's own and PyTorch's fused form, with its memory."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import mixer, softmax_attention
from toolkit.attention.softmax.forms import attend_to_keys
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.softmax.tiles import largest_tile
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase, bound, weighted_gradient
from toolkit.bench.mixers.inputs import direction
from toolkit.bench.peers import plain_and_spread, torch_sdpa
from toolkit.measure import program_cost

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
HEADS, SIZE = 8, 64
ACCELERATOR = (4, 4096, 16, 128)  # batch, time, heads, head size on an accelerator
ROUNDED = 0.02  # of the root mean square, between forms that round to bfloat16 elsewhere


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

        for backward in (False, True):
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
                name=f"softmax {direction(backward)} causal B=1 T={time} H={HEADS} D={SIZE} "
                "float32",
                contenders=contenders,
                check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE),
                ours=ours,
                targets={"jax.nn": 5.0, "torch SDPA": 1 / 1.2 if cores == 1 else 1 / 1.3},
                note=f"modelled forward work: {flops / 1e9:.2f} GFLOP; "
                f"compiled temporary memory: {', '.join(memory)}",
            )


def accelerator_cases() -> Iterator[PlannedCase]:
    """Causal attention in bfloat16, forward and forward+backward: the plain call, and peers."""
    for group in (1, 4):
        for backward in (False, True):
            batch, time, heads, size = ACCELERATOR
            name = f"softmax {direction(backward)} causal B={batch} T={time} H={heads}"
            name += f"/{heads // group} D={size} bfloat16"
            yield PlannedCase(name, partial(_accelerator_case, group, backward))


def _accelerator_case(group: int, backward: bool, name: str) -> Case:
    batch, time, heads, size = ACCELERATOR
    shapes = heads, heads // group, heads // group, heads
    q, k, v, weight = (
        jax.random.normal(key, (batch, time, n, size), jnp.bfloat16)
        for key, n in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    )

    def ours(implementation: Any) -> Callable[..., jax.Array]:
        return lambda q, k, v: softmax_attention(q, k, v, implementation=implementation)[0]

    def stock(implementation: Any) -> Callable[..., jax.Array]:
        how = {"is_causal": True, "implementation": implementation}
        return partial(jax.nn.dot_product_attention, **how)

    forms = {"toolkit": ours(None), "toolkit, blockwise": ours("blockwise")}
    forms["jax.nn, xla"] = stock("xla")
    if jax.default_backend() == "gpu":
        forms |= {"toolkit, cudnn": ours("cudnn"), "jax.nn, cudnn": stock("cudnn")}
    else:
        forms |= {"toolkit, splash": ours("splash")}
    if importlib.util.find_spec("tokamax") is not None:
        tokamax = importlib.import_module("tokamax")
        forms["tokamax"] = partial(tokamax.dot_product_attention, is_causal=True)
    args = (weight, q, k, v) if backward else (q, k, v)
    contenders = {
        name: bound(jax.jit(weighted_gradient(form, 3) if backward else form), args)
        for name, form in forms.items()
    }
    flops = mixer("full").forward_flops(batch, time, heads, size, size)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(ROUNDED, norm="rms"),
        ours="toolkit",
        note=f"modelled forward work: {flops / 1e12:.3f} TFLOP",
    )
