"""Every test runs on eight simulated CPU devices, with warnings as errors and a hard time limit."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
