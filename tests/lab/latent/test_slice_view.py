"""A trained latent in slices: exact where it must be, and made as its record says."""

import hashlib

import numpy as np
import pytest

from toolkit.lab.latent.slice import (
    BASES,
    TEXT,
    record,
    slice_view,
    sliced_layer,
    small_layers,
    softmaxes,
)
from toolkit.measure.stored import stored_folder

# They compile what compares slices.
pytestmark = pytest.mark.slow


def test_no_basis_changes_the_true_softmax_and_all_are_distributions():
    whole, _ = softmaxes(1, "none", 2, "exact")
    for basis in BASES:
        true, own = softmaxes(1, basis, 2, "exact")
        np.testing.assert_allclose(true, whole, atol=1e-5)
        np.testing.assert_allclose(own.sum(axis=-1), 1)
        np.testing.assert_allclose(sliced_layer(1, basis, 2, "exact").shares.sum(), 1, rtol=1e-6)
        assert own.shape == (2, *true.shape)


def test_principal_components_keep_most_and_the_exact_norm_helps():
    view = slice_view(layer=2, basis="principal", slices=2, norm="exact", head=1, token=len(TEXT))
    in_four = slice_view(
        layer=2, basis="principal", slices=4, norm="exact", head=1, token=len(TEXT)
    )
    assert min(view.shares[0], in_four.shares[0]) > 0.9
    assert view.report.output_error == view.errors["principal", "exact"]
    for basis in BASES:
        for one in (view, in_four):  # the notebook says so
            assert 0 < one.errors[basis, "sliced"] - one.errors[basis, "exact"] < 0.03
    assert view.errors["principal", "sliced"] < 0.5 * view.errors["hadamard", "exact"]
    assert view.token == len(TEXT) - 1
    assert len(view.true) == len(TEXT)
    assert "points off the error" in view.sentence()


def test_the_model_is_small_and_its_record_is_its_own():
    path = stored_folder("latent") / "mla-mla.safetensors"
    stored = path.read_bytes()
    assert len(stored) < 400_000
    for layer in small_layers():  # wider latents would compress nothing
        assert (layer.config.latent_size, layer.x.shape[-1]) == (64, 128)
    assert hashlib.sha256(stored).hexdigest() == record()["result"]["sha256"]
    assert record()["environment"]["command"].startswith("toolkit train runs/latent/mla-mla ")
