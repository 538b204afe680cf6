"""Huginn: a prelude, a core that loops from noise and reads the tokens again in every loop, a coda.

Its files are those of the modelling file that its authors publish with the checkpoint, under the
`model_type` "huginn_raven". Its norms are of the sum of a stream and what is added to it, and its
final norm is also applied after the last loop.
"""

from typing import Any

from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.spelling import Spelling


def _prepared(settings: dict[str, Any]) -> dict[str, Any]:
    """One word per layer of the three stacks, and the sizes that follow from others."""
    found = {"rope_base": 50_000, "qk_bias": True, **settings}
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


_SPELLING = Spelling(
    sizes={
        "vocabulary": "vocab_size",
        "width": "n_embd",
        "heads": "n_heads",
        "norm_epsilon": "norm_eps",
        "tied_embedding": "tie_embeddings",
        "feed_forward": "intermediate_size",
        "loops": "mean_recurrence",
        "backward_loops": "mean_backprop_depth",
        "rope_theta": "rope_base",
        "prelude": "prelude",
        "coda": "coda",
        "embedding_scale": "embedding_scale",
    },
    words={"full_attention": "full"},
    fixed={"full.projection_biases": True},
    only={
        "bias": False,
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "injection_type": "linear",
        "state_init": "like-init",
        "qk_bias": True,
        "test_time_noise": 0,
    },
    without_effect="name hf_config block_size padding_multiple architecture_class_name n_layers "
    "init_strategy init_orthogonal sampling_scheme activation_checkpoint_impl padded_vocab_size "
    "test_time_noise_type num_attention_heads num_key_value_heads head_dim hidden_size init_values "
    "effective_expected_depth tie_word_embeddings",
    prepared=_prepared,
    written=_written,
)

_NAMES = {
    "embed_tokens": "wte",
    r"^transformer\.norm": "transformer.ln_f",
    r"\.layers\.": ".core_block.",
    r"\.self_attn\.": ".attn.",
    r"\.mlp\.gate_up_proj": ".mlp.fc",
    r"\.mlp\.down_proj": ".mlp.proj",
}

HUGINN = Family(
    "huginn",
    switches={
        "sandwich_norm": True,
        "norm_of_sum": True,
        "norm_before_coda": True,
        "input_injection": True,
        "random_start": True,
    },
    spelling=_SPELLING,
    norms={
        "mixer_norm": "norm_1",
        "mixer_end_norm": "norm_2",
        "feed_forward_norm": "norm_3",
        "feed_forward_end_norm": "norm_4",
    },
    is_fused=True,
    names=_NAMES,
    prefix="transformer.",
)
