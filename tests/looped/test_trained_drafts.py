"""What drafts without a second model are worth on a trained hybrid."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.looped import generate, generate_speculatively, load_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_drafts_of_a_trained_hybrid_are_exact_and_worth_what_the_page_says():
    model = load_model(ROOT / "data/models/gdn-full.safetensors")
    text = np.frombuffer((ROOT / "docs/training.md").read_bytes()[: 96 * 8], np.uint8)
    prompt = jnp.asarray(text.reshape(8, 96).astype(np.int32))
    wanted = generate(model, prompt, 64)
    for draft, tokens in (("loops:2", 3.7), ("loops:1", 2.6), ("ngram:3", 1.7)):
        found = generate_speculatively(model, draft, prompt, 64, drafts=4)
        assert (found.tokens == wanted).all()
        assert float(found.tokens_per_pass.mean()) == pytest.approx(tokens, abs=0.3)
