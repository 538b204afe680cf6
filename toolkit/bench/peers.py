"""The contenders from outside: torch and transformers, when the `oracle` extra is installed."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel import make_mesh


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def over_heads(
    function: Callable[..., Any], args: tuple[jax.Array, ...], devices: int
) -> Callable[[], Any]:
    """Run `function` with axis 2, the heads, spread over host devices.

    XLA's CPU backend runs the body of a scan on one core; heads are independent, so a device a
    core puts all of them to work. Every argument and result must have its heads on axis 2.
    """
    mesh = make_mesh({"heads": devices}, devices=jax.devices()[:devices])
    spec = P(None, None, "heads")
    sharded = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    return lambda: sharded(*placed)


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
