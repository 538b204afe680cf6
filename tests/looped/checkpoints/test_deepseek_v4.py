"""DeepSeek-V4, there and back, against Hugging Face transformers; and what is refused of it."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from toolkit.looped import LoopedConfig, LoopedLM, load_checkpoint
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import settings_of

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
TYPES = ["sliding_attention", SPARSE, HEAVY, SPARSE]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SETTINGS: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 16, "q_lora_rank": 8, "moe_intermediate_size": 20, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "index_n_heads": 8, "index_head_dim": 12, "index_topk": 2,
    "o_groups": 2, "o_lora_rank": 8, "sliding_window": 4, "partial_rotary_factor": 0.5,
    "hc_mult": 3, "hc_sinkhorn_iters": 5, "layer_types": TYPES,
    "mlp_layer_types": ["hash_moe", *["moe"] * 3],
    "compress_rates": {SPARSE: 2, HEAVY: 3}, "rope_theta": 100.0, "compress_rope_theta": 300.0,
    "rope_parameters": YARN, "max_position_embeddings": 32,
}  # fmt: skip
SHOWS = 1e-3  # of the largest logit: what another number of entries moves them at least


def read(**changes: Any) -> LoopedConfig:
    given = {name: v for name, v in (SETTINGS | changes).items() if v != "absent"}
    return LoopedConfig(**fields_of(FAMILIES["deepseek_v4"], given))


def test_settings_become_fields_and_fields_settings():
    config = read()
    assert config.pattern == "shared_window csa hca csa"
    assert (config.streams, config.stream_mixing_steps, config.rope_theta) == (3, 5, 100.0)
    assert (config.csa.block_size, config.hca.block_size, config.csa.selected_entries) == (2, 3, 2)
    assert (config.csa.rope_theta, config.csa.yarn_factor, config.csa.rope_size) == (300.0, 4.0, 8)
    assert config.shared_window.yarn_factor is None
    assert (config.moe.scores, config.moe.activation) == ("sqrtsoftplus", "clamped_silu")
    assert config.feed_forward_words == ("hash_moe", "moe", "moe", "moe")
    # The published files say ratios in place of words, and the number of layers with a table.
    older = {"compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "compress_rates": "absent"}
    found = read(**older, layer_types="absent", mlp_layer_types="absent")
    assert (found.pattern, found.csa.block_size) == (config.pattern, 4)
    again = fields_of(FAMILIES["deepseek_v4"], settings_of("deepseek_v4", config))
    assert LoopedConfig(**again).options == config.options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_layer_types": ["hash_moe", "moe"]}, "mlp_layer_types .*; wanted 4 out of"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types .*; wanted 4 out of"),
        ({"swiglu_limit": 7.0}, r"swiglu_limit 7.0; known is 10.0"),
        ({"hc_eps": 1e-5}, r"hc_eps 1e-05; known is 1e-06"),
        ({"n_shared_experts": 2}, r"n_shared_experts 2; known is 1"),
        ({"scoring_func": "sigmoid"}, r"scoring_func 'sigmoid'; known is 'sqrtsoftplus'"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types 'full_attention'; known are"),
        ({"layer_types": "absent", "compress_ratios": [8] * 4}, r"compress_ratios 8; known"),
        ({"rope_parameters": YARN | {"attention_factor": 2.0}}, r"'attention_factor' .*'compress'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_type 'linear' of 'compress'"),
        ({"attention_bias": True}, r"attention_bias True; known"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read(**change)


@pytest.mark.slow
@pytest.mark.oracle
def test_deepseek_v4_there_and_back(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from their_models import (
        IDS,
        assert_same_parameters,
        check_there_and_back,
        error_of,
        logits_of,
        made,
        some_tokens,
    )

    theirs = made("DeepseekV4", SETTINGS | IDS)
    table = np.random.default_rng(0).permuted(np.tile(np.arange(8), (61, 1)), axis=1)[:, :3]
    hashed: Any = theirs.model.layers[0].mlp
    hashed.gate.tid2eid.copy_(torch.tensor(table))
    theirs.save_pretrained(tmp_path)
    model, _ = check_there_and_back(theirs, tmp_path, "deepseek_v4")
    names = json.loads((tmp_path / "back/config.json").read_text())
    assert names["layer_types"] == TYPES
    # The spelling of transformers' own modules is read too.
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    fields = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(LoopedConfig)}
    other = load_checkpoint(state, style="deepseek_v4", **fields)
    assert isinstance(other, LoopedLM)
    assert_same_parameters(model, other)
    found = model.blocks[0].feed_forward.router.table[...]
    np.testing.assert_array_equal(found, table)
    # Controls: the tables of other tokens are another model, and so is one more entry per query.
    other.blocks[0].feed_forward.router.table[...] = np.roll(table, 1, axis=0)
    model.blocks[1].mixer.options = dataclasses.replace(
        model.blocks[1].mixer.options, selected_entries=3
    )
    tokens = some_tokens()
    wanted = np.asarray(logits_of(theirs, tokens))
    assert min(error_of(changed, tokens, wanted) for changed in (model, other)) > SHOWS
