"""The context in which arrays of float64 are made, by the name that each version of jax has."""

import jax
import jax.experimental

enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # jax 0.7
)
