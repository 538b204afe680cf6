"""flash-linear-attention's Triton kernels, called as the rows of `MIXERS` are.

Its layouts are ours: [batch, time, heads, size]. They need torch with CUDA; without that or the
package there is no contender. Both sides get the same numbers: log-decays in float32, all else in
bfloat16, except that our strengths are float32.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax

from toolkit.attention import MIXERS, Mixer

# row of `MIXERS` -> (module below fla.ops, function, arguments from inputs and gates)
_FORMS: dict[str, tuple[str, str, Callable[..., dict[str, Any]]]] = {
    "linear": (
        "linear_attn",
        "chunk_linear_attn",
        lambda q, k, v: {"q": q, "k": k, "v": v, "normalize": False},
    ),
    "retention": ("retention", "chunk_retention", lambda q, k, v: {"q": q, "k": k, "v": v}),
    "mamba2": (
        "simple_gla",
        "chunk_simple_gla",
        lambda q, k, v, g, dt: {"q": q, "k": k, "v": v * dt[..., None], "g": g, "scale": 1.0},
    ),
    "gla": ("gla", "chunk_gla", lambda q, k, v, g: {"q": q, "k": k, "v": v, "g": g}),
    "hgrn2": (
        "gla",
        "chunk_gla",
        lambda q, v, g: {"q": q, "k": (-g.expm1()).to(q.dtype), "v": v, "g": g},
    ),
    "delta": (
        "delta_rule",
        "chunk_delta_rule",
        lambda q, k, v, beta: {"q": q, "k": k, "v": v, "beta": beta},
    ),
    "gdn": (
        "gated_delta_rule",
        "chunk_gated_delta_rule",
        lambda q, k, v, g, beta: {"q": q, "k": k, "v": v, "g": g, "beta": beta},
    ),
    "kda": (
        "kda",
        "chunk_kda",
        lambda q, k, v, g, beta: {"q": q, "k": k, "v": v, "g": g, "beta": beta},
    ),
    "rwkv7": (
        "rwkv7",
        "chunk_rwkv7",
        lambda q, k, v, g, removal_key, rate: {
            "r": q,
            "w": g,
            "k": k,
            "v": v,
            "a": -removal_key,
            "b": removal_key * rate,
            "lower_bound": MIXERS["rwkv7"].input("g").values.low - 1e-4,
        },
    ),
    "delta_product": (
        "gated_delta_product",
        "chunk_gated_delta_product",
        lambda q, k, v, g, beta: {
            "q": q,
            "k": _steps(k),
            "v": _steps(v),
            "g": g,
            "beta": _steps(beta),
            "num_householder": beta.shape[3],
        },
    ),
}


def _steps(x: Any) -> Any:
    """[batch, time, heads, n, ...] -> [batch, time * n, heads, ...], as it wants delta steps."""
    return x.transpose(2, 3).flatten(1, 2)


def fla_contender(
    row: Mixer, arrays: Sequence[jax.Array], weight: jax.Array | None
) -> Callable[[], Any] | None:
    """One kernel of flash-linear-attention as a contender; None where it or its GPU is missing."""
    if row.name not in _FORMS or importlib.util.find_spec("fla") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    module, function, arguments = _FORMS[row.name]
    kernel = getattr(importlib.import_module(f"fla.ops.{module}"), function)

    def tensor(x: jax.Array, name: str) -> Any:
        dtype = torch.float32 if name == "g" else torch.bfloat16
        return torch.from_dlpack(jax.block_until_ready(x)).to(dtype, copy=True)

    tensors = [
        tensor(x, name).requires_grad_(weight is not None)
        for x, name in zip(arrays, row.names, strict=True)
    ]
    cotangent = None if weight is None else tensor(weight, "out")

    def call() -> Any:
        with torch.set_grad_enabled(cotangent is not None):
            result = kernel(**arguments(*tensors))[0]
            if cotangent is not None:
                result = list(torch.autograd.grad(result, tensors, cotangent))
        torch.cuda.synchronize()
        return result

    return call
