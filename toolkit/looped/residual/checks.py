"""Which switches of a configuration go with connections in place of residual additions."""

from typing import Any

ADDITIONS = (
    "parallel_residual", "ladder_residual", "shared_norm", "norm_of_sum", "residual_group",
)  # fmt: skip
"""Switches that say how plain additions are done."""

STARTS = (
    "residual_gate", "loop_embedding", "input_injection", "random_start", "norm_before_coda",
    "prelude_norm", "coda_projection",
)  # fmt: skip
"""Switches of what a loop starts from or ends with, which messages fix."""

SEPARATE = ("full", "window", "nope", "relative", "relative_window")
"""Layers whose queries, keys and values may read different inputs."""


def check_connections(config: Any) -> None:
    """Refuse combinations of switches that no block or loop can have."""
    given = [n for n in ("streams", "attention_residual") if getattr(config, n) is not None]
    if len(given) == 2:
        raise ValueError("streams and attention_residual exclude each other; set one to None.")
    if config.streams == 1:
        raise ValueError("streams is 1; hyper-connections want at least 2 streams, or None.")
    if given:
        _refuse(config, ADDITIONS, given[0])
    if config.raw_sources and config.attention_residual is None:
        raise ValueError("raw_sources without attention_residual: turn it off, or give that.")
    if config.message_rank is None:
        return
    for name in ("attention_residual", "prelude", "coda"):
        if not getattr(config, name):
            raise ValueError(
                f"message_rank without {name}: loops that exchange messages want a prelude, a coda "
                "and attention_residual."
            )
    _refuse(config, STARTS, "message_rank")
    for name, layers in (("prelude", config.prelude_layers), ("pattern", config.layers)):
        if len(layers) % config.attention_residual:
            raise ValueError(
                f"{name} has {len(layers)} layers; with message_rank it wants a multiple of "
                f"attention_residual {config.attention_residual}."
            )
    if other := sorted({*config.layers} - {*SEPARATE}):
        raise ValueError(
            f"message_rank: {other[0]!r} layers read one input; want layers out of "
            f"{', '.join(SEPARATE)}."
        )


def _refuse(config: Any, names: tuple[str, ...], beside: str) -> None:
    for name in names:
        if getattr(config, name):
            raise ValueError(f"{name} and {beside} exclude each other; turn one of them off.")
