"""Attention tests forbid implicit promotion of dtypes and ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
