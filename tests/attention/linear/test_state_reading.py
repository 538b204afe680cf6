"""A large state is read in tiles of keys on CPUs, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest
from float64 import enable_x64

from toolkit.attention import draw_inputs, mixer
from toolkit.attention.linear.engine import reading
from toolkit.testing.states import assert_close, random_state, results

FLOAT64_TOLERANCE = 1e-12


@pytest.mark.parametrize("name", ["linear", "gdn"])  # one reader, and two
def test_tiles_are_read_as_the_whole(name, monkeypatch):
    with enable_x64(True):
        row = mixer(name)
        inputs = draw_inputs(row, 1, heads=2, key=32, value=8, dtype=jnp.float64)
        args = [x[:, 0] for x in inputs] + [random_state(row, 2, jnp.float64, key=32)]
        whole = results(lambda *args: row.step(*args), args)
        monkeypatch.setattr(reading, "LARGE", 1)
        monkeypatch.setattr(reading, "TILE", 16)
        jax.clear_caches()
        assert_close(results(lambda *args: row.step(*args), args), whole, FLOAT64_TOLERANCE)
        traced = jax.jit(lambda *args: row.step(*args)).trace(*args)
        for platform in ("cpu", "cuda", "tpu"):
            program = traced.lower(lowering_platforms=(platform,)).as_text()
            assert ("2x2x2x16x8xf64" in program) == (platform == "cpu")
