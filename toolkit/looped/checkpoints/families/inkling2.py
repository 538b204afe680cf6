"""Inkling-2: attention with biases by distance, loops that send messages, experts with soft caps.

Its published files name tensors otherwise than transformers' modules do, hold gate and up of the
experts in turn, and pad the vocabulary; both spellings are read. The rows of the padding, which no
tokenizer makes, are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.hybrids import whole_of
from toolkit.looped.checkpoints.tensors import StoredTensor

WORDS = {"hybrid_sliding": "relative_window", "hybrid": "relative"}
LOOP = {
    "core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end",
    "num_passes": "loop_num_passes", "gate_rank": "loop_gate_rank",
}  # fmt: skip
USUAL = {
    "loop_layer_index_start": 6, "loop_layer_index_end": 18, "loop_num_passes": 3,
    "loop_gate_rank": 64,
}  # fmt: skip


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """The words of the layers before, in and after the loop."""
    found = {**USUAL, **settings}
    loop: dict[str, Any] = found.pop("loop_config", None) or {}
    for name, value in loop.items():
        found[LOOP.get(name, name)] = value
    count = whole_of(found, "num_hidden_layers")
    start, end = (whole_of(found, f"loop_layer_index_{name}") for name in ("start", "end"))
    del found["loop_layer_index_start"], found["loop_layer_index_end"]
    types = found.get("layer_types")
    if types is None:
        types = ["hybrid" if (layer + 1) % 6 == 0 else "hybrid_sliding" for layer in range(count)]
    if len(types) != count or {*types} - {*WORDS}:
        raise ValueError(
            f"config.json has the layer_types {types!r}; wanted {count} out of {', '.join(WORDS)}."
        )
    if not 0 < start < end <= count:
        raise ValueError(
            f"config.json has a loop over the layers {start} to {end} of {count}; wanted some "
            "after the first."
        )
    words = [WORDS[kind] for kind in types]
    return found | {
        "prelude": " ".join(words[:start]), "coda": " ".join(words[end:]), "fed_types": "moe",
        "layer_types": types[start:end], "num_hidden_layers": end - start,
    }  # fmt: skip


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """One list of layers, and which of them loop."""
    found, kinds = dict(settings), {ours: theirs for theirs, ours in WORDS.items()}
    before, after = (
        [kinds[word] for word in found.pop(name).split()] for name in ("prelude", "coda")
    )
    looped = found["layer_types"]
    for name in ("fed_types", "first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"):
        found.pop(name, None)
    found.pop("norm_topk_prob", None)
    return found | {
        "layer_types": [*before, *looped, *after],
        "num_hidden_layers": len(before) + len(looped) + len(after),
        "loop_layer_index_start": len(before), "loop_layer_index_end": len(before) + len(looped),
        "vocab_size": found["unpadded_vocab_size"],
    }  # fmt: skip


PUBLISHED = {
    r"^model\.llm\.unembed\.": "lm_head.", r"^model\.(llm|language_model)\.": "model.",
    r"\.embed\.": ".embed_tokens.", r"\.embed_norm\.": ".embed_tokens.embed_norm.",
    r"embed_tokens\.embed_tokens": "embed_tokens",
    r"controllers\.attn\.": "q_message_gate.", r"controllers\.(\w+)\.": r"\1_message_gate.",
    r"\.down_weight$": ".down_proj.weight", r"\.gain_weight$": ".message_gate_proj.weight",
    r"\.forget_weight$": ".forget_gate_proj.weight",
    r"\.experts\.w2_weight$": ".experts.down_proj", r"\.mlp\.gate\.bias$":
    ".mlp.gate.e_score_correction_bias",
    r"\.attn\.": ".self_attn.", r"\.w([qkv])_d[uv]\.": r".\1_proj.linear.",
    r"\.([kv])_sconv\.": r".\1_proj.sconv.", r"\.rel_logits_proj\.": ".relative_position_bias.",
    r"\.wr_du\.": ".relative_position_bias.linear.", r"\.q_l2_clip\.": ".q_proj.norm.",
    r"\.rel_l2_clip\.": ".relative_position_bias.norm.", r"\.wo_ud\.": ".o_proj.linear.",
    r"\.gate_attn\.": ".o_proj.gate_proj.", r"\.attn_sink_proj\.": ".sink_proj.",
    r"\.attn_sconv\.": ".post_attention_convolution.",
    r"\.mlp_sconv\.": ".post_mlp_convolution.",
    r"(convolution|sconv)\.weight$": r"\1.conv1d.weight", r"\.static_w$": ".static_weight",
    r"\.weight_proj$": ".weight_proj.weight", r"\.mlp_norm\.": ".post_attention_layernorm.",
    r"\.attn_norm\.": ".input_layernorm.", r"_input_norm\.": "_input_layernorm.",
    r"attn_res\.mlp_queries\.(\d+)$": r"layers.\1.mlp_input.query",
    r"attn_res\.output_query$": "final_input.query",
}  # fmt: skip
"""Patterns of names in the published files, and what replaces them, in this order."""


def _opened(
    settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of published files as those of transformers' modules."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in PUBLISHED.items():
            name = re.sub(pattern, replacement, name)
        if query := re.search(r"^(.*)attn_res\.attn_queries\.(\d+)$", name):
            name = f"{query[1]}layers.{int(query[2]) + 1}.attention_input.query"
        if name.endswith(".experts.w13_weight"):
            name = name.replace("w13_weight", "gate_up_proj")
            tensor = _changed(tensor, tensor.shape, _halves)
        rows = settings.get("unpadded_vocab_size")
        if rows and name in ("lm_head.weight", "model.embed_tokens.weight"):
            shape = (min(rows, tensor.shape[0]), *tensor.shape[1:])
            tensor = _changed(tensor, shape, lambda array, rows=rows: array[:rows])
        found[name] = tensor
    parts = [f"model.middle_cycle_cross_pass_{name}queries" for name in ("", "kv_")]
    if {*parts} <= found.keys():
        ends, middles = (found.pop(name) for name in parts)
        shape = (ends.shape[0] // 2, 4, ends.shape[1])

        def queries() -> Any:
            of_ends, of_middles = (part.read().reshape(-1, 2, shape[2]) for part in (ends, middles))
            return jnp.concatenate([of_ends[:, :1], of_middles, of_ends[:, 1:]], axis=1)

        found["model.message_input.query"] = StoredTensor(shape, queries)
    return found


def _changed(tensor: StoredTensor, shape: tuple[int, ...], change: Any) -> StoredTensor:
    return StoredTensor(shape, lambda: change(tensor.read()))


def _halves(fused: Any) -> Any:
    """Rows of gate and up in turn -> one after the other."""
    return jnp.concatenate([fused[:, ::2], fused[:, 1::2]], axis=1)


def _both(name: str) -> tuple[str, str]:
    return f"relative.{name}", f"relative_window.{name}"


INKLING2_LOOP = Family(
    "inkling2_loop", layers="listed", words=WORDS, router="inkling2_loop",
    is_counted_through=True,
    switches={"embedding_norm": True, "tied_embedding": False},
    reads={
        **dict.fromkeys(
            ("vocab_size", "sliding_window", "tie_word_embeddings", "intermediate_size")
        ),
        "unpadded_vocab_size": scalars.size("vocabulary"),
        "num_key_value_heads": scalars.whole("relative.key_value_heads"),
        "head_dim": scalars.whole("relative.head_size"),
        "swa_num_attention_heads": scalars.whole("relative_window.heads"),
        "swa_num_key_value_heads": scalars.whole("relative_window.key_value_heads"),
        "swa_head_dim": scalars.whole("relative_window.head_size"),
        "sliding_window_size": scalars.whole("relative_window.sliding_window"),
        "d_rel": scalars.whole(*_both("relative_size")),
        "rel_extent": scalars.whole("relative.extent"),
        "log_scaling_n_floor": scalars.whole("relative.scaling_start"),
        "log_scaling_alpha": scalars.number("relative.scaling_rate"),
        "conv_kernel_size": scalars.whole(*_both("convolution_size")),
        "qk_l2_clip_threshold": scalars.number(*_both("bound")),
        "rel_l2_clip_threshold": scalars.number(*_both("relative_bound")),
        "n_layers_per_attn_res_block": scalars.whole("attention_residual"),
        "final_logit_softcapping": scalars.HEAD_CAP,
        "loop_num_passes": scalars.size("loops"),
        "loop_gate_rank": scalars.whole("message_rank"),
        "prelude": scalars.Setting(("prelude",), str),
        "coda": scalars.Setting(("coda",), str),
    },
    defaults={
        "unpadded_vocab_size": 200_058, "swa_num_attention_heads": 24,
        "swa_num_key_value_heads": 8, "swa_head_dim": 128, "sliding_window_size": 1024,
        "d_rel": 16, "rel_extent": 1024, "log_scaling_n_floor": 8192, "log_scaling_alpha": 0.1,
        "conv_kernel_size": 4, "qk_l2_clip_threshold": 22.627416997969522,
        "rel_l2_clip_threshold": 8.0, "n_layers_per_attn_res_block": 6, "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0, "final_logit_softcapping": 30.0, "route_scale": 8.0,
    },
    fixed={
        "mlp_gate_softcap": (4.0,), "mlp_up_softcap": (25.0,), "scoring_func": ("sigmoid", None),
        "tie_word_embeddings": (False, None),
    },
    harmless="vocab_size rope_parameters number_of_conv_states",
    renamed={"route_scale": "routed_scaling_factor"},
    names={r"layers\.0\.pre_norm\.": "embed_tokens.embed_norm."},
    prepared=_prepared, written=_written, opened=_opened,
)  # fmt: skip
"""The row of `FAMILIES`."""
