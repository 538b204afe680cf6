"""Hugging Face transformers' recurrences in PyTorch, called as the rows of `MIXERS` are.

    mixer          form in transformers, and how it gets our inputs
    mamba2         Mamba-2's segment-sum SSD; A = g / dt, so that its dt A is our g
    linear         the same, with dt = 1 and no decay
    retention      the same, with dt = 1 and the constant decay of each head
    gdn            Qwen3-Next's chunked gated delta rule (OLMo-hybrid's is the same text)
    delta          the same with g = 0
    delta_product  the same over a sequence of delta steps: g in the first step of each
                   token, its output that of the last
    kda            Kimi-Linear's chunked rule

Gated linear attention, HGRN2 and RWKV-7 have no form there. Each function takes torch tensors in
our layouts, returns the output and has PyTorch's gradient; defaults (chunk sizes) are theirs.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.attention import retention_log_decay


def transformers_form(name: str) -> Callable[..., Any] | None:
    """The form of transformers for a row of `MIXERS`; None where it has none or is missing."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return None
    try:
        return _FORMS[name]() if name in _FORMS else None
    except (ImportError, AttributeError):  # an older release without this model
        return None


def _mamba2() -> Callable[..., Any]:
    scan = _state_space()
    return lambda q, k, v, g, dt: scan(v, dt, g / dt, k, q)


def _constant_decay(log_decay: Callable[[int], np.ndarray]) -> Callable[..., Any]:
    import torch

    scan = _state_space()

    def form(q: Any, k: Any, v: Any) -> Any:
        ones = torch.ones(v.shape[:3])
        return scan(v, ones, torch.tensor(log_decay(v.shape[2])), k, q * k.shape[-1] ** -0.5)

    return form


def _state_space() -> Callable[..., Any]:
    from transformers.models.mamba2 import modeling_mamba2

    scan = modeling_mamba2.mamba2_chunk_scan
    return lambda x, dt, a, b, c: scan(x, dt, a, b, c, chunk_size=256)  # its configuration's


def _gated_delta_rule() -> Callable[..., Any]:
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    return lambda q, k, v, g, beta: rule(q, k, v, g=g, beta=beta)[0]


def _delta() -> Callable[..., Any]:
    rule = _gated_delta_rule()
    return lambda q, k, v, beta: rule(q, k, v, beta.new_zeros(beta.shape), beta)


def _delta_product() -> Callable[..., Any]:
    import torch

    rule = _gated_delta_rule()

    def steps(x: Any) -> Any:
        """[batch, time, heads, n, ...] -> [batch, time * n, heads, ...]."""
        return x.transpose(2, 3).flatten(1, 2)

    def form(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        n = beta.shape[3]
        no_g = torch.zeros_like(g)
        g = torch.stack([g, *[no_g] * (n - 1)], dim=3)
        q = q.unsqueeze(3).expand(*q.shape[:3], n, q.shape[3])
        return rule(*(steps(x) for x in (q, k, v, g, beta)))[:, n - 1 :: n]

    return form


def _kimi_delta() -> Callable[..., Any]:
    from transformers.models.kimi_linear import modeling_kimi_linear

    rule = modeling_kimi_linear.chunk_kimi_delta_attention
    return lambda q, k, v, g, beta: rule(q, k, v, g, beta)[0]


_FORMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "linear": lambda: _constant_decay(lambda heads: np.zeros(heads, np.float32)),
    "retention": lambda: _constant_decay(lambda heads: np.array(retention_log_decay(heads))),
    "mamba2": _mamba2,
    "gdn": _gated_delta_rule,
    "delta": _delta,
    "delta_product": _delta_product,
    "kda": _kimi_delta,
}
