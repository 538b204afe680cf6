"""Layers of compressed attention and of Qwen's: against transformers, and decoding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LAYERS, LoopedConfig, LoopedLM, generate
from toolkit.testing import layers

TOLERANCE = 1e-5  # relative to the largest output
TIME = 23


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["csa hca", "shared_window qsa"])
def test_a_text_is_written_from_the_cache_as_by_whole_passes(pattern):
    config = LoopedConfig.tiny(pattern, width=16, heads=2, loops=2, vocabulary=23)
    few: dict[str, Any] = {
        "sliding_window": 4, "block_size": 3, "selected_entries": 2, "selected_tokens": 6,
    }  # fmt: skip
    own = {word: {n: few[n] for n in few if hasattr(getattr(config, word), n)}
           for word in pattern.split()}  # fmt: skip
    config = config.with_options(**own)
    model = layers.drawn(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 7)))
    written = generate(model, prompt, 20)
    whole = jax.jit(type(model).__call__)
    text = jnp.concatenate([prompt, written], axis=1)
    best = np.argmax(whole(model, text), axis=-1)[:, prompt.shape[1] - 1 : -1]
    np.testing.assert_array_equal(written, best)
    assert len(np.unique(written)) > 3


@pytest.mark.slow
@pytest.mark.oracle
def test_qwen_sparse_attention_is_that_of_qwen4():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.qwen4_exp import modeling_qwen4_exp as file
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    settings = Qwen4ExpTextConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=61, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=12,
        indexer_budget=6, indexer_compress_ratio=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, hc_lowrank=4, eos_token_id=60,
        rope_parameters={
            "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
        },
    )  # fmt: skip
    settings._attn_implementation = "eager"
    theirs = file.Qwen4ExpTextAttention(settings, 3).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x = np.random.default_rng(0).standard_normal((2, TIME, 32)).astype(np.float32)
    turns = file.Qwen4ExpTextRotaryEmbedding(config=settings)
    turns = turns(torch.tensor(x), torch.arange(TIME)[None, None].expand(3, 2, -1))
    t, s = np.indices((TIME, TIME))
    mask = np.where(s <= t, 0, np.finfo(np.float32).min).astype(np.float32)
    mask = torch.tensor(mask)[None, None].expand(2, 1, -1, -1)
    with torch.no_grad():
        wanted = theirs(torch.tensor(x), position_embeddings=turns, attention_mask=mask)[0].numpy()

    options = {
        "key_value_heads": 2, "head_size": 16, "query_key_norm": True, "output_gate": True,
        "rotary_fraction": 0.5, "block_size": 3, "selected_tokens": 6, "index_heads": 8,
        "index_size": 12,
    }  # fmt: skip
    config = LoopedConfig(
        width=32, heads=4, pattern="qsa", rope_theta=300.0, options={"qsa": options}
    )
    own: Any = LAYERS["qsa"]
    layer = own(config, rngs=nnx.Rngs(0))
    given = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    query = given["q_proj.weight"].T.reshape(32, 4, 2, 16)
    index = jnp.split(given["indexer.index_qk_proj.weight"].T, [8 * 12], axis=1)
    for parameter, array in (
        (layer.query.kernel, query[:, :, 0].reshape(32, -1)),
        (layer.gate.kernel, query[:, :, 1].reshape(32, -1)),
        (layer.key.kernel, given["k_proj.weight"].T),
        (layer.value.kernel, given["v_proj.weight"].T),
        (layer.output.kernel, given["o_proj.weight"].T),
        (layer.query_norm.scale, 1 + given["q_norm.weight"]),
        (layer.key_norm.scale, 1 + given["k_norm.weight"]),
        (layer.indexer.query.kernel, index[0]),
        (layer.indexer.key.kernel, index[1]),
        (layer.indexer.query_norm.scale, 1 + given["indexer.q_layernorm.weight"]),
        (layer.indexer.key_norm.scale, 1 + given["indexer.k_layernorm.weight"]),
    ):
        assert parameter.shape == array.shape
        parameter[...] = array
    error = np.abs(layers.forward(layer, x, np.zeros((2, TIME), np.int32)) - wanted).max()
    assert error <= TOLERANCE * np.abs(wanted).max()
    layer.blocks = layer.blocks | {"selected_tokens": 21}  # a control: all blocks are read
    error = np.abs(layers.forward(layer, x, np.zeros((2, TIME), np.int32)) - wanted).max()
    assert error > 0.1 * np.abs(wanted).max()


def test_wrong_options_are_refused_by_name():
    def config(pattern, **options):
        return LoopedConfig.tiny(pattern, width=16, heads=2, options={pattern: options})

    with pytest.raises(ValueError, match=r"csa.output_groups 3 does not divide heads 2"):
        config("csa", output_groups=3)
    with pytest.raises(ValueError, match=r"csa.rope_size is 48; .*at most the size of a head"):
        config("csa", rope_size=48)
    with pytest.raises(ValueError, match=r"qsa.selected_tokens 6 is not a multiple .*block_size 4"):
        config("qsa", selected_tokens=6)
    with pytest.raises(ValueError, match=r"qsa.index_size is 4; it must hold the 8 channels"):
        config("qsa", index_size=4)
