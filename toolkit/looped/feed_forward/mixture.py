"""A mixture of experts as a layer: a router, experts, and a shared expert."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.experts import (
    ACTIVATIONS,
    Routing,
    mixture,
    route,
    router_logits,
    shared_expert,
)
from toolkit.experts.routing import check_choice
from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.feed_forward.swiglu import SwiGLU
from toolkit.looped.mixing.layer import LayerOptions


class ChoiceBias(nnx.Variable):
    """The bias that chooses experts: a state of the model, not a parameter."""


@dataclasses.dataclass(frozen=True)
class MixtureOptions(LayerOptions):
    """Options of "moe" layers; the switches of the router are those of `toolkit.experts.route`.

    Attributes:
        experts: number of experts.
        chosen: experts per token.
        hidden: hidden size of an expert (None: the model's `feed_forward_size`).
        shared_hidden: hidden size of the shared expert (None: no shared expert).
        shared_gate: multiply the shared expert's output by a sigmoid of a projection.
        scores, groups, chosen_groups, group_score, normalise, scale: see `route`.
        choice_bias: keep a `ChoiceBias` per expert, which `updated_choice_bias` moves.
        router_bias: add a learned bias to the logits.
        activation: "silu", or "clamped" as in gpt-oss.
        biases: add biases to the experts' projections.
    """

    experts: int = 8
    chosen: int = 2
    hidden: int | None = None
    shared_hidden: int | None = None
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    router_bias: bool = False
    activation: Literal["silu", "clamped"] = "silu"
    biases: bool = False

    @classmethod
    def tiny(cls) -> "MixtureOptions":
        """Experts that together have the hidden size of a tiny model's SwiGLU when two are
        chosen."""
        return cls(hidden=176)

    @property
    def switches(self) -> dict[str, Any]:
        """Keywords of `route`."""
        names = ("scores", "groups", "chosen_groups", "group_score", "normalise", "scale")
        return {name: getattr(self, name) for name in names}


class Router(nnx.Module):
    """The parameters of a router: a kernel, a bias of the logits or None, and a `ChoiceBias` or
    None."""

    def __init__(self, width: int, options: MixtureOptions, rngs: nnx.Rngs):
        # Not zero: with equal scores every token would choose the first experts.
        draw = nnx.initializers.truncated_normal(width**-0.5, lower=-3.0, upper=3.0)
        count, none = options.experts, nnx.data(None)
        self.kernel = nnx.Param(draw(rngs.params(), (width, count)))
        self.bias = nnx.Param(jnp.zeros(count)) if options.router_bias else none
        self.choice_bias = ChoiceBias(jnp.zeros(count)) if options.choice_bias else none


class Experts(nnx.Module):
    """The parameters of all experts, stacked: [experts, width, hidden] and back."""

    def __init__(
        self, width: int, hidden: int, options: MixtureOptions, down_std: float, rngs: nnx.Rngs
    ):
        def draw(inputs: int, outputs: int, std: float) -> nnx.Param:
            initializer = nnx.initializers.truncated_normal(std, lower=-3.0, upper=3.0)
            return nnx.Param(initializer(rngs.params(), (options.experts, inputs, outputs)))

        def bias(size: int) -> Any:
            has_biases = options.biases
            return nnx.Param(jnp.zeros((options.experts, size))) if has_biases else nnx.data(None)

        self.gate = draw(width, hidden, width**-0.5)
        self.up = draw(width, hidden, width**-0.5)
        self.down = draw(hidden, width, down_std)
        self.gate_bias, self.up_bias, self.down_bias = bias(hidden), bias(hidden), bias(width)


class MixtureLayer(FeedForwardLayer):
    """A mixture of experts; no token is dropped, so a token's output depends on no other.

    Attributes:
        router: `Router`; its logits are float32 for every compute type.
        experts: `Experts`.
        shared: a `SwiGLU` for all tokens, or None.
        shared_gate: [width, 1], or None.

    Source: `toolkit.experts.ROUTERS` names the papers; Dai et al., "DeepSeekMoE", 2024,
        arXiv:2401.06066 (shared experts).
    """

    word: ClassVar[str] = "moe"
    Options: ClassVar[type[LayerOptions]] = MixtureOptions

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        options, width, dtype = self.options_of(config), config.width, config.compute_dtype
        hidden, none = options.hidden or config.feed_forward_size, nnx.data(None)
        self.router = Router(width, options, rngs)
        self.experts = Experts(width, hidden, options, down_std(hidden, width), rngs)
        self.shared, self.shared_gate = none, none
        if (size := options.shared_hidden) is not None:
            std = down_std(size, width)
            self.shared = SwiGLU(width, size, down_std=std, dtype=dtype, rngs=rngs)
            if options.shared_gate:
                self.shared_gate = nnx.Param(jnp.zeros((width, 1)))
        self.options, self.dtype = options, dtype

    def routed(
        self, x: Float[Array, "... width"], *, apply: Callable[..., Array] = mixture
    ) -> tuple[Array, Routing]:
        """The output, and the router's decisions; `apply` takes the arguments of `mixture`."""

        def cast(parameter: Any) -> Any:
            return None if parameter is None else parameter[...].astype(self.dtype)

        def whole(parameter: Any) -> Any:
            return None if parameter is None else parameter[...]

        options, router, x = self.options, self.router, x.astype(self.dtype)
        logits = router_logits(x, router.kernel[...], whole(router.bias))
        bias = whole(router.choice_bias)
        routing = route(logits, options.chosen, choice_bias=bias, **options.switches)
        own = functools.partial(getattr, self.experts)
        names = ("gate_bias", "up_bias", "down_bias")
        y = apply(
            x,
            routing,
            *(cast(own(name)) for name in ("gate", "up", "down")),
            **{name: cast(own(name)) for name in names},
            activation=ACTIVATIONS[options.activation],
        )
        if self.shared is not None:
            kernels = (cast(getattr(self.shared, name).kernel) for name in ("gate", "up", "down"))
            y += shared_expert(x, *kernels, output_gate=cast(self.shared_gate))
        return y, routing

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        options = cls.options_of(config)
        if not options.scale > 0:
            raise ValueError(f"moe.scale must be positive; got {options.scale}")
        if options.shared_gate and options.shared_hidden is None:
            raise ValueError("moe.shared_gate gates a shared expert; give moe.shared_hidden too")
        names = ("groups", "chosen_groups", "group_score", "normalise")
        how = {name: getattr(options, name) for name in names}
        try:
            check_choice(options.experts, options.chosen, name="chosen", **how)
        except ValueError as error:
            raise ValueError(f"moe.{error}") from None

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        options, width = cls.options_of(config), config.width
        hidden = options.hidden or config.feed_forward_size
        each = 3 * width * hidden + (2 * hidden + width) * options.biases
        router = options.experts * (width + options.router_bias)
        shared = 3 * width * (options.shared_hidden or 0) + width * options.shared_gate
        fixed = router + shared
        return fixed + options.experts * each, fixed + options.chosen * each
