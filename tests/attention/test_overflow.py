"""Half precision holds inputs and outputs alone; what lies between does not overflow with it."""

import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import MIXERS, draw_inputs

TIME, MILD = 12, 5  # tokens, and how many of them come before the large ones
LARGE = 300.0  # its square, and so every product of two, is beyond float16
TOLERANCE = 2e-3  # of the largest output: a unit of float16 at 1000


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_large_products_of_float16_do_not_overflow(name):
    row = MIXERS[name]
    inputs = []
    for one, x in zip(row.inputs, draw_inputs(row, TIME, batch=1), strict=True):
        if not one.is_gate:
            x = x.at[:, MILD:].multiply(LARGE if one.name in ("q", "v") else 1.0)
            x = x.astype(jnp.float16)
        inputs.append(x)
    out = row.function(*inputs, **row.options)[0]
    assert out.dtype == jnp.float16
    wide = (x.astype(jnp.float32) for x in inputs)
    wanted = np.asarray(row.reference(*wide, **row.options)[0].astype(jnp.float16))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(wanted))
    assert np.isfinite(out[:, :MILD]).all()
    is_finite = np.isfinite(wanted)
    out, wanted = (np.where(is_finite, x, 0).astype(np.float64) for x in (out, wanted))
    np.testing.assert_allclose(out, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
