"""Mixtures of experts as pure functions of arrays: routing, experts, and losses for balance.

    routing = route(router_logits(x, kernel), 8)
    y = mixture(x, routing, gate, up, down) + shared_expert(x, ...)
    loss += 0.01 * balance_loss(routing_statistics(routing))

Routing (`routing.py`)
    router_logits          logits in float32, for tokens of any dtype
    route                  the experts and weights of every token: a Routing
    Routing                weights, experts and probabilities, a pytree
    expert_loads           pairs per expert
    ROUTERS, Router        one row of switches per published family (`rules.py`)

Experts (`mixture.py`)
    mixture                the chosen experts on their tokens; no token is dropped
    mixture_reference      the equation, token by token
    shared_expert          the expert that every token passes, and its gate
    silu_gate, clamped_gate, clamped_silu_gate, capped_silu_gate,
    squared_relu
                              activations, by name in ACTIVATIONS
    WITHOUT_GATE           the activations of experts that have no gate
    products.py, blocks.py    the forms that `implementation` names
    best_known.py          the form for each platform, with the evidence

Balance (`losses.py`)
    routing_statistics     sums that add up over layers, devices and micro-batches:
                           a RoutingStatistics
    pooled_statistics      added over leading axes
    balance_loss           Switch, GShard and DeepSeek's sequence-wise loss, by what is pooled
    z_loss                 keeps logits small
    updated_choice_bias    balance without a loss
    max_violation, load_entropy   measures of balance
"""

from toolkit.experts.losses import (
    RoutingStatistics,
    balance_loss,
    load_entropy,
    max_violation,
    pooled_statistics,
    routing_statistics,
    updated_choice_bias,
    z_loss,
)
from toolkit.experts.mixture import (
    ACTIVATIONS,
    WITHOUT_GATE,
    capped_silu_gate,
    clamped_gate,
    clamped_silu_gate,
    mixture,
    mixture_reference,
    shared_expert,
    silu_gate,
    squared_relu,
)
from toolkit.experts.routing import Routing, expert_loads, route, router_logits
from toolkit.experts.rules import ROUTERS, Router

__all__ = [
    "ACTIVATIONS", "ROUTERS", "WITHOUT_GATE", "Router", "Routing", "RoutingStatistics",
    "balance_loss", "capped_silu_gate", "clamped_gate", "clamped_silu_gate", "expert_loads",
    "load_entropy", "max_violation", "mixture", "mixture_reference", "pooled_statistics", "route",
    "router_logits", "routing_statistics", "shared_expert", "silu_gate", "squared_relu",
    "updated_choice_bias", "z_loss",
]  # fmt: skip
