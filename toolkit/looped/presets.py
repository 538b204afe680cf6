"""Published looped models by name. LT2's: what mixes tokens, at which size.

    lt2-looped       full attention in every layer: the paper's baseline "Looped Transformer"
    lt2-linear       gated delta nets
    lt2-sparse       sliding windows
    lt2-sparse-nsa   native sparse attention
    lt2-sparse-dsa   DeepSeek sparse attention, with the indexer LT2 released
    lt2-hybrid       four gated delta nets to one full attention, interleaved
    lt2-hybrid-dsa   four gated delta nets to one DeepSeek sparse attention

each at "tiny" (five layers of width 128 over bytes, four loops: ours, for a laptop), "600m" and
"1.3b" (the paper's: four loops over the Llama-3 vocabulary).

    ouro-1.4b, ouro-2.6b    full attention, four loops, a norm after each and a gate to stop at

    mixtral-8x7b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, kimi-k2, gpt-oss-120b

are mixtures of experts that do not loop. The last two lines are the sizes of the published
checkpoints that `load_checkpoint` reads.
"""

import dataclasses

from toolkit.attention import latent
from toolkit.experts import ROUTERS
from toolkit.looped.config import LoopedConfig
from toolkit.looped.patterns import interleave

_WORDS = {
    "looped": ("full", "full"),
    "linear": ("gdn", "gdn"),
    "sparse": ("window", "window"),
    "sparse-nsa": ("nsa", "nsa"),
    "sparse-dsa": ("dsa", "dsa"),
    "hybrid": ("gdn", "full"),
    "hybrid-dsa": ("gdn", "dsa"),
}


_OPTIONS = {
    # Kernels of native sparse attention need at least 16 query heads per key head.
    "nsa": {"key_value_heads": 1},
    "dsa": {"indexer": "lt2"},
}
_LARGE = _OPTIONS | {"window": {"sliding_window": 2048}}


def _of(options, kind):
    return {word: options[word] for word in _WORDS[kind] if word in options}


def _tiny(kind):
    return LoopedConfig.tiny(interleave(5, *_WORDS[kind]), loops=4, options=_of(_OPTIONS, kind))


def _lt2(kind, layers, width, heads, **fields):
    return LoopedConfig(
        vocabulary=128_256,
        width=width,
        pattern=interleave(layers, *_WORDS[kind]),
        loops=4,
        heads=max(heads, 16) if kind == "sparse-nsa" else heads,
        options=_of(_LARGE, kind),
        dtype="bfloat16",
        **fields,
    )


def _600m(kind):
    # Released with a SwiGLU of 1.13 x 8/3 x width, up to 3328, beside recurrent layers.
    return _lt2(kind, 21, 1024, 8, feed_forward=3328 if "gdn" in _WORDS[kind] else None)


def _1_3b(kind):
    config = _lt2(kind, 20, 2048, 16)
    # The gate is part of the released recipe of the hybrid; the baseline is published without it.
    return config.with_options(full={"output_gate": True}) if kind == "hybrid" else config


def _ouro(layers):
    return LoopedConfig(
        vocabulary=49_152,
        width=2048,
        pattern=interleave(layers, "full"),
        loops=4,
        heads=16,
        feed_forward=5632,
        rope_theta=1e6,
        residual_gate=False,
        norm_every_loop=True,
        exit_gate=True,
        sandwich_norm=True,
        tied_embedding=False,
        dtype="bfloat16",
    )


def _mixture(
    router, layers, width, heads, vocabulary, *, words=("full",) * 2, dense=0, moe, **fields
):
    """A published mixture of experts, by the row of its router; `dense` layers come first."""
    row = ROUTERS[router]
    moe = dict(row.switches) | moe
    moe |= {"choice_bias": row.has_choice_bias, "router_bias": row.has_logit_bias}
    moe |= {"activation": row.activation, "biases": row.has_biases}
    options = fields.pop("options", {})
    return LoopedConfig(
        vocabulary=vocabulary,
        width=width,
        pattern=interleave(layers, *words, ratio=(1, 1)),
        feed_forwards=" ".join(["swiglu"] * dense + ["moe"] * (layers - dense)),
        heads=heads,
        options=options | {"moe": moe},
        residual_gate=False,
        tied_embedding=False,
        dtype="bfloat16",
        **fields,
    )


def _qwen3(layers, width, heads, hidden, expert):
    return _mixture(
        "qwen3_moe", layers, width, heads, 151_936,
        moe={"experts": 128, "chosen": 8, "hidden": expert},
        options={"full": {"key_value_heads": 4, "head_size": 128, "query_key_norm": True}},
        feed_forward=hidden, rope_theta=1e6, norm_epsilon=1e-6,
    )  # fmt: skip


def _latent(name, vocabulary, experts, dense):
    sizes = latent.PRESETS[name]
    assert sizes.yarn is not None
    yarn = {f"yarn_{key}": value for key, value in dataclasses.asdict(sizes.yarn).items()}
    names = ("latent_size", "key_size", "rope_size", "value_size", "query_latent_size")
    return _mixture(
        name, sizes.layers, sizes.width, sizes.heads, vocabulary, words=("mla",) * 2, dense=dense,
        moe={"experts": experts, "chosen": 8, "hidden": 2048, "shared_hidden": 2048},
        options={"mla": {key: getattr(sizes, key) for key in names} | yarn},
        feed_forward=18_432, rope_theta=sizes.rope_theta, norm_epsilon=sizes.epsilon,
    )  # fmt: skip


_OSS = {
    "key_value_heads": 8, "head_size": 64, "projection_biases": True, "output_bias": True,
    "sinks": True, "rotary_factor": 32.0, "rotary_low": 1.0, "rotary_high": 32.0,
    "rotary_original_length": 4096, "rotary_rule": "yarn", "rotary_truncate": False,
}  # fmt: skip
_MIXTURES = {
    "mixtral-8x7b": _mixture(
        "mixtral", 32, 4096, 32, 32_000,
        moe={"experts": 8, "chosen": 2, "hidden": 14_336},
        options={"full": {"key_value_heads": 8}},
        feed_forward=14_336, rope_theta=1e6, norm_epsilon=1e-5,
    ),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12_288, 1536),
    "deepseek-v3": _latent("deepseek_v3", 129_280, 256, dense=3),
    "kimi-k2": _latent("kimi_k2", 163_840, 384, dense=1),
    "gpt-oss-120b": _mixture(
        "gpt_oss", 36, 2880, 64, 201_088, words=("window", "full"),
        moe={"experts": 128, "chosen": 4, "hidden": 2880},
        options={"full": _OSS, "window": _OSS | {"sliding_window": 128}},
        feed_forward=2880, rope_theta=150_000.0, norm_epsilon=1e-5,
    ),
}  # fmt: skip


PRESETS: dict[str, LoopedConfig] = (
    {
        f"lt2-{kind}-{size}": make(kind)
        for kind in _WORDS
        for size, make in (("tiny", _tiny), ("600m", _600m), ("1.3b", _1_3b))
    }
    | {"ouro-1.4b": _ouro(24), "ouro-2.6b": _ouro(48)}
    | _MIXTURES
)
"""Configurations by name, LT2's and those of Zhu et al., "Scaling Latent Reasoning via Looped
Language Models" (Ouro), 2025. LT2 does not publish the following, which are our choices: 16 heads
at 1.3B, the window of 2048 at 600M (the recipe gives it at 1.3B), the SwiGLU of the 600M gated
delta nets (RWKV-7's), the heads of native sparse attention, four to one in the hybrid with DeepSeek
sparse attention."""
