"""RWKV-7 in the files of flash-linear-attention, which publishes them in Hugging Face's form.

A layer of theirs is two blocks of ours, "rwkv7" and "channel_mix".
"""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.hybrids import whole_of

_PAIR = ["time_mix", "channel_mix"]


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """Two blocks per layer, and the sizes that follow from others."""
    width, layers = whole_of(settings, "hidden_size"), whole_of(settings, "num_hidden_layers")
    values = settings.pop("value_dim", None)
    if any(size != width for size in (values if isinstance(values, list) else [values or width])):
        raise ValueError(f"config.json has value_dim {values!r}; known is hidden_size, {width}.")
    size, heads = settings.get("head_dim"), settings.get("num_heads")
    if size is None and isinstance(heads, int) and heads > 0:
        size = width // heads
    size = whole_of(settings | {"head_dim": size}, "head_dim")
    if size < 1 or width % size or heads not in (None, width // size):
        raise ValueError(
            f"config.json has head_dim {size} and num_heads {heads!r}, which do not make {width} "
            "channels."
        )
    settings |= {"head_dim": size, "num_heads": width // size}
    ratio = settings.pop("hidden_ratio", None)
    if settings.get("intermediate_size") is None:
        hidden = int(width * (4 if ratio is None else ratio))
        settings["intermediate_size"] = 32 * -(-hidden // 32)
    epsilon = settings.get("norm_eps")
    if isinstance(epsilon, float | int):
        settings["norm_eps_of_heads"] = size * epsilon
    return settings | {"layer_types": _PAIR * layers, "num_hidden_layers": 2 * layers}


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    layers = settings["num_hidden_layers"] // 2
    if settings.pop("layer_types") != _PAIR * layers:
        raise ValueError("style 'rwkv7' wants the pattern \"rwkv7 channel_mix\", repeated.")
    if settings.pop("norm_eps_of_heads") != settings["head_dim"] * settings["norm_eps"]:
        raise ValueError("style 'rwkv7' wants rwkv7.norm_epsilon to be key_size norm_epsilon.")
    return settings | {"num_hidden_layers": layers}


RWKV7 = Family(
    "rwkv7_of_fla", layers="listed", fed="none", per_layer=2,
    switches={"rwkv7.value_residual": True},
    reads={
        "num_heads": scalars.size("heads"),
        "head_dim": scalars.size("rwkv7.key_size", "rwkv7.value_size"),
        "intermediate_size": scalars.size("channel_mix.hidden"),
        "norm_eps": scalars.EPSILON,
        "norm_eps_of_heads": scalars.number("rwkv7.norm_epsilon"),
        "norm_first": scalars.truth("embedding_norm"),
        "norm_bias": scalars.Setting(
            ("norm",), bool,
            lambda value, _: "layer" if value else "layer_without_bias",
            lambda value, _: value == "layer",
        ),
        "decay_low_rank_dim": scalars.size("rwkv7.decay_rank"),
        "a_low_rank_dim": scalars.size("rwkv7.rate_rank"),
        "gate_low_rank_dim": scalars.size("rwkv7.gate_rank"),
        "v_low_rank_dim": scalars.size("rwkv7.value_rank"),
    },
    defaults={
        "norm_eps": 1e-5, "norm_first": True, "norm_bias": True, "head_dim": 64,
        "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
    },
    fixed={"hidden_act": ("sqrelu", None), "attn": (None,)},
    harmless="attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp "
    "rope_parameters",
    words={"time_mix": "rwkv7", "channel_mix": "channel_mix"},
    norms={"mixer_norm": "attn_norm", "feed_forward_norm": "ffn_norm"},
    names={"embed_tokens": "embeddings"},
    prepared=_prepared, written=_written,
)  # fmt: skip
"""The row of `FAMILIES`."""
