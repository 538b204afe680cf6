"""The meaning of `implementation=None`: the form for each platform, with the evidence.

A row cites the record that shows its form to be the fastest there. No accelerator has been measured
yet, so those rows cite none and give the reason for the choice.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from toolkit._compat import vary_alike, varying_axes
from toolkit.experts.blocks import blocks
from toolkit.experts.products import Activation, Weights, dense, gather, padded, pallas, ragged

FORMS: dict[str, Any] = {
    "blocks": blocks,
    "dense": dense,
    "gather": gather,
    "padded": padded,
    "ragged": ragged,
    "pallas": pallas,
}


class Known(NamedTuple):
    """The form for a platform."""

    platform: str  # "cpu" or "tpu"; "default" for all others
    implementation: str  # a key of `FORMS`
    why: str  # the reason
    # file in data/measurements in which it is the fastest, or None if not measured
    record: str | None = None


BEST_KNOWN = (
    Known("cpu", "blocks", "reads no weights twice", "amd-epyc-2-cores/experts.json"),
    Known("tpu", "pallas", "compiled ahead of time: no product computes more than its rows"),
    Known("default", "padded", "batched products; jaxlib 0.10 has no fast ragged_dot on GPUs"),
)
FEW = "gather"
"""Instead of "padded" where tokens choose at most half as many experts as there are."""


def in_best_form(
    implementation: str | None, activation: Activation, x: Array, experts: Array, weights: Weights
) -> Array:
    """The outputs of all pairs, in the form asked for, or in the best known of the platform."""
    count = weights.up.shape[0]
    # No form may count an index below 0 from the end.
    x, experts, weights = vary_alike((x, jnp.where(experts < 0, count, experts), weights))
    if implementation is not None:
        return FORMS[implementation](activation, x, experts, weights)
    names = {row.platform: row.implementation for row in BEST_KNOWN}
    if 2 * experts.size <= count:
        names["default"] = FEW
    if x.dtype == "float64" or varying_axes(x):  # which the kernel refuses
        del names["tpu"]
    forms: dict[str, Any] = {
        platform: functools.partial(FORMS[name], activation) for platform, name in names.items()
    }
    return lax.platform_dependent(x, experts, weights, **forms)
