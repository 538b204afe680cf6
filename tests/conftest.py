"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs of a file are not used by the next one, and add up to gigabytes."""
    yield
    jax.clear_caches()
