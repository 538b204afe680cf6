"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit."""

import fcntl
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
COMPILE_FAST = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ


def is_timed(item):
    return item.get_closest_marker("timed") is not None


@pytest.fixture(autouse=True, scope="module")
def programs(request):
    """Those of a file are compiled without optimisation, as most run once, unless it judges
    durations or JAX_DISABLE_MOST_OPTIMIZATIONS=0. Notebooks and commands run in processes of their
    own, optimised. The next file uses none of them, and they would add up to gigabytes.
    """
    here = (item for item in request.session.items if item.path == request.path)
    jax.config.update(
        "jax_disable_most_optimizations", COMPILE_FAST and not any(map(is_timed, here))
    )
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def machine(request, tmp_path_factory):
    """Tests share the machine; one marked `timed` has it to itself while it runs."""
    mode = fcntl.LOCK_EX if is_timed(request.node) else fcntl.LOCK_SH
    with open(tmp_path_factory.getbasetemp().parent / "machine.lock", "w") as lock:
        fcntl.flock(lock, mode)
        yield
