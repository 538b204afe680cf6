"""CUDA bounds two axes of a grid by 65,535: what has more rows is laid along the third."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import INTERPRETER, assert_no_races, grids, lowered

from toolkit.attention.kernels.gpu import chunked as gpu_chunked
from toolkit.attention.kernels.gpu import support

BF16, F32 = jnp.bfloat16, jnp.float32
BOUND = 65_535  # along y and z
BATCH, HEADS, SIZE = 2048, 32, 64


@pytest.fixture
def bound(monkeypatch):
    """Sets what a grid may hold; programs that were made with another bound are forgotten."""

    def set_to(most):
        monkeypatch.setattr(support, "LONGEST", most)
        jax.clear_caches()

    yield set_to
    jax.clear_caches()


def abstract(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def many_rows():
    tokens = abstract(BATCH, 64, HEADS, SIZE, dtype=BF16)
    gates = [abstract(BATCH, 64, HEADS, 1), abstract(BATCH, 64, HEADS)]
    return *[tokens] * 3, *gates, abstract(BATCH, HEADS, SIZE, SIZE)


def train(*x):
    out, pull = jax.vjp(gpu_chunked.chunked, *x)
    return out, pull(out)


def test_many_rows_have_grids_that_cuda_takes(bound):
    found = grids(lowered(gpu_chunked.chunked, *many_rows()))
    assert found
    assert all(x >= BATCH * HEADS and max(others) <= BOUND for x, *others in found)
    # The grids are read rightly: as they were laid before, they are none.
    bound(2**31)
    found = grids(lowered(gpu_chunked.chunked, *many_rows()))
    assert all(BATCH * HEADS in others for _, *others in found)


@pytest.mark.nightly
def test_training_of_many_rows_has_grids_that_cuda_takes():
    program = lowered(train, *many_rows())
    found = grids(program)
    assert len(found) == program.count("custom_call @mosaic_gpu")
    assert all(max(others) <= BOUND for _, *others in found)


@pytest.mark.nightly
def test_programs_find_their_places_on_a_long_grid(bound):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), F32)  # noqa: E731
    rows, time = (1, 2), 128
    tokens = [draw(rows[0], time, rows[1], SIZE).astype(BF16) / 8 for _ in range(3)]
    g, beta = (
        -jnp.abs(draw(rows[0], time, rows[1], 1)),
        jax.nn.sigmoid(draw(rows[0], time, rows[1])),
    )
    state = draw(*rows, SIZE, 2 * SIZE)
    tokens[2] = jnp.concatenate([tokens[2]] * 2, axis=-1)

    def run():
        interpreted = lambda *x: gpu_chunked.chunked(*x, interpret=INTERPRETER)  # noqa: E731
        out, pull = jax.vjp(interpreted, *tokens, g, beta, state)
        return out, pull(out)

    wanted = run()
    bound(1)
    found = run()
    assert_no_races()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
