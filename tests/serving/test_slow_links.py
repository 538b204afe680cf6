"""TPI-LLM's star: exact on simulated devices, and faster than a ring only for small sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.serving import all_reduce_seconds, star_all_reduce, window_bytes, window_seconds

DELAY, RATE = 1e-3, 300e6 / 8  # seconds; bytes per second


def test_a_star_adds_up_exactly_the_same_everywhere():
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("device")
    parts = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    found = jax.jit(
        jax.shard_map(
            lambda x: star_all_reduce(x, "device"), mesh=mesh, in_specs=spec, out_specs=spec
        )
    )(jnp.asarray(parts))
    wanted = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert (np.asarray(found) == wanted).all()  # to the bit, on every device
    assert not (np.asarray(found) == parts).any()  # the control


def test_stars_rings_and_trees_take_what_their_formulas_say():
    wanted = {(32768, 4): (7.243, 7.311, 7.495), (32768, 8): (14.23, 15.53, 11.24)}
    for (size, devices), seconds in wanted.items():
        found = [1e3 * all_reduce_seconds(size, devices, DELAY, RATE, shape=shape)
                 for shape in ("star", "ring", "tree")]  # fmt: skip
        assert found == pytest.approx(seconds, abs=6e-3)
    large = {s: all_reduce_seconds(2**21, 8, DELAY, RATE, shape=s) for s in ("star", "ring")}
    assert large["star"] > 6 * large["ring"]
    with pytest.raises(ValueError, match="size, devices, delay, rate: got"):
        all_reduce_seconds(1.0, 0, DELAY, RATE, shape="star")
    assert window_seconds(80, 0.03, 0.02, 2) == pytest.approx(2.4)
    assert window_seconds(80, 0.03, 0.02, 1) == pytest.approx(4.0)
    assert window_seconds(80, 0.03, 0.02, 80) == pytest.approx(1.6)
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        window_seconds(80, 0.03, 0.02, 0)
    # Twice the window, twice the weights; all of them where the window holds the model.
    assert window_bytes(80, 2.0, 4, cache=1.0) - window_bytes(80, 2.0, 2, cache=1.0) == 4.0
    assert window_bytes(80, 2.0, 200) == 160.0
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        window_bytes(80, 2.0, 0)
