"""DeepSeek-V4: compressed attention, several residual streams, and experts with bounded gates.

Two kinds of rotary settings, "main" of layers with a window alone and "compress" of the others, and
a rate of compression per kind of layer become settings of their own here.
"""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.feed_forward import MIXTURES

HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
RATES = {SPARSE: ("csa_rate", 4), HEAVY: ("hca_rate", 128)}
KINDS = {0: "sliding_attention", 4: SPARSE, 128: HEAVY}
"""Kinds of layers by `compress_ratios`, which the published files have."""

YARN = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_truncate",
}
WORDS = {"sliding_attention": "shared_window", SPARSE: "csa", HEAVY: "hca"}


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """One setting per number."""
    found = dict(settings)
    count = found.get("num_hidden_layers") or 0
    fed, hashed = found.pop("mlp_layer_types", None), found.pop("num_hash_layers", 3)
    if fed is None:
        fed = ["hash_moe" if layer < hashed else "moe" for layer in range(count)]
    if len(fed) != count or {*fed} - MIXTURES:
        raise ValueError(
            f"config.json has the mlp_layer_types {fed!r}; wanted {count} out of 'hash_moe', 'moe'."
        )
    found["fed_types"] = " ".join(fed)
    ratios = found.pop("compress_ratios", None)
    if found.get("layer_types") is None and ratios is not None:
        odd = next((ratio for ratio in ratios if ratio not in KINDS), None)
        if odd is not None:
            raise ValueError(f"config.json has the compress_ratios {odd!r}; known are 0, 4, 128.")
        found["layer_types"] = [KINDS[ratio] for ratio in ratios[:count]]
    rates = found.pop("compress_rates", None) or {}
    for kind, (name, usual) in RATES.items():
        older = found.pop("compress_rate_" + name[:3], None)
        found[name] = rates.get(kind, usual) if older is None else older
    given = found.pop("rope_parameters", None) or found.pop("rope_scaling", None) or {}
    if not {"main", "compress"} <= {*given}:
        given = {"main": {}, "compress": given}
    head, share = found["head_dim"], found.pop("partial_rotary_factor", None)
    turned = found.get("qk_rope_head_dim")
    for kind, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        rope = dict(given[kind])
        found[theta] = rope.pop("rope_theta", found[theta])
        share = rope.pop("partial_rotary_factor", share)
        rule = rope.pop("rope_type", rope.pop("type", "default"))
        known = ("default", "yarn") if kind == "compress" else ("default",)
        if rule not in known:
            raise ValueError(
                f"config.json has rope_type {rule!r} of {kind!r}; known is {known[-1]!r}."
            )
        rope.pop("type", None)
        if rule == "yarn":
            found |= {ours: rope.pop(name) for name, ours in YARN.items() if name in rope}
        if rope.pop("attention_factor", 1.0) not in (1.0, None) or rope:
            odd = next(iter(rope), "attention_factor")
            raise ValueError(
                f"config.json has {odd!r} in its rotary settings of {kind!r}, which nothing here "
                "reads; remove it if it changes no number."
            )
    if turned is None or share is not None:
        found["qk_rope_head_dim"] = int(head * (64 / 512 if share is None else share))
    return found


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that their configuration class takes."""
    found = dict(settings)
    for name in ("first_k_dense_replace", "n_group", "topk_group"):
        found.pop(name, None)
    found["mlp_layer_types"] = found.pop("fed_types").split()
    found["compress_rates"] = {
        kind: found.pop(name, usual) for kind, (name, usual) in RATES.items()
    }
    if found.get("index_n_heads") is None:
        found["index_n_heads"] = found["num_attention_heads"]
    share = found.pop("qk_rope_head_dim") / found["head_dim"]
    yarn = {name: found.pop(ours, None) for name, ours in YARN.items()}
    compress = {"rope_type": "default"}
    if yarn["factor"] is not None:
        compress = {"rope_type": "yarn", "attention_factor": 1.0, **yarn}
    if found.get("compress_rope_theta") is None:
        found["compress_rope_theta"] = found["rope_theta"]
    thetas = {"main": found["rope_theta"], "compress": found["compress_rope_theta"]}
    kinds = {"main": {"rope_type": "default"}, "compress": compress}
    found["rope_parameters"] = {
        kind: own | {"rope_theta": thetas[kind], "partial_rotary_factor": share}
        for kind, own in kinds.items()
    }
    return found | {"partial_rotary_factor": share, "num_key_value_heads": 1}


def _of(name: str, *words: str) -> tuple[str, ...]:
    return tuple(f"{word}.{name}" for word in words)


def _of_all(name: str) -> scalars.Setting:
    return scalars.whole(*_of(name, "shared_window", "hca", "csa"))


_COMPRESSED = ("hca", "csa")
DEEPSEEK_V4 = Family(
    "deepseek_v4", layers="listed", words=WORDS, router="deepseek_v4",
    reads={
        **dict.fromkeys(("num_key_value_heads", "intermediate_size")),
        "head_dim": _of_all("head_size"),
        "qk_rope_head_dim": _of_all("rope_size"),
        "q_lora_rank": _of_all("query_latent_size"),
        "o_groups": _of_all("output_groups"),
        "o_lora_rank": _of_all("output_latent_size"),
        "sliding_window": _of_all("sliding_window"),
        "rope_theta": scalars.number("rope_theta"),
        "compress_rope_theta": scalars.number(*_of("rope_theta", *_COMPRESSED)),
        "yarn_factor": scalars.number(*_of("yarn_factor", *_COMPRESSED)),
        "yarn_original_length": scalars.whole(*_of("yarn_original_length", *_COMPRESSED)),
        "yarn_beta_fast": scalars.number(*_of("yarn_beta_fast", *_COMPRESSED)),
        "yarn_beta_slow": scalars.number(*_of("yarn_beta_slow", *_COMPRESSED)),
        "yarn_truncate": scalars.truth(*_of("yarn_truncate", *_COMPRESSED)),
        "hca_rate": scalars.whole("hca.block_size"),
        "csa_rate": scalars.whole("csa.block_size"),
        "index_n_heads": scalars.whole("csa.index_heads"),
        "index_head_dim": scalars.whole("csa.index_size"),
        "index_topk": scalars.whole("csa.selected_entries"),
        "fed_types": scalars.Setting(("feed_forwards",), str),
        "hc_mult": scalars.whole("streams"),
        "hc_sinkhorn_iters": scalars.whole("stream_mixing_steps"),
    },
    defaults={
        "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
        "sliding_window": 128, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "n_shared_experts": 1,
        "num_key_value_heads": 1, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    },
    fixed={
        "swiglu_limit": (10.0,), "hc_eps": (1e-6,), "n_shared_experts": (1,),
        "num_key_value_heads": (1,),
    },
    harmless="rope_parameters",
    # The published spelling; transformers' own is read too, and the mixture of both that it saves.
    names={
        r"\.self_attn\.": ".attn.", r"\.mlp\.": ".ffn.",
        r"\.compressor\.indexer\.q_b_proj\.": ".indexer.wq_b.",
        r"\.compressor\.indexer\.scorer\.": ".indexer.",
        r"\.compressor\.indexer\.": ".indexer.compressor.",
        r"\.position_bias$": ".ape", r"\.q_a_norm\.": ".q_norm.", r"\.kv_norm\.": ".norm.",
        r"\.q_a_proj\.": ".wq_a.", r"\.q_b_proj\.": ".wq_b.", r"\.kv_proj\.": ".wkv.",
        r"\.o_a_proj\.": ".wo_a.", r"\.o_b_proj\.": ".wo_b.", r"\.sinks$": ".attn_sink",
        r"(attn\..*)\.gate_proj\.": r"\1.wgate.", r"\.gate_proj\.": ".w1.",
        r"\.up_proj\.": ".w3.", r"\.down_proj\.": ".w2.",
        r"\.e_score_correction_bias$": ".bias",
        r"\.input_layernorm\.": ".attn_norm.", r"\.post_attention_layernorm\.": ".ffn_norm.",
        r"\.(attn|ffn)_hc\.": r".hc_\1_", r"^lm_head\.": "head.",
        r"^model\.embed_tokens\.": "embed.", r"\.hc_head\.hc_": ".hc_head_", r"^model\.": "",
    },
    prepared=_prepared, written=_written,
)  # fmt: skip
"""The row of `FAMILIES`."""
