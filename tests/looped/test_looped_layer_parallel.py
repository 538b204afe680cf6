"""EasySpec's drafts: layers of a group in parallel, the cache calibrated, the text exact."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    ParallelLayers,
    decode_step,
    generate,
    generate_speculatively,
    load_model,
    prefill,
)
from toolkit.looped.decoding.layer_parallel import parallel_step
from toolkit.parallel import make_mesh

ROOT = Path(__file__).resolve().parents[2]
EQUAL = 1e-5  # of logits that are computed on one device or on several


def small_model(pattern="full full full", **fields):
    fields = {"loops": 1, "width": 16, "heads": 2} | fields
    return LoopedLM(LoopedConfig.tiny(pattern, **fields), rngs=nnx.Rngs(0))


def test_groups_of_one_are_exact_and_larger_ones_are_not():
    model, prompt = small_model(), jnp.array([[5, 3, 8], [1, 2, 2]])
    token = jnp.array([7, 9])

    def stepped(size):
        cache = prefill(model, prompt, 8)[1]
        return (
            parallel_step(model, token, cache, size) if size else decode_step(model, token, cache)
        )

    (exact, cache), (alone, own), (rough, _) = map(stepped, (0, 1, 2))
    np.testing.assert_allclose(alone, exact, atol=EQUAL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=EQUAL), own, cache)
    assert np.abs(rough - exact).max() > 100 * EQUAL  # the control


def test_a_group_on_devices_is_the_group_on_one():
    model, mesh = small_model(), make_mesh({"layer": 2}, devices=jax.devices()[:2])
    cache = prefill(model, jnp.array([[5, 3, 8]]), 8)[1]
    step = jax.jit(parallel_step, static_argnames=("size", "mesh"))
    token = jnp.array([7])
    alone, together = (step(model, token, cache, 2, each)[0] for each in (None, mesh))
    np.testing.assert_allclose(together, alone, atol=EQUAL)
    program = step.lower(model, token, cache, 2, mesh).compile().as_text()
    assert "all-gather" in program or "all-reduce" in program


@pytest.mark.slow
def test_the_text_is_that_of_the_exact_model_row_by_row():
    model, mesh = small_model(), make_mesh({"layer": 2}, devices=jax.devices()[:2])
    prompt, lengths = jnp.array([[0, 0, 4], [5, 3, 8]]), jnp.array([1, 3])
    wanted = generate(model, prompt, 6, lengths=lengths)
    draft = ParallelLayers(model, 2, mesh)
    found = generate_speculatively(model, draft, prompt, 6, drafts=2, lengths=lengths)
    assert (found.tokens == wanted).all()


def test_what_has_no_groups_is_refused():
    with pytest.raises(ValueError, match="size: got 0"):
        ParallelLayers(small_model(), 0)
    with pytest.raises(ValueError, match=r"mesh: got {'layer': 2}, wanted 'layer': 3"):
        ParallelLayers(small_model(), 3, make_mesh({"layer": 2}, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="model: got layers 'gdn full'"):
        ParallelLayers(small_model("gdn full"), 2)


@pytest.mark.nightly
def test_calibration_is_worth_what_the_page_says_on_a_trained_model():
    model = load_model(ROOT / "data/models/full-full.safetensors")
    text = np.frombuffer((ROOT / "docs/training.md").read_bytes()[: 96 * 8], np.uint8)
    prompt = jnp.asarray(text.reshape(8, 96).astype(np.int32))
    wanted = generate(model, prompt, 64)
    kept = {}
    for size, is_calibrated in ((1, True), (2, True), (2, False)):
        draft = ParallelLayers(model, size, is_calibrated=is_calibrated)
        found = generate_speculatively(model, draft, prompt, 64, drafts=4)
        assert (found.tokens == wanted).all()
        kept[size, is_calibrated] = float(found.tokens_per_pass.mean())
    assert kept == pytest.approx({(1, True): 5.0, (2, True): 4.3, (2, False): 4.1}, abs=0.15)
    # After a round of a text that is kept whole, the calibrated cache is a prefill's.
    draft = ParallelLayers(model, 2)
    own, propose = draft.cache(prompt[:, :90], None, 100, 4), draft.propose()
    for at in range(5):
        _, own = propose(model, prompt[:, 90 + at], own)
    own = own.restore([], jnp.full(8, 5))
    _, own = propose(model, prompt[:, 95], own)
    exact = prefill(model, prompt[:, :95], 100)[1]
    assert (own.exact.length == 95).all()
    for found, wanted in zip(
        jax.tree.leaves(own.exact.truncate(exact.length)), jax.tree.leaves(exact), strict=True
    ):
        if found.ndim == 4:
            found, wanted = (
                x[:, :95] if x.shape[1] == 100 else x[:, :, :95] for x in (found, wanted)
            )
        np.testing.assert_allclose(found, wanted, atol=1e-3)
