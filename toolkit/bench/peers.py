"""The contenders from outside: torch and transformers, when the `oracle` extra is installed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel import make_mesh


def has_torch() -> bool:
    """Whether PyTorch is installed.

    Returns:
        True when `import torch` would work.

    Cost:
        One look-up; nothing is imported.
    """
    return importlib.util.find_spec("torch") is not None


def over_heads(
    function: Callable[..., Any], args: tuple[jax.Array, ...], devices: int
) -> Callable[[], Any]:
    """Run `function` with axis 2, the heads, spread over host devices.

    XLA's CPU backend runs the body of a scan on one core; heads are independent, so a device a
    core puts all of them to work. Every argument and result must have its heads on axis 2.

    Args:
        function: of arrays `[batch, time, heads, ...]`, returning arrays of the same kind.
        args: its arguments.
        devices: host devices, one a core.

    Returns:
        A function of no arguments that runs it once.

    Cost:
        No collective: heads do not talk to one another.

    Source:
        jax.shard_map.
    """
    mesh = make_mesh({"heads": devices}, devices=jax.devices()[:devices])
    spec = P(None, None, "heads")
    sharded = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    return lambda: sharded(*placed)


def transformers_gated_delta_rule(
    arrays: list[np.ndarray], weight: np.ndarray | None, threads: int
) -> Callable[[], Any] | None:
    """Hugging Face's chunked Gated DeltaNet in PyTorch.

    Args:
        arrays: q, k, v, g, beta as for `gated_delta_net`.
        weight: cotangent of the output; None for the forward pass alone.
        threads: torch threads.

    Returns:
        A function of no arguments giving the output, or the five gradients; None when torch or
        transformers is absent.

    Cost:
        Chunks of 64, all held in memory at once.

    Source:
        `transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule`.
    """
    if not has_torch() or importlib.util.find_spec("transformers") is None:
        return None
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next

    torch.set_num_threads(threads)
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    tensors = [torch.tensor(x, requires_grad=weight is not None) for x in arrays]
    q, k, v, g, beta = tensors
    if weight is None:

        def forward() -> Any:
            with torch.no_grad():
                return rule(q, k, v, g=g, beta=beta)[0]

        return forward
    cotangent = torch.tensor(weight)

    def both() -> Any:
        out = rule(q, k, v, g=g, beta=beta)[0]
        return list(torch.autograd.grad(out, tensors, cotangent))

    return both


def torch_sdpa(
    arrays: list[np.ndarray], weight: np.ndarray | None, threads: int, *, is_causal: bool = True
) -> Callable[[], Any] | None:
    """PyTorch's fused softmax attention.

    Args:
        arrays: q, k, v `[batch, time, heads, size]`.
        weight: cotangent of the output; None for the forward pass alone.
        threads: torch threads.
        is_causal: mask the future.

    Returns:
        A function of no arguments giving the output, or the three gradients, in our layout; None
        when torch is absent.

    Cost:
        Flash attention on the CPU: memory linear in time.

    Source:
        `torch.nn.functional.scaled_dot_product_attention`.
    """
    if not has_torch():
        return None
    import torch

    torch.set_num_threads(threads)
    # Its layout is [batch, heads, time, size]; the transposition is done once, outside the timing.
    q, k, v = (
        torch.tensor(np.ascontiguousarray(x.swapaxes(1, 2)), requires_grad=weight is not None)
        for x in arrays
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    if weight is None:

        def forward() -> Any:
            with torch.no_grad():
                return attend(q, k, v, is_causal=is_causal).swapaxes(1, 2)

        return forward
    cotangent = torch.tensor(np.ascontiguousarray(weight.swapaxes(1, 2)))

    def both() -> Any:
        out = attend(q, k, v, is_causal=is_causal)
        return [x.swapaxes(1, 2) for x in torch.autograd.grad(out, (q, k, v), cotangent)]

    return both
