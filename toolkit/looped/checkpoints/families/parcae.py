"""Parcae: a prelude, a core that loops through a stable linear system, a coda; values by token.

Its files are those that its authors' `save_pretrained` writes, their weights as safetensors. Their
config.json has no `model_type` and names its class instead.
"""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.hybrids import whole_of

STACKS = {"prelude": "prelude", "recurrent_block": "layer_types", "coda": "coda"}
ACTIVATIONS = {"ReLU2": "half_relu2", "ReLU": "relu", "GELU": "gelu"}
"""Names of functions there, and ours; their ReLU2 is halved."""

FLOAT32_EPSILON = 2.0**-23
"""What PyTorch adds to a mean square if nothing else is asked for."""


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """One word per layer of the three stacks, and the sizes that follow from others."""
    counts = {part: whole_of(settings, f"n_layers_in_{part}") for part in STACKS}
    found = {n: v for n, v in settings.items() if n.removeprefix("n_layers_in_") not in STACKS}
    before, looped, after = counts.values()
    loops, learnt = (whole_of(found, f"mean_{name}") for name in ("recurrence", "backprop_depth"))
    numbers = [*range(before + looped), *(before + looped * loops + n for n in range(after))]
    words = []
    for place, number in enumerate(numbers):
        has_table = place % 2 == (before + looped + after - 1) % 2
        if has_table != (number % 2 == (looped * learnt - 1) % 2):
            raise ValueError(
                f"config.json has numbers of layers and loops that give layer {place} a value "
                "embedding or its gate alone; known are models with both or neither."
            )
        words.append("value_embedding" if has_table else "full")
    found["prelude"], found["coda"] = " ".join(words[:before]), " ".join(words[before + looped :])
    found["layer_types"] = words[before : before + looped]
    found["num_hidden_layers"] = looped
    width, heads = whole_of(found, "n_embd"), whole_of(found, "num_attention_heads")
    hidden = found.get("intermediate_size")
    found["intermediate_size"] = hidden = 4 * width if hidden is None else hidden
    for name, known in (
        ("recurrent_embedding_dimension", width),
        ("recurrent_intermediation_embedding_dimension", hidden),
        ("recurrent_num_attention_heads", heads),
        ("num_key_value_heads", heads),
    ):
        if found.pop(name, known) not in (known, None):
            raise ValueError(f"config.json has a {name} other than that of all layers, {known}.")
    multiple, padded = found.pop("padding_multiple", 512), found.pop("padded_vocab_size", None)
    if padded is None and isinstance(multiple, int) and multiple > 0:
        padded = multiple * -(-whole_of(found, "vocab_size") // multiple)
    found["vocab_size"] = padded
    rope = found.pop("rope_settings", None) or {}
    if rope.get("use_rope", True) is not True or rope.get("rope_condense_ratio", 1) != 1:
        raise ValueError(f"config.json has rope_settings {rope!r}; known are plain ones.")
    return found | {"rope_base": rope.get("rope_base", 50_000)}


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """How many layers each of the three stacks has; their value embeddings follow."""
    found = dict(settings)
    for part, name in STACKS.items():
        words = found.pop(name)
        found[f"n_layers_in_{part}"] = len(words.split() if isinstance(words, str) else words)
    if found["mean_backprop_depth"] is None:  # the gradient flows through all loops
        found["mean_backprop_depth"] = found["mean_recurrence"]
    width, hidden, heads = (
        found[name] for name in ("n_embd", "intermediate_size", "num_attention_heads")
    )
    for name in ("num_hidden_layers", "model_type", "architectures", "pad_token_id", "hidden_act"):
        found.pop(name, None)
    return found | {
        "_class_name": "ParcaeConfig", "padded_vocab_size": found["vocab_size"],
        "num_key_value_heads": heads, "recurrent_embedding_dimension": width,
        "recurrent_intermediation_embedding_dimension": hidden,
        "rope_settings": {"rope_base": found.pop("rope_base")},
    }  # fmt: skip


PARCAE = Family(
    "parcae", layers="listed", fed="mlp",
    switches={
        "input_injection": True, "injection": "diagonal", "coda_projection": True,
        "random_start": True,
    },
    reads={
        **dict.fromkeys(("head_dim", "num_key_value_heads")),
        "n_embd": scalars.size("width"),
        "norm_eps": scalars.EPSILON,
        "tie_embeddings": scalars.truth("tied_embedding"),
        "mean_recurrence": scalars.size("loops"),
        "mean_backprop_depth": scalars.size("backward_loops"),
        "rope_base": scalars.number("rope_theta"),
        "prelude": scalars.Setting(("prelude",), str),
        "coda": scalars.Setting(("coda",), str),
        "prelude_norm": scalars.truth("prelude_norm"),
        "logit_softcap": scalars.HEAD_CAP,
        "nonlin_name": scalars.Setting(
            ("fed.activation",), str,
            lambda value, _: ACTIVATIONS.get(value, value),
            lambda value, _: {ours: theirs for theirs, ours in ACTIVATIONS.items()}[value],
        ),
        "qk_norm": scalars.Setting(
            ("softmax.plain_norm_epsilon", "value_embedding.plain_norm_epsilon"), bool,
            lambda value, _: FLOAT32_EPSILON if value else None,
            lambda value, _: value is not None,
        ),
    },
    defaults={
        "norm_eps": 1e-5, "nonlin_name": "GELU", "tie_embeddings": False, "qk_norm": False,
        "prelude_norm": False, "norm_class_name": "LayerNorm", "injection_type": "diagonal",
        "state_init": "like-init",
    },
    fixed={
        "bias": (False, None), "qk_bias": (False, None), "clip_qkv": (None,),
        "block_class_name": ("TransformerPreNormBlock", None), "norm_class_name": ("RMSNorm",),
        "mlp_class_name": ("BaseMLP", None), "injection_type": ("diagonal",),
        "state_init": ("like-init",), "mup_model_scaling_factor": (1, None),
        "init_strategy": ("scaled", "scaled-zero", None), "use_abacus": (False, None),
        "randomize_positions_from": (None,), "debias_attention": (False, None),
        "center_attention": (False, None), "hidden_act": ("silu", None),
    },
    harmless="name hf_config block_size attn_impl init_orthogonal skip_initialization "
    "use_fused_head activation_checkpoint_impl simple_ops strategy sampling_scheme lockstep_n "
    "lockstep_k curriculum_target recurrent_iteration_method model_class_name rope_parameters "
    "architecture_class_name",
    words={"full": "full", "value_embedding": "value_embedding"},
    norms={"mixer_norm": "norm_1", "feed_forward_norm": "norm_2"},
    names={
        "embed_tokens": "wte",
        r"^transformer\.norm\.": "transformer.ln_f.",
        r"\.layers\.": ".core_block.",
        r"\.self_attn\.": ".attn.",
        r"\.mlp\.up_proj": ".mlp.fc",
        r"\.mlp\.down_proj": ".mlp.proj",
    },
    prefix="transformer.", prepared=_prepared, written=_written,
)  # fmt: skip
"""The row of `FAMILIES`."""
