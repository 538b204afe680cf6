"""Models with sliced latents: the same model in another basis, and with one softmax per slice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from toolkit._checks import check_choice, checked
from toolkit._compat import set_value
from toolkit.attention.latent import (
    energy_shares,
    fold,
    hadamard_basis,
    principal_basis,
    random_basis,
)
from toolkit.looped.decoding.steps import prefill
from toolkit.looped.mixing.latent import MLALayer
from toolkit.looped.model import LoopedLM

BASES = ("principal", "hadamard", "random", "none")


@checked
def rotate_latents(
    model: LoopedLM, tokens: Int[Array, "batch time"], *,
    basis: str = "principal", key: Array | None = None,
) -> LoopedLM:  # fmt: skip
    """Express the latents of "mla" layers in another basis and fold the gains of their norms.

        W_c <- W_c U        K_h <- U^T diag(gamma) K_h        V_h <- U^T diag(gamma) V_h

    Args:
        model: not changed.
        tokens: a text to calibrate on; every layer gets one basis for all loops.
        basis: "principal" components of the text's latents, "hadamard", "random", or "none", which
            folds the gains alone.
        key: random key for the signs or bases.

    Returns:
        A model that computes the same function, up to rounding.

    Source: Tang et al. (2025), arXiv:2508.15881, equation 17.

    Example:
        >>> from flax import nnx
        >>> sizes = {"latent_size": 8, "key_size": 4, "rope_size": 4, "value_size": 4}
        >>> config = LoopedConfig.tiny("mla", width=16, heads=2, options={"mla": sizes})
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> rotate_latents(model, jnp.array([[5, 3, 8]])).config.pattern
        'mla'
    """
    check_choice("basis", basis, BASES)
    other = nnx.clone(model)
    keys = jax.random.key(0) if key is None else key
    found = zip(_mla_layers(other), _latents(model, tokens), strict=True)
    for number, ((_, _, layer), latents) in enumerate(found):
        own = jax.random.fold_in(keys, number)
        _rotate(layer, _basis(basis, latents, own))
    return other


@checked
def with_slices(
    model: LoopedLM, slices: int, *,
    slices_prompt: bool = False, exact_norm: bool = True,
    tokens: Int[Array, "batch time"] | None = None,
) -> LoopedLM:  # fmt: skip
    """Let "mla" layers decode with one softmax per slice of their latents.

        y = sum_i sum_h O_h V_h,i softmax_j(scale (q_h . K_h,i c_ij + p_h . r_j)) c_ij

    This is an approximation. It can serve `generate_speculatively` as a cheap draft that shares the
    exact model's cache (`shares_cache=True`).

    Args:
        model: not changed; after `rotate_latents` the first slices carry most of the energy.
        slices: how many; 1 is the exact model.
        slices_prompt: read prompts with slices too; otherwise they are read exactly.
        exact_norm: every slice knows the norm of the whole latent; otherwise it estimates the norm
            from its own features and its share of the energy.
        tokens: a text on which to measure these shares per layer; None assumes equal shares, which
            hold in a Hadamard basis but not for principal components. A saved model has equal
            shares.

    Returns:
        A model that shares the arrays; programs that take it are compiled anew.

    Source: Tang et al. (2025), arXiv:2508.15881.

    Example:
        >>> from flax import nnx
        >>> sizes = {"latent_size": 8, "key_size": 4, "rope_size": 4, "value_size": 4}
        >>> config = LoopedConfig.tiny("mla", width=16, heads=2, options={"mla": sizes})
        >>> with_slices(LoopedLM(config, rngs=nnx.Rngs(0)), 2).config.mla.slices
        2
    """
    changes = {"slices": slices, "slices_prompt": slices_prompt, "exact_norm": exact_norm}
    other = nnx.clone(model)
    found = _mla_layers(other)
    other.config = model.config.with_options(mla=changes)
    for _, _, layer in found:
        layer.read_options(other.config)
    if tokens is not None:
        for (_, _, layer), latents in zip(found, _latents(model, tokens), strict=True):
            layer.shares = tuple(energy_shares(latents, slices).tolist())
    return other


def _mla_layers(model: LoopedLM) -> list[tuple[str, int, MLALayer]]:
    """Every "mla" layer: the part of the model that holds it, its index there, and the layer."""
    found = [
        (where, index, block.mixer)
        for where in ("prelude", "blocks", "coda")
        for index, block in enumerate(getattr(model, where))
        if isinstance(block.mixer, MLALayer)
    ]
    if not found:
        raise ValueError(f"model must have an 'mla' layer; got pattern {model.config.pattern!r}.")
    return found


def _latents(model: LoopedLM, tokens: Int[Array, "batch time"]) -> list[Array]:
    """The normalised latents of a text, without gain, of every "mla" layer in all loops."""
    places = _mla_layers(model)
    _, cache = prefill(model, tokens, tokens.shape[1])

    def of(where: str, index: int) -> Array:
        rows: Any = cache.loops if where == "blocks" else (getattr(cache, where),)
        return jnp.concatenate([row[index].latents for row in rows])

    return [of(where, index) for where, index, _ in places]


def _basis(name: str, latents: Array, key: Array) -> np.ndarray | None:
    size = latents.shape[-1]
    if name == "principal":
        return principal_basis(latents)
    if name == "none":
        return None
    return hadamard_basis(size, key) if name == "hadamard" else random_basis(size, key)


def _rotate(layer: MLALayer, basis: np.ndarray | None) -> None:
    """Fold a basis and the gain into the parameters of a layer, in their own type."""
    by_head = (layer.sizes.latent_size, layer.sizes.heads, -1)
    shapes = {"latent_down": (layer.sizes.width, -1), "key_up": by_head, "value_up": by_head}
    kernels = {name: getattr(layer, name).kernel for name in shapes}
    scale: Any = layer.latent_norm.scale
    own = {name: kernel[...].reshape(shapes[name]) for name, kernel in kernels.items()}
    folded = fold(dataclasses.replace(layer.weights(), latent_norm=scale[...], **own), basis)
    for name, kernel in kernels.items():
        set_value(kernel, getattr(folded, name).reshape(kernel.shape).astype(kernel.dtype))
    set_value(scale, jnp.ones_like(scale[...]))
