"""Under `jax.disable_jit()`, where one looks for an error, a mixer computes what it computes."""

import jax
import numpy as np
import pytest

from toolkit.attention import MIXERS, draw_inputs

TOLERANCE = 1e-5


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_without_jit_nothing_changes(name):
    row = MIXERS[name]
    inputs = draw_inputs(row, 3, batch=1)
    loss = lambda *inputs: row.function(*inputs, **row.options)[0].sum()  # noqa: E731
    wanted = jax.value_and_grad(loss)(*inputs)
    with jax.disable_jit():
        found = jax.value_and_grad(loss)(*inputs)
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE)
    np.testing.assert_allclose(found[1], wanted[1], atol=TOLERANCE)
