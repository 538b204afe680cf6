"""The layers of a small trained model with latent attention, and their inputs for a text."""

import functools
import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit.attention.latent import LatentConfig, LatentWeights
from toolkit.lab.kit.stored import stored_folder
from toolkit.looped import load_model
from toolkit.looped.mixing.latent import MLALayer

TEXT = "the statement raises an exception if the statement "
CALIBRATION = (
    "A function call always assigns values to all parameters mentioned in the parameter list, "
    "either from positional arguments, from keyword arguments, or from default values. When a "
    "class is called, a new instance of it is created and passed to its initialiser. The name is "
    "looked up in the module, and an error is raised if it is not found there. An object that is "
    "not hashable cannot be a key of a dictionary, and comparing two objects of different types "
    "returns false unless one of them knows better. If the expression is true the suite is "
    "executed, and otherwise the loop ends and the rest of the block is run as it stands. "
)


class SmallLayer(NamedTuple):
    """One layer: sizes, weights, and its normalised input for the two texts."""

    config: LatentConfig
    weights: LatentWeights
    x: Float[Array, "1 time width"]
    calibration: Float[Array, "1 time width"]


@functools.cache
def small_layers() -> tuple[SmallLayer, ...]:
    """The layers of the stored model, first one first."""
    model = load_model(stored_folder("latent") / "mla-mla.safetensors")
    streams = [model.embedding(_bytes_of(text)) for text in (TEXT, CALIBRATION)]
    layers = []
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, MLALayer)
        read = [block.mixer_norm(h) for h in streams]
        layers.append(SmallLayer(mixer.sizes, mixer.weights(), *read))
        streams = [block(h)[0] for h in streams]
    return tuple(layers)


def record() -> dict[str, Any]:
    """The record of the model's training."""
    return json.loads((stored_folder("latent") / "mla-mla.json").read_text())


def _bytes_of(text: str) -> Array:
    return jnp.asarray(np.frombuffer(text.encode(), np.uint8)[None].astype(np.int32))
