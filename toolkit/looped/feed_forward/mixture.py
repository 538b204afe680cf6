"""A mixture of experts as a layer: a router, experts, and a shared expert."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.experts import (
    ACTIVATIONS,
    WITHOUT_GATE,
    Routing,
    mixture,
    route,
    router_logits,
    shared_expert,
)
from toolkit.experts.routing import Scores, check_choice
from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.feed_forward.swiglu import MLP, SwiGLU
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerOptions


class RouterState(nnx.Variable):
    """What a router keeps and no gradient moves: a state of the model, not a parameter."""


class ChoiceBias(RouterState):
    """The bias that chooses experts."""


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
        activation: "silu"; "clamped" as in gpt-oss; "clamped_silu" as in DeepSeek-V4, where it is
            the shared expert's too; "capped_silu" as in Inkling-2; "relu2", of experts without a
            gate, as in Nemotron 3.
        latent_size: width of what the routed experts read and write, projected from the stream and
            back, as in Nemotron 3 Super (None: the stream's).
        biases: add biases to the experts' projections.
    """

    experts: int = 8
    chosen: int = 2
    hidden: int | None = None
    shared_hidden: int | None = None
    shared_gate: bool = False
    scores: Scores = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    router_bias: bool = False
    activation: Literal["silu", "clamped", "clamped_silu", "capped_silu", "relu2"] = "silu"
    biases: bool = False
    latent_size: int | None = None

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

    @property
    def has_gate(self) -> bool:
        """Whether experts have a gate."""
        return self.activation not in WITHOUT_GATE


class Router(nnx.Module):
    """The parameters of a router: a kernel, a bias of the logits or None, a `ChoiceBias` or None,
    and a table of tokens or None."""

    def __init__(self, width: int, options: MixtureOptions, rngs: nnx.Rngs):
        # Not zero: with equal scores every token would choose the first experts.
        draw = nnx.initializers.truncated_normal(width**-0.5, lower=-3.0, upper=3.0)
        count, none = options.experts, nnx.data(None)
        self.kernel = nnx.Param(draw(rngs.params(), (width, count)))
        self.bias = nnx.Param(jnp.zeros(count)) if options.router_bias else none
        self.choice_bias = ChoiceBias(jnp.zeros(count)) if options.choice_bias else none
        self.table: Any = none


class Experts(nnx.Module):
    """The parameters of all experts, stacked: [experts, width, hidden] and back; the gate and its
    bias may be None."""

    def __init__(
        self, width: int, hidden: int, options: MixtureOptions, down_std: float, rngs: nnx.Rngs
    ):
        def draw(inputs: int, outputs: int, std: float) -> nnx.Param:
            initializer = nnx.initializers.truncated_normal(std, lower=-3.0, upper=3.0)
            return nnx.Param(initializer(rngs.params(), (options.experts, inputs, outputs)))

        def bias(size: int, has_biases: bool = options.biases) -> Any:
            return nnx.Param(jnp.zeros((options.experts, size))) if has_biases else nnx.data(None)

        has_gate = options.has_gate
        self.gate = draw(width, hidden, width**-0.5) if has_gate else nnx.data(None)
        self.up = draw(width, hidden, width**-0.5)
        self.down = draw(hidden, width, down_std)
        self.gate_bias = bias(hidden, options.biases and has_gate)
        self.up_bias, self.down_bias = bias(hidden), bias(width)


class MixtureLayer(FeedForwardLayer):
    """A mixture of experts; no token is dropped, so a token's output depends on no other.

    Attributes:
        router: `Router`; its logits are float32 for every compute type.
        experts: `Experts`.
        shared: a `SwiGLU` or `MLP` for all tokens, or None.
        latent_down, latent_up: projections to the experts' width and back, or None.
        shared_gate: [width, 1], or None.

    Source: `toolkit.experts.ROUTERS` names the papers; Dai et al., "DeepSeekMoE", 2024,
        arXiv:2401.06066 (shared experts); NVIDIA, "Nemotron 3 Super", 2026, arXiv:2604.12374
        (latent size).
    """

    word: ClassVar[str] = "moe"
    Options: ClassVar[type[LayerOptions]] = MixtureOptions

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        options, width, dtype = self.options_of(config), config.width, config.compute_dtype
        hidden, none = options.hidden or config.feed_forward_size, nnx.data(None)
        self.router = Router(width, options, rngs)
        inner, std = options.latent_size or width, down_std(hidden, width)
        self.experts = Experts(inner, hidden, options, std, rngs)
        self.latent_down, self.latent_up = none, none
        if options.latent_size is not None:
            self.latent_down = linear(width, inner, dtype, rngs, std=width**-0.5)
            self.latent_up = linear(inner, width, dtype, rngs, std=inner**-0.5)
        self.shared, self.shared_gate = none, none
        if (size := options.shared_hidden) is not None:
            how = {"down_std": down_std(size, width), "dtype": dtype, "rngs": rngs}
            self.shared = (SwiGLU if options.has_gate else MLP)(width, size, **how)
            if options.shared_gate:
                self.shared_gate = nnx.Param(jnp.zeros((width, 1)))
        self.options, self.dtype = options, dtype

    def routed(
        self, x: Float[Array, "... width"], *,
        apply: Callable[..., Array] = mixture, experts: Int[Array, "... chosen"] | None = None,
    ) -> tuple[Array, Routing]:  # fmt: skip
        """The output, and the router's decisions; `apply` takes the arguments of `mixture`, and
        `experts` are given ones, as in `route`."""

        def cast(parameter: Any) -> Any:
            return None if parameter is None else parameter[...].astype(self.dtype)

        def whole(parameter: Any) -> Any:
            return None if parameter is None else parameter[...]

        options, router, x = self.options, self.router, x.astype(self.dtype)
        logits = router_logits(x, router.kernel[...], whole(router.bias))
        bias = whole(router.choice_bias)
        how = {**options.switches, "choice_bias": bias, "experts": experts}
        routing = route(logits, options.chosen, **how)
        own = functools.partial(getattr, self.experts)
        names = ("gate_bias", "up_bias", "down_bias")
        activation = ACTIVATIONS[options.activation]
        y = apply(
            x if self.latent_down is None else self.latent_down(x),
            routing,
            *(cast(own(name)) for name in ("gate", "up", "down")),
            **{name: cast(own(name)) for name in names},
            activation=activation,
        )
        y = y if self.latent_up is None else self.latent_up(y)
        if self.shared is not None:
            shared: Any = self.shared
            gate = cast(shared.gate.kernel) if options.has_gate else None
            up, down = cast(shared.up.kernel), cast(shared.down.kernel)
            is_own = options.activation in ("silu", "clamped")  # gpt-oss has no shared expert
            how = {} if is_own else {"activation": activation}
            y += shared_expert(x, gate, up, down, output_gate=cast(self.shared_gate), **how)
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
        inner, rows = options.latent_size or width, 2 + options.has_gate
        each = rows * inner * hidden + ((rows - 1) * hidden + inner) * options.biases
        router = options.experts * (width + options.router_bias)
        shared = rows * width * (options.shared_hidden or 0) + width * options.shared_gate
        fixed = router + shared + 2 * width * (options.latent_size or 0)
        return fixed + options.experts * each, fixed + options.chosen * each
