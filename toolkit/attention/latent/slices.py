r"""A layer of latent attention cut along its latents: one slice per device or group of devices.

Slice i keeps some features of the latents and the rows of K_h and V_h that read them. Its norm is
an estimate from its own features, exact on average if e_i is its share of the energy:

    c_i / sqrt(sum(c_i^2) / (latent e_i) + epsilon)

With `shared` features every slice scores with the first ones, the principal components, and owns
only some of them: values, and the norm, count every feature once.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from toolkit._checks import check_choice, check_shape, checked
from toolkit._kinds import check_rank
from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_count
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.weights import (
    LatentWeights,
    Projected,
    over,
    queries,
    rms_norm,
    rotated,
)

Norm = Literal["sliced", "exact", "none"]
MULTIPLIERS = ("one", "literal", "reciprocal")


@register_dataclass
@dataclass(frozen=True)
class LatentSlices:
    """The weights of a layer by slices of its latents; a pytree, made by `slice_latents`.

    Attributes:
        query_up, query_down, query_norm, rope_key, output: as in `LatentWeights`.
        latent_down: [slices, width, slice]; [width, latent] if there is a `basis`.
        key_up: [slices, slice, heads, key]; where every slice has a group of the heads to itself
            (grouped latent attention), [slices, slice, heads / slices, key].
        value_up: likewise, 0 for features of another slice.
        features: which features of the latent a slice has [slices, slice].
        owned: 1 for those that count as its own, else 0 [slices, slice].
        shares: its share of the latents' energy [slices].
        multipliers: of its scores without position [slices, heads].
        basis: as in `LatentWeights`, cut [slices, latent, slice]; or None.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> slice_latents(weights, 2).features.tolist()
        [[0, 1], [2, 3]]
    """

    query_up: Float[Array, "query heads key_and_rope"]
    latent_down: Float[Array, "*slices width slice"]
    rope_key: Float[Array, "width rope"]
    key_up: Float[Array, "slices slice own_heads key"]
    value_up: Float[Array, "slices slice own_heads value"]
    output: Float[Array, "heads value width"]
    features: Int[Array, "slices slice"]
    owned: Float[Array, "slices slice"]
    shares: Float[Array, "slices"]
    multipliers: Float[Array, "slices own_heads"]
    query_down: Float[Array, "width query"] | None = None
    query_norm: Float[Array, "query"] | None = None
    basis: Float[Array, "slices latent slice"] | None = None

    @property
    def slices(self) -> int:
        """How many there are."""
        return self.key_up.shape[0]

    def is_grouped(self, heads: int) -> bool:
        """Whether every slice has heads of its own, instead of all heads."""
        return self.slices > 1 and self.key_up.shape[2] * self.slices == heads

    def part(self, number: int) -> "Slice":
        """The part of one slice."""
        return Slice(
            self.latent_down if self.basis is not None else self.latent_down[number],
            self.key_up[number],
            self.value_up[number],
            self.owned[number],
            self.shares[number],
            self.multipliers[number],
            None if self.basis is None else self.basis[number],
        )


class Slice(NamedTuple):
    """One slice of a `LatentSlices`, without the axis of slices."""

    latent_down: Float[Array, "width slice"]
    key_up: Float[Array, "slice heads key"]
    value_up: Float[Array, "slice heads value"]
    owned: Float[Array, "slice"]
    share: Float[Array, ""]
    multipliers: Float[Array, "heads"]
    basis: Float[Array, "latent slice"] | None

    def scaled(self) -> "Slice":
        """With the multipliers in the keys."""
        factors = self.multipliers.astype(self.key_up.dtype)[None, :, None]
        return self._replace(key_up=self.key_up * factors)


@checked
def slice_latents(
    weights: LatentWeights, slices: int, *,
    shares: Float[Array, "slices"] | np.ndarray | None = None,
    multipliers: str | Float[Array, "slices *heads"] = "one", shared: int = 0,
) -> LatentSlices:  # fmt: skip
    """Cut a folded layer along its latents.

        slice i: features i latent/slices to (i + 1) latent/slices;
        with shared = m: the first m, and of the others every slices-th

    Args:
        weights: folded (`fold`), so that their gain is one.
        slices: how many.
        shares: each slice's share of the energy, `energy_shares`; None: by the number of features.
        multipliers: of each slice's scores without position: "one"; "literal", its share, as the
            paper's equation 25 reads; "reciprocal", one over it; or numbers [slices] or
            [slices, heads], such as `least_squares_multipliers`.
        shared: first features that every slice scores with.

    Returns:
        The weights by slices.

    Source: Tang et al. (2025), arXiv:2508.15881, sections 3.1 to 3.4.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = fold(LatentWeights.random(config, jax.random.key(0)))
        >>> slice_latents(weights, 2).key_up.shape
        (2, 2, 2, 4)
    """
    latent, heads, _ = weights.key_up.shape
    features, owned = _features(latent, slices, shared)
    gain = weights.latent_norm
    if not isinstance(gain, Tracer) and np.abs(np.asarray(gain, np.float64) - 1).max() > 0:
        raise ValueError("weights must be folded, so that their latent_norm is 1; see fold.")
    dtype, precise = weights.key_up.dtype, accumulator(weights.key_up.dtype)
    even = np.full(slices, features.shape[1] / latent)
    energy = even if shares is None else np.asarray(shares)
    if energy.shape != (slices,) or not (energy > 0).all() or not np.isfinite(energy).all():
        raise ValueError(f"shares must be {slices} positive numbers; got {energy.tolist()}.")
    cut = None if weights.basis is None else weights.basis[:, features].swapaxes(0, 1)
    down = weights.latent_down
    return LatentSlices(
        query_up=weights.query_up,
        latent_down=down if cut is not None else down[:, features].swapaxes(0, 1),
        rope_key=weights.rope_key,
        key_up=weights.key_up[features],
        value_up=weights.value_up[features] * jnp.asarray(owned, dtype)[..., None, None],
        output=weights.output,
        features=jnp.asarray(features, jnp.int32),
        owned=jnp.asarray(owned, precise),
        shares=jnp.asarray(energy, precise),
        multipliers=jnp.asarray(_multipliers(multipliers, energy, heads), precise),
        query_down=weights.query_down,
        query_norm=weights.query_norm,
        basis=cut,
    )


@checked
def energy_shares(
    latents: Float[Array, "*tokens latent"], slices: int, *, shared: int = 0
) -> np.ndarray:
    """Each slice's share of the energy of latents, those of a calibration text.

        e_i = mean(sum(c_i^2)) / mean(sum(c^2))

    Args:
        latents: in the basis that will be cut: `calibration_latents` of folded weights.
        slices: how many.
        shared: as in `slice_latents`; shares then add up to more than one.

    Returns:
        [slices], float64.

    Raises:
        ValueError: all latents are zero.

    Example:
        >>> energy_shares(jnp.array([[3.0, 1.0, 0.0, 0.0]]), 2).tolist()
        [1.0, 0.0]
    """
    features, _ = _features(latents.shape[-1], slices, shared)
    energy = np.square(np.asarray(latents, np.float64)).reshape(-1, latents.shape[-1]).sum(axis=0)
    if not 0 < energy.sum() < np.inf:
        raise ValueError("latents must be finite and not all zero.")
    return energy[features].sum(axis=1) / energy.sum()


def _features(latent: int, slices: int, shared: int) -> tuple[np.ndarray, np.ndarray]:
    """Features [slices, slice] of every slice, and which of them are its own."""
    check_count("slices", slices, 1)
    check_count("shared", shared, 0)
    if shared > latent or (latent - shared) % slices:
        what = f"the latent size {latent}" if not shared else f"{latent} - {shared} shared features"
        raise ValueError(f"slices must divide {what}; got {slices}.")
    number = np.arange(slices)[:, None]
    if not shared:
        features = np.arange(latent).reshape(slices, -1)
        return features, np.ones_like(features)
    first = np.broadcast_to(np.arange(shared), (slices, shared))
    rest = shared + number + slices * np.arange((latent - shared) // slices)
    features = np.concatenate([first, rest], axis=1)
    return features, (features >= shared) | (features % slices == number)


def _multipliers(wanted: Any, shares: np.ndarray, heads: int) -> np.ndarray:
    if isinstance(wanted, str):
        check_choice("multipliers", wanted, MULTIPLIERS)
        found = {"one": np.ones_like(shares), "literal": shares, "reciprocal": 1 / shares}[wanted]
    else:
        found = np.asarray(wanted)
        if found.shape not in ((len(shares),), (len(shares), heads)):
            raise ValueError(
                f"multipliers must be {len(shares)} numbers, or as many by {heads} heads; "
                f"got shape {found.shape}."
            )
    return np.broadcast_to(found.reshape(len(shares), -1), (len(shares), heads))


def slice_of(
    x: Float[Array, "*tokens width"], part: Slice, config: LatentConfig, square_sum: Any = None
) -> Float[Array, "*tokens slice"]:
    """The normalised latents of one slice; with the `square_sum` of all features, exactly."""
    if part.basis is not None:  # the whole latent is known, and with it its norm
        return rms_norm(x @ part.latent_down, config.epsilon) @ part.basis
    c = (x @ part.latent_down).astype(part.owned.dtype)
    total = (
        jnp.square(c).sum(axis=-1, keepdims=True) / part.share if square_sum is None else square_sum
    )
    return (c * lax.rsqrt(total / config.latent_size + config.epsilon)).astype(x.dtype)


def squares(x: Float[Array, "*tokens width"], part: Slice) -> Float[Array, "*tokens 1"]:
    """Sum of the squares of the features that a slice owns."""
    c = (x @ part.latent_down).astype(part.owned.dtype)
    return (jnp.square(c) * over(part.owned, c)).sum(axis=-1, keepdims=True)


def project_slices(
    x: Float[Array, "*tokens width"], sliced: LatentSlices, positions: Int[Array, "*tokens"],
    config: LatentConfig, *,
    norm: Norm,
) -> Projected:  # fmt: skip
    """Queries, latents of all slices side by side, and rotary keys of tokens."""
    parts = [sliced.part(number) for number in range(sliced.slices)]
    total: Any = None
    if norm == "exact" and sliced.basis is None:
        total = sum(squares(x, part) for part in parts)
    if norm == "none":
        latents = [x @ part.latent_down for part in parts]
    else:
        latents = [slice_of(x, part, config, total) for part in parts]
    latents = jnp.concatenate(latents, axis=-1)
    q, q_r = queries(x, sliced, positions, config)
    return Projected(q, q_r, latents, rotated(x @ sliced.rope_key, positions, config))


def check_slices(x: Array, sliced: LatentSlices, config: LatentConfig, axes: str) -> None:
    """Refuse slices of another layer, or tokens of another width or dtype."""
    name = "x" if "time" in axes else "x_t"
    check_rank(name, x, axes)
    check_shape(name, x, (*x.shape[:-1], config.width), axes)
    if 0 in x.shape:
        raise ValueError(f"{name} must hold at least one token; got shape {tuple(x.shape)}.")
    size, heads = sliced.owned.shape[1], config.heads
    if sliced.is_grouped(heads):
        heads //= sliced.slices
    wanted = (sliced.slices, size, heads, config.key_size)
    check_shape("sliced.key_up", sliced.key_up, wanted, "slices slice heads key")
    wanted = (sliced.slices, size, heads, config.value_size)
    check_shape("sliced.value_up", sliced.value_up, wanted, "slices slice heads value")
    wanted = (config.width, config.rope_size)
    check_shape("sliced.rope_key", sliced.rope_key, wanted, "width rope")
    if sliced.key_up.dtype != x.dtype:
        raise TypeError(f"{name} is {x.dtype} and the slices {sliced.key_up.dtype}.")
