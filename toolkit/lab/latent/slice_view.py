"""The latents of a trained layer in slices: their softmaxes and the true one. Pure functions."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from toolkit.attention.latent import (
    SlicingReport,
    calibration_latents,
    energy_shares,
    fold,
    hadamard_basis,
    principal_basis,
    slice_latents,
    slicing_report,
)
from toolkit.attention.latent.tpla import Norm, slice_scores
from toolkit.lab.kit.view import Data, View
from toolkit.lab.latent.small_layers import TEXT, record, small_layers

BASES = ("none", "hadamard", "principal")
NORMS: tuple[Norm, ...] = ("sliced", "exact")


class Sliced(NamedTuple):
    """The effect of slicing a layer on the text.

    Attributes:
        true: softmax of the whole latent [heads, queries, keys].
        own: softmax of every slice [slices, heads, queries, keys].
        shares: shares of the latents' energy on the calibration text [slices].
        report: errors on the text.
    """

    true: np.ndarray
    own: np.ndarray
    shares: np.ndarray
    report: SlicingReport


@functools.cache
def sliced_layer(layer: int, basis: str, slices: int, norm: Norm) -> Sliced:
    """One layer of the stored model with its latents in another basis and sliced; cached."""
    config, weights, x, calibration = small_layers()[layer]
    latents = calibration_latents(calibration, weights, config)
    bases = {
        "none": lambda: None,
        "hadamard": lambda: hadamard_basis(config.latent_size, jax.random.key(0)),
        "principal": lambda: principal_basis(latents),
    }
    folded = fold(weights, bases[basis]())
    shares = energy_shares(calibration_latents(calibration, folded, config), slices)
    cut = slice_latents(folded, slices, shares=shares)
    scores = slice_scores(x, cut, config, norm=norm)
    visible = np.tri(x.shape[1], dtype=bool)

    def softmax(found):
        masked = np.where(visible, np.asarray(found, np.float64), -np.inf)
        made = np.exp(masked - masked.max(axis=-1, keepdims=True))
        return made / made.sum(axis=-1, keepdims=True)

    report = slicing_report(x, cut, config, norm=norm)
    true, own = softmax(scores.true[0, 0]), softmax(scores.slices[:, 0])
    return Sliced(true, own, shares, report)


@dataclass(frozen=True)
class SliceView(View):
    """The softmaxes of one query, and the errors under every basis and norm.

    Attributes:
        true: weights on the tokens up to the query.
        own: weights of every slice [slices, keys].
        errors: (basis, norm) -> relative error of the layer's output.
    """

    layer: int
    basis: str
    slices: int
    norm: Norm
    head: int
    token: int
    true: np.ndarray
    own: np.ndarray
    shares: np.ndarray
    report: SlicingReport
    errors: dict[tuple[str, str], float]

    def data(self) -> Data:
        letters = ["space" if letter == " " else letter for letter in TEXT[: self.token + 1]]
        slices = {f"slice {n + 1}": [*map(float, row)] for n, row in enumerate(self.own)}
        return {"token": letters, "true weight": [*map(float, self.true)], **slices}

    def sentence(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        apart = ", ".join(f"{float(divergence):.2f}" for divergence in self.report.divergence)
        bought = self.errors[self.basis, "sliced"] - self.errors[self.basis, "exact"]
        return (
            f"Layer {self.layer}, basis {self.basis}, {self.slices} slices with {shares} of the "
            f"energy, norm {self.norm}: the layer's output is off by {self.report.output_error:.1%}"
            f", the slices' softmaxes are {apart} nats from the true one. The exact norm takes "
            f"{100 * bought:.1f} points off the error. Drawn: head {self.head}, the query at byte "
            f"{self.token + 1} of “{TEXT}”."
        )

    def footnote(self) -> str:
        loss = record()["result"]["held_out_loss"]
        return (
            f"Measured here on a small trained model (recorded: {loss:.2f} nats per byte); "
            "bases and shares of energy from another text."
        )


def slice_view(
    *, layer: int, basis: str, slices: int, norm: Norm, head: int, token: int
) -> SliceView:
    """The effect of slicing on one query of the text; `layer` and `head` count from 1."""
    found = sliced_layer(layer - 1, basis, slices, norm)
    errors = {
        (basis, other): sliced_layer(layer - 1, basis, slices, other).report.output_error
        for basis in BASES
        for other in NORMS
    }
    token = min(token, len(TEXT) - 1)
    seen = slice(0, token + 1)
    return SliceView(
        layer, basis, slices, norm, head, token, found.true[head - 1, token, seen],
        found.own[:, head - 1, token, seen], found.shares, found.report, errors,
    )  # fmt: skip
