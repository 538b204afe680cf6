"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit.

Most programs of the tests run once, so that compiling them is most of what the suite costs. They
are compiled as cheaply as XLA can, five times cheaper than without optimisation alone, and kept in
a folder for the next run, the other worker and the other Pythons.
`JAX_DISABLE_MOST_OPTIMIZATIONS=0` compiles them as for a user.
"""

import fcntl
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.experimental
import pytest

COMPILE_FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
FAST_FLAGS = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
USER_CACHE = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
PROGRAMS = os.environ.get("JAX_COMPILATION_CACHE_DIR", Path(USER_CACHE, "mlsys-toolkit", "tests"))

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (FAST_FLAGS if COMPILE_FAST else "")
jax.config.update("jax_num_cpu_devices", 8)
if not hasattr(jax, "enable_x64"):  # jax 0.7
    jax.enable_x64 = jax.experimental.enable_x64
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.devices()  # reads the flags, which notebooks and commands in processes of their own do without
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].removesuffix(FAST_FLAGS)


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
