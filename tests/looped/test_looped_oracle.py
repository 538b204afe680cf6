"""Against Hugging Face transformers: a Llama of random weights, looped."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, load_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

LOGITS_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def redraw(module, seed, std):
    """Weights far enough from initial values that a swapped pair would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            centre = parameter if parameter.ndim == 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + std * noise)


@pytest.mark.nightly
def test_llama_looped_by_hand():
    """The same weights run twice, with a residual gate: loops of PyTorch's own layers."""
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    redraw(theirs, seed=0, std=0.2)
    sizes = {
        "vocabulary": 61,
        "width": 32,
        "pattern": "full full",
        "heads": 4,
        "options": {"full": {"key_value_heads": 2}},
        "feed_forward": 48,
    }
    once = load_checkpoint(theirs.state_dict(), style="llama", tied_embedding=True, **sizes)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 15))
    rho = 0.5 * np.random.default_rng(2).standard_normal((2, 32)).astype(np.float32)
    looped = LoopedLM(LoopedConfig(loops=2, **sizes), rngs=nnx.Rngs(0))
    looped.embedding, looped.blocks, looped.norm = once.embedding, once.blocks, once.norm
    looped.rho[...] = jnp.asarray(rho)

    positions = torch.arange(15)[None]
    future = torch.full((15, 15), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        h = theirs.model.embed_tokens(torch.tensor(tokens))
        rotary = theirs.model.rotary_emb(h, positions)
        for gate in torch.tensor(rho):
            start = h
            for layer in theirs.model.layers:
                h = layer(h, attention_mask=future, position_embeddings=rotary)
            h = h + gate * start
        wanted = theirs.lm_head(theirs.model.norm(h)).numpy()
    np.testing.assert_allclose(looped(jnp.asarray(tokens)), wanted, **LOGITS_TOLERANCE)
