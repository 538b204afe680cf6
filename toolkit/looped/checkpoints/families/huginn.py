"""Huginn: a prelude, a core that loops from noise and reads the tokens again in every loop, a coda.

Its files are those of the modelling file that its authors publish with the checkpoint, under the
`model_type` "huginn_raven". Its norms are of the sum of a stream and what is added to it, and its
final norm is also applied after the last loop.
"""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """One word per layer of the three stacks, and the sizes that follow from others."""
    found = dict(settings)
    for mine, theirs in (("n_heads", "num_attention_heads"), ("n_embd", "hidden_size")):
        found[mine] = found.get(mine, found.get(theirs))
    counts = {}
    for part in ("prelude", "recurrent_block", "coda"):
        counts[part] = found.pop(f"n_layers_in_{part}", None)
        if not isinstance(counts[part], int):
            raise ValueError(f"config.json does not say 'n_layers_in_{part}' in a whole number.")
    for name in ("prelude", "coda"):
        found[name] = " ".join(["full"] * counts[name])
    found["layer_types"] = ["full_attention"] * counts["recurrent_block"]
    found["num_hidden_layers"] = counts["recurrent_block"]
    if isinstance(found["n_embd"], int):
        found["embedding_scale"] = found["n_embd"] ** 0.5
    return found


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """How many layers each of the three stacks has; the scale of the embedding follows."""
    found = {name: value for name, value in settings.items() if name != "embedding_scale"}
    stacks = {"prelude": "prelude", "recurrent_block": "layer_types", "coda": "coda"}
    for part, name in stacks.items():
        words = found.pop(name)
        layers = words.split() if isinstance(words, str) else words
        found[f"n_layers_in_{part}"] = len(layers)
    found["num_hidden_layers"] = found["n_layers"] = sum(
        found[f"n_layers_in_{part}"] for part in stacks
    )
    if found["mean_backprop_depth"] is None:  # the gradient flows through all loops
        found["mean_backprop_depth"] = found["mean_recurrence"]
    return found


_NAMES = {
    "embed_tokens": "wte",
    r"^transformer\.norm": "transformer.ln_f",
    r"\.layers\.": ".core_block.",
    r"\.self_attn\.": ".attn.",
    r"\.mlp\.gate_up_proj": ".mlp.fc",
    r"\.mlp\.down_proj": ".mlp.proj",
}

HUGINN = Family(
    "huginn", layers="listed",
    switches={
        "sandwich_norm": True, "norm_of_sum": True, "norm_before_coda": True,
        "input_injection": True, "random_start": True, "softmax.projection_biases": True,
    },
    reads={
        **dict.fromkeys(("head_dim", "num_key_value_heads")),
        "n_embd": scalars.size("width"),
        "n_heads": scalars.size("heads"),
        "norm_eps": scalars.EPSILON,
        "tie_embeddings": scalars.truth("tied_embedding"),
        "mean_recurrence": scalars.size("loops"),
        "mean_backprop_depth": scalars.size("backward_loops"),
        "rope_base": scalars.number("rope_theta"),
        "prelude": scalars.Setting(("prelude",), str),
        "coda": scalars.Setting(("coda",), str),
        "embedding_scale": scalars.EMBEDDING_SCALE,
    },
    defaults={"rope_base": 50_000, "qk_bias": True},
    fixed={
        "bias": (False, None), "block_class_name": ("SandwichBlock", None),
        "norm_class_name": ("RMSNorm_llama", None), "mlp_class_name": ("GatedMLP", None),
        "nonlin_name": ("SiLU", None), "injection_type": ("linear", None),
        "state_init": ("like-init", None), "qk_bias": (True,), "test_time_noise": (0, None),
    },
    harmless="name hf_config block_size padding_multiple architecture_class_name n_layers "
    "init_strategy init_orthogonal sampling_scheme activation_checkpoint_impl padded_vocab_size "
    "test_time_noise_type num_attention_heads num_key_value_heads head_dim hidden_size init_values "
    "effective_expected_depth tie_word_embeddings rope_parameters",
    words={"full_attention": "full"},
    norms={
        "mixer_norm": "norm_1",
        "mixer_end_norm": "norm_2",
        "feed_forward_norm": "norm_3",
        "feed_forward_end_norm": "norm_4",
    },
    is_fused=True, names=_NAMES, prefix="transformer.", prepared=_prepared, written=_written,
)  # fmt: skip
"""The row of `FAMILIES`."""
