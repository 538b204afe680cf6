"""How many programs are compiled meanwhile."""

from contextlib import contextmanager

import jax

LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextmanager
def counted_programs():
    """Lists the programs that are lowered meanwhile."""
    programs = []

    def listen(event, duration, **_):
        if event == LOWERING:
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
