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

are the sizes of the published checkpoints that `load_checkpoint` reads.
"""

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


PRESETS: dict[str, LoopedConfig] = {
    f"lt2-{kind}-{size}": make(kind)
    for kind in _WORDS
    for size, make in (("tiny", _tiny), ("600m", _600m), ("1.3b", _1_3b))
} | {"ouro-1.4b": _ouro(24), "ouro-2.6b": _ouro(48)}
"""Configurations by name, LT2's and those of Zhu et al., "Scaling Latent Reasoning via Looped
Language Models" (Ouro), 2025. LT2 does not publish the following, which are our choices: 16 heads
at 1.3B, the window of 2048 at 600M (the recipe gives it at 1.3B), the SwiGLU of the 600M gated
delta nets (RWKV-7's), the heads of native sparse attention, four to one in the hybrid with DeepSeek
sparse attention."""
