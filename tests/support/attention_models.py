"""Models with the options of published attention families, each option in one of two."""

from typing import Any

from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.testing.layers import drawn

_SOFTMAX = {
    "as GPT-NeoX and Phi": {"projection_biases": True, "output_bias": True, "sinks": True},
    "as OLMo 2, Gemma 2 and Granite": {
        "projection_norm": True,
        "logits_soft_cap": 2.0,
        "score_scale": 0.3,
        "rotary_factor": 2.0,
        "rotary_rule": "linear",
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "as GPT-NeoX and Phi": {
        "norm": "layer",
        "parallel_residual": True,
        "head_bias": True,
        "feed_forwards": "mlp",
        "options": {"mlp": {"biases": True, "activation": "gelu"}},
    },
    "as OLMo 2, Gemma 2 and Granite": {
        "pre_norm": False,
        "sandwich_norm": True,
        "embedding_scale": 2.0,
        "residual_scale": 0.5,
        "head_scale": 0.7,
        "head_soft_cap": 3.0,
        "tied_embedding": False,
        "options": {"swiglu": {"biases": True, "activation": "relu2"}},
    },
}


def model_of(name: str, **fields: Any) -> LoopedLM:
    """Two loops of layers with a window, without positions, and with both."""
    own, softmax = FAMILIES[name], _SOFTMAX[name]
    options = own["options"] | dict.fromkeys(("full", "nope"), softmax)
    options["window"] = {**softmax, "sliding_window": 5, "rope_theta": 50.0}
    sizes = {"width": 32, "heads": 4, "vocabulary": 64, "feed_forward": 32, "loops": 2}
    every = sizes | own | {"options": options} | fields
    config = LoopedConfig.tiny("window nope full", **every)
    return drawn(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
