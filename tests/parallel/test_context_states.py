"""Mixers with a state, and latent attention, over tokens on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import by_night

from toolkit.attention import MIXERS, draw_inputs
from toolkit.parallel import context_mixer, make_mesh

DEVICES, TIME = 4, 32
TOLERANCE = 1e-5
RECURRENT = [name for name, row in MIXERS.items() if row.transition]
DOCUMENTS = jnp.asarray([[0] * 5 + [1] * 9 + [0] * 10 + [4] * 8, [7] * 32])


def inputs_of(name, time=TIME):
    sizes = {"batch": 2, "heads": 2, "key": 4, "value": 6}
    return tuple(map(jnp.asarray, draw_inputs(MIXERS[name], time, **sizes)))


def mesh_of(devices=DEVICES):
    return make_mesh({"context": devices}, devices=jax.devices()[:devices])


def value_and_gradients(mix, inputs, weights):
    def loss(inputs):
        out = mix(inputs)
        return (out * weights).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    return out, *gradients


def both(name, inputs, segment_ids, weights):
    mesh, row = mesh_of(), MIXERS[name]
    over = lambda xs: context_mixer(name, xs, mesh, segment_ids=segment_ids)  # noqa: E731
    alone = lambda xs: row.function(*xs, segment_ids=segment_ids)[0]  # noqa: E731
    return (value_and_gradients(mix, inputs, weights) for mix in (over, alone))


def weights_like(name, inputs):
    v = inputs[MIXERS[name].names.index("v")]
    shape = (*v.shape[:3], v.shape[-1])
    return jax.random.normal(jax.random.key(1), shape)


FIRST = ("gla", "gdn")  # a diagonal and a matrix


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.nightly)
        for name in RECURRENT
    ],
)
def test_a_state_passes_from_device_to_device(name):
    """Values and gradients, with documents that begin on a device, between two, and on neither."""
    inputs = inputs_of(name)
    found, wanted = both(name, inputs, DOCUMENTS, weights_like(name, inputs))
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_night({"gla"}, FIRST))
def test_what_is_not_finite_stays_in_its_document(name):
    """NaN in one value: seen to the end of its document, in no gradient of what comes before."""
    inputs = inputs_of(name)
    weights = weights_like(name, inputs).at[0, 5:14].set(0)
    v = MIXERS[name].names.index("v")
    bad = tuple(x.at[0, 7].set(jnp.nan) if i == v else x for i, x in enumerate(inputs))
    (found, wanted), (clean, _) = (both(name, xs, DOCUMENTS, weights) for xs in (bad, inputs))
    np.testing.assert_array_equal(jnp.isnan(found[0]), jnp.isnan(wanted[0]))
    assert jnp.isnan(found[0][0, 7:14]).all()
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        for document in (slice(0, 5), slice(14, None)):
            np.testing.assert_array_equal(left[0, document], right[0, document])
        np.testing.assert_array_equal(left[1], right[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "full"}, "name must be one of 'linear', "),
        ({"inputs": ()}, "inputs: got 0 arrays, want 4: q, k, v, g"),
        ({"time": 30}, "time=30 is not divisible by 4 parts .* 32 would be"),
        ({"axis": "model"}, "axis 'model': the mesh has 'context'"),
        ({"batch_axis": "context"}, "batch_axis='context': want other axes than axis, 'context'"),
        ({"segment_ids": jnp.zeros((2, 3), int)}, "segment_ids have shape"),
    ],
)
def test_what_does_not_fit_is_said(arguments, message):
    arguments = dict(arguments)
    inputs = arguments.pop("inputs", inputs_of("gla", arguments.pop("time", TIME)))
    with pytest.raises(ValueError, match=message):
        context_mixer(arguments.pop("name", "gla"), inputs, mesh_of(), **arguments)
