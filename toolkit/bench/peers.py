"""Contenders: ours as a user calls it, and torch's if the extra `oracle` is installed."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from toolkit.bench.harness import bound
from toolkit.parallel import use_cores


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


AFTER = ", after use_cores()"


def plain_and_spread(
    name: str, form: Callable[..., Any], args: tuple[jax.Array, ...], cores: int
) -> dict[str, Callable[[], Any]]:
    """The plain jitted call without any set-up, and, on several cores, after the one line."""
    contenders = {}
    for label, count in {name: 1, name + AFTER: cores}.items():
        if count > 1 or label == name:
            use_cores(count)
            # A function of its own, or jax would take the program it has; compiled here and now.
            contenders[label] = bound(jax.jit(lambda *args: form(*args)), args)
            jax.block_until_ready(contenders[label]())
    use_cores(1)
    return contenders


def torch_contender(
    form: Callable[..., Any], arrays: list[np.ndarray], weight: np.ndarray | None, threads: int
) -> Callable[[], Any]:
    """A function of torch tensors as a contender, with PyTorch's own gradient."""
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.tensor(x, requires_grad=weight is not None) for x in arrays]
    if weight is None:

        def forward() -> Any:
            with torch.no_grad():
                return form(*tensors)

        return forward
    cotangent = torch.tensor(weight)
    return lambda: list(torch.autograd.grad(form(*tensors), tensors, cotangent))


def torch_sdpa(
    arrays: list[np.ndarray], weight: np.ndarray | None, threads: int, *, is_causal: bool = True
) -> Callable[[], Any] | None:
    """PyTorch's fused softmax attention."""
    if not has_torch():
        return None
    import torch

    # Its layout is [batch, heads, time, size]; the transposition is done once, outside the timing.
    call = torch_contender(
        partial(torch.nn.functional.scaled_dot_product_attention, is_causal=is_causal),
        [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays],
        None if weight is None else np.ascontiguousarray(weight.swapaxes(1, 2)),
        threads,
    )
    if weight is None:
        return lambda: call().swapaxes(1, 2)
    return lambda: [x.swapaxes(1, 2) for x in call()]
