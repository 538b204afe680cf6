"""The experts of a layer, and the shared expert of all tokens."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import check_shape, checked
from toolkit.attention.execution.precision import accumulator, precise_einsum
from toolkit.experts.best_known import in_best_form
from toolkit.experts.products import Activation, Weights, expert
from toolkit.experts.routing import Routing

Implementation = Literal["blocks", "dense", "gather", "padded", "ragged", "pallas"]


@checked
def silu_gate(
    gate: Float[Array, "*tokens hidden"], up: Float[Array, "*tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    """The gate of SwiGLU: silu(gate) * up.

    Args:
        gate: [..., hidden].
        up: [..., hidden].

    Returns:
        [..., hidden].

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.

    Example:
        >>> float(silu_gate(jnp.zeros(1), jnp.ones(1))[0])
        0.0
    """
    return jax.nn.silu(gate) * up


@checked
def clamped_gate(
    gate: Float[Array, "*tokens hidden"], up: Float[Array, "*tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    """The gate of gpt-oss, whose inputs are bounded.

        g = min(gate, 7);   u = clip(up, -7, 7);   h = (u + 1) g sigmoid(1.702 g)

    Args:
        gate: [..., hidden]; bounded from above only.
        up: [..., hidden]; bounded on both sides.

    Returns:
        [..., hidden].

    Source: OpenAI, gpt-oss model card, 2025, arXiv:2508.10925, and the published model code.

    Example:
        >>> a, b = (clamped_gate(jnp.array([gate]), jnp.ones(1)) for gate in (7.0, 8.0))
        >>> bool(a == b)
        True
    """
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


@checked
def clamped_silu_gate(
    gate: Float[Array, "*tokens hidden"], up: Float[Array, "*tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    """The gate of DeepSeek-V4: that of SwiGLU with bounded inputs.

        h = silu(min(gate, 10)) clip(up, -10, 10)

    Args:
        gate: [..., hidden]; bounded from above only.
        up: [..., hidden]; bounded on both sides.

    Returns:
        [..., hidden].

    Source: DeepSeek-V4 technical report, 2026, and the published configuration (swiglu_limit).

    Example:
        >>> a, b = (clamped_silu_gate(jnp.array([gate]), jnp.ones(1)) for gate in (10.0, 11.0))
        >>> bool(a == b)
        True
    """
    return silu_gate(jnp.minimum(gate, 10.0), jnp.clip(up, -10.0, 10.0))


@checked
def capped_silu_gate(
    gate: Float[Array, "*tokens hidden"], up: Float[Array, "*tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    """The gate of Inkling-2: that of SwiGLU with soft caps on both factors of the sigmoid.

        h = 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25)

    Args:
        gate: [..., hidden].
        up: [..., hidden].

    Returns:
        [..., hidden].

    Source: Inkling-2, its modelling file and configuration in Hugging Face transformers
        (mlp_gate_softcap, mlp_up_softcap).

    Example:
        >>> round(float(capped_silu_gate(jnp.array([1e9]), jnp.array([1e9]))[0]), 3)
        100.0
    """
    return 4.0 * jnp.tanh(gate / 4.0) * jax.nn.sigmoid(gate) * 25.0 * jnp.tanh(up / 25.0)


@checked
def squared_relu(up: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens hidden"]:
    """The activation of Nemotron's experts, which have no gate: relu(up)^2.

    Args:
        up: [..., hidden].

    Returns:
        [..., hidden].

    Source: So et al., "Primer", 2021, arXiv:2109.08668; NVIDIA, "Nemotron 3 Nano", 2025,
        arXiv:2512.20848.

    Example:
        >>> squared_relu(jnp.array([-1.0, 3.0])).tolist()
        [0.0, 9.0]
    """
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu_gate, "clamped": clamped_gate, "clamped_silu": clamped_silu_gate,
    "capped_silu": capped_silu_gate,
    "relu2": squared_relu,
}  # fmt: skip
"""Activations of experts by name."""

WITHOUT_GATE = ("relu2",)
"""Those of one array."""


@checked
def mixture(
    x: Float[Array, "*tokens width"], routing: Routing,
    gate: Float[Array, "experts width hidden"] | None, up: Float[Array, "experts width hidden"],
    down: Float[Array, "experts hidden width"], *,
    gate_bias: Float[Array, "experts hidden"] | None = None,
    up_bias: Float[Array, "experts hidden"] | None = None,
    down_bias: Float[Array, "experts width"] | None = None, activation: Callable = silu_gate,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens width"]:  # fmt: skip
    """Apply the chosen experts to every token; no token is dropped.

        y = sum_j w_j (act(x G_i(j) + a_i(j), x U_i(j) + b_i(j)) D_i(j) + c_i(j))

    A token's sum is taken in the order of its experts, in float32, so that its output does not
    depend on other tokens. Documents, padding and lengths therefore need no mask.

    Args:
        x: tokens [..., width].
        routing: from `route` for these tokens.
        gate: G [experts, width, hidden]; None: experts without a gate, act(x U_i(j) + b_i(j)).
        up: U [experts, width, hidden].
        down: D [experts, hidden, width].
        gate_bias: a [experts, hidden], or None.
        up_bias: b [experts, hidden], or None.
        down_bias: c [experts, width], or None.
        activation: elementwise function of two arrays [rows, hidden]: `silu_gate`, `clamped_gate`
            or any other; without a gate of one, such as `squared_relu`. A new function at every
            call compiles anew.
        implementation: the form (`toolkit/experts/products.py` says what each computes); None: the
            best known for the platform (`toolkit/experts/best_known.py`).

    Returns:
        y [..., width], in the dtype of x.

    Cost: 6 width hidden FLOPs per token and chosen expert; "dense" all experts instead. Of order
        tokens x chosen x width numbers beside the weights for "blocks", "ragged" and "pallas".
        "gather" copies the weights of every pair and "padded" those of every block.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv:1701.06538; Gale et
        al., "MegaBlocks", 2022, arXiv:2211.15841 (no token dropped).

    Example:
        >>> x, gate, down = jnp.ones((3, 4)), jnp.ones((8, 4, 6)), jnp.ones((8, 6, 4))
        >>> routing = route(router_logits(x, jnp.ones((4, 8))), 2)
        >>> mixture(x, routing, gate, gate, down).shape
        (3, 4)
    """
    weights = fitting_weights(x, routing, gate, up, down, gate_bias, up_bias, down_bias)
    if not x.size:
        return x
    return _mixture(x, routing, weights, activation=activation, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def _mixture(x, routing, weights, *, activation, implementation):
    tokens, chosen = x.reshape(-1, x.shape[-1]), routing.experts.shape[-1]
    experts = routing.experts.reshape(-1, chosen)
    out = in_best_form(implementation, activation, tokens, experts, weights)
    share = routing.weights.reshape(-1, chosen, 1).astype(out.dtype)
    return (share * out).sum(1).reshape(x.shape).astype(x.dtype)


@checked
def mixture_reference(
    x: Float[Array, "*tokens width"], routing: Routing,
    gate: Float[Array, "experts width hidden"] | None, up: Float[Array, "experts width hidden"],
    down: Float[Array, "experts hidden width"], *,
    gate_bias: Float[Array, "experts hidden"] | None = None,
    up_bias: Float[Array, "experts hidden"] | None = None,
    down_bias: Float[Array, "experts width"] | None = None, activation: Callable = silu_gate,
) -> Float[Array, "*tokens width"]:  # fmt: skip
    """The equation of `mixture`, token by token and expert by expert.

        y = sum_j w_j (act(x G_i(j) + a_i(j), x U_i(j) + b_i(j)) D_i(j) + c_i(j))

    Arguments as `mixture`.

    Returns:
        y [..., width], in the dtype of x.

    Cost: a small program per token and expert; for tests and for reading.

    Example:
        >>> x, gate, down = jnp.ones((3, 4)), jnp.ones((8, 4, 6)), jnp.ones((8, 6, 4))
        >>> routing = route(router_logits(x, jnp.ones((4, 8))), 2)
        >>> mixture_reference(x, routing, gate, gate, down).shape
        (3, 4)
    """
    weights = fitting_weights(x, routing, gate, up, down, gate_bias, up_bias, down_bias)
    if not x.size:
        return x
    wide, width = accumulator(x.dtype), x.shape[-1]
    weights = jax.tree.map(lambda array: array.astype(wide), weights)
    tokens = x.reshape(-1, width).astype(wide)
    chosen = routing.experts.reshape(len(tokens), -1)
    shares = routing.weights.reshape(chosen.shape).astype(wide)
    out = []
    for token, own_experts, own_shares in zip(tokens, chosen, shares, strict=True):
        y = jnp.zeros(width, wide)
        for index, share in zip(own_experts, own_shares, strict=True):
            own = jax.tree.map(lambda array: array[index], weights)  # noqa: B023
            y += share * expert(activation, token[None], own)[0]
        out.append(y)
    return jnp.stack(out).reshape(x.shape).astype(x.dtype)


def fitting_weights(x, routing, gate, up, down, gate_bias, up_bias, down_bias) -> Weights:
    """The weights of all experts, checked against the tokens."""
    count, width, hidden = up.shape
    if x.shape[-1] != width:
        raise ValueError(f"up must have width {x.shape[-1]}, as x has; got shape {up.shape}")
    if gate is not None:
        check_shape("gate", gate, up.shape, "experts width hidden")
    elif gate_bias is not None:
        raise ValueError("gate_bias: experts without a gate have none; wanted None")
    check_shape("down", down, (count, hidden, width), "experts hidden width")
    if down_bias is not None:
        check_shape("down_bias", down_bias, (count, width), "experts width")
    if routing.experts.shape[:-1] != x.shape[:-1] or routing.probabilities.shape[-1] != count:
        raise ValueError(
            f"routing must be of tokens {x.shape[:-1]} and {count} experts; got tokens "
            f"{routing.experts.shape[:-1]} and {routing.probabilities.shape[-1]} experts"
        )
    weights = Weights(gate, up, down, gate_bias, up_bias, down_bias)
    for name, array in weights._asdict().items():
        if array is not None and array.dtype != x.dtype:
            raise TypeError(f"{name} must be {x.dtype}, as x is; got {array.dtype}")
    return weights


@checked
def shared_expert(
    x: Float[Array, "*tokens width"], gate: Float[Array, "width hidden"] | None,
    up: Float[Array, "width hidden"], down: Float[Array, "hidden width"], *,
    output_gate: Float[Array, "width 1"] | None = None, activation: Callable = silu_gate,
) -> Float[Array, "*tokens width"]:  # fmt: skip
    """The shared expert of all tokens, whose output is added to that of `mixture`.

        y = act(x G, x U) D, times sigmoid(x w) where it has a gate

    Args:
        x: tokens [..., width].
        gate: G [width, hidden], or None; several shared experts are concatenated.
        up: U [width, hidden].
        down: D [hidden, width].
        output_gate: w [width, 1], as Qwen3-Next has it; None: no gate, as in DeepSeek.
        activation: as in `mixture`.

    Returns:
        y [..., width], in the dtype of x.

    Cost: 6 width hidden FLOPs per token.

    Source: Dai et al., "DeepSeekMoE", 2024, arXiv:2401.06066, equation 9.

    Example:
        >>> shared_expert(jnp.ones((3, 4)), *[jnp.ones((4, 6))] * 2, jnp.ones((6, 4))).shape
        (3, 4)
    """
    if x.shape[-1] != up.shape[0]:
        raise ValueError(f"up must have {x.shape[-1]} rows, as x has width; got {up.shape}")
    y = expert(activation, x, Weights(gate, up, down))
    if output_gate is not None:
        y *= jax.nn.sigmoid(precise_einsum("...d,do->...o", x, output_gate))
    return y.astype(x.dtype)
