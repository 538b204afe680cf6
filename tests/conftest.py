"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit."""

import fcntl
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="session")
def programs_on_disk(tmp_path_factory):
    """What a worker has compiled once it need not compile again; half its time is compiling."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = tmp_path_factory.getbasetemp() / "programs"  # not shared: writes are not atomic
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()  # it was looked for when the first file was collected


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs of a file are not used by the next one, and add up to gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def machine(request, tmp_path_factory):
    """Tests share the machine; one marked `timed` has it to itself while it runs."""
    mode = fcntl.LOCK_EX if request.node.get_closest_marker("timed") else fcntl.LOCK_SH
    with open(tmp_path_factory.getbasetemp().parent / "machine.lock", "w") as lock:
        fcntl.flock(lock, mode)
        yield
