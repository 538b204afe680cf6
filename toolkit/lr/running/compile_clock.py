"""The time that jax spends on tracing and compiling, to exclude it from a ledger."""

from functools import cache

import jax


def compile_seconds() -> float:
    """Seconds of tracing, lowering and compiling since the first call of this function."""
    return _clock()[0]


@cache
def _clock() -> list[float]:
    total = [0.0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        # Compiling in a trace would be counted twice, but does not happen in a step.
        if event.startswith("/jax/core/compile/"):
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return total
