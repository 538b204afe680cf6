"""Where each number of an Inkling-2 checkpoint goes: its attention, and what is around layers."""

from typing import Any

import jax.numpy as jnp

from toolkit.looped.checkpoints.rules import WeightRule, as_it_is, projection, vector
from toolkit.looped.config import LoopedConfig

SEPARATE = ("query", "key", "value")
"""What has inputs of its own in some layers; their names begin with the same letter."""


def _turned(ours: str, theirs: str) -> WeightRule:
    return WeightRule((theirs,), (ours,), lambda _, tensor: [tensor.T])


def _convolution(ours: str, theirs: str) -> WeightRule:
    """[channels, 1, taps] -> [taps, channels]."""
    name = f"{theirs}.conv1d.weight"
    return WeightRule((name,), (f"{ours}.kernel",), lambda _, tensor: [tensor[:, 0].T])


def _heads(ours: str, theirs: str) -> WeightRule:
    return as_it_is(ours, f"self_attn.{theirs}.scale")


_ENDS = (
    _convolution("end_convolution", "post_attention_convolution"),
    _convolution("fed_convolution", "post_mlp_convolution"),
)
_RELATIVE = (
    *(projection(w, f"self_attn.{w[0]}_proj.linear.weight") for w in SEPARATE),
    projection("output", "self_attn.o_proj.linear.weight"),
    projection("gate", "self_attn.o_proj.gate_proj.weight"),
    projection("sinks", "self_attn.sink_proj.weight"),
    projection("relative", "self_attn.relative_position_bias.linear.weight"),
    as_it_is("profiles", "self_attn.relative_position_bias.proj"),
    _heads("query_scale", "q_proj.norm"),
    _heads("relative_scale", "relative_position_bias.norm"),
    *_ENDS,
)
_CONVOLVED = {
    "key_convolution": "self_attn.k_proj.sconv",
    "value_convolution": "self_attn.v_proj.sconv",
}
RELATIVE: dict[str, tuple[WeightRule, ...]] = {
    "relative_window": (*_RELATIVE, *(_convolution(*pair) for pair in _CONVOLVED.items())),
    "relative": (
        *_RELATIVE,
        *(
            rule
            for ours, theirs in _CONVOLVED.items()
            for rule in (
                WeightRule(
                    (f"{theirs}.static_weight",),
                    (f"{ours}.kernel",),
                    lambda _, tensor: [tensor[::-1]],  # the first row is for the token itself
                ),
                projection(f"{ours}.weights", f"{theirs}.weight_proj.weight"),
            )
        ),
    ),
}
"""Rules by the layer's word."""


def residual_rules(layer: Any, *, reads: bool, is_looped: bool) -> tuple[WeightRule, ...]:
    """What stands around a layer that attends to earlier ones."""
    rules = [vector("feed_forward.residual.query", "mlp_input.query")]
    if reads:
        make = as_it_is if layer.reads_separately else vector
        rules.append(make("mixer.residual.query", "attention_input.query"))
    gates = {**{w: w[0] for w in SEPARATE}, "feed_forward": "mlp"} if is_looped else {}
    parts = {"down": "down", "forget": "forget_gate", "message": "message_gate"}
    rules += [
        _turned(f"gates.{gate}.{ours}", f"{name}_message_gate.{theirs}_proj.weight")
        for gate, name in gates.items()
        for ours, theirs in parts.items()
    ]
    return tuple(rules)


def end_rules(config: LoopedConfig, prefix: str) -> list[tuple[str, str, tuple[WeightRule, ...]]]:
    """Module, prefix and rules of the last mean, and of all queries for messages."""
    stack = "coda" if config.coda else "blocks"
    last = len(config.coda_layers or config.layers) - 1
    end = (vector("query", "final_input.query"),)
    found = [(f"{stack}.{last}.connections.end", prefix, end)]
    if config.message_rank is not None:
        layers = range(len(config.layers))
        queries = WeightRule(
            ("message_input.query",),
            tuple(f"blocks.{n}.connections.gates.queries" for n in layers),
            lambda _, tensor: list(jnp.asarray(tensor)),
            stored=(lambda _: (len(config.layers), 4, config.width)),
        )
        found.append(("", prefix, (queries,)))
    return found
