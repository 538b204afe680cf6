"""Sparse attention inside looped models: layers, decoding, losses of indexers, presets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.attention.sparse import index_scores
from toolkit.looped import (
    LAYERS,
    PRESETS,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    indexer_losses,
    parameter_count,
    prefill,
)
from toolkit.looped.mixing.sparse.deepseek_sparse import DSAOptions, Indexer
from toolkit.looped.parameters import layer_parameters

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
LT2 = {"indexer": "lt2", "shared_key_size": 12, "shared_value_size": 8}
DSA = {"selected_tokens": 5, "index_size": 8}
NSA = {"block_size": 3, "selected_blocks": 3, "sliding_window": 4}
SMALL = {
    "vocabulary": 30,
    "width": 16,
    "heads": 2,
    "feed_forward": 16,
}


def build(pattern, loops=2, *, dsa=None, **overrides):
    """A model drawn by NumPy: its own initialisation would compile a program a shape."""
    shared = {name: v for name, v in (dsa or {}).items() if name == "key_value_heads"}
    options = {"nsa": NSA | shared, "dsa": DSA | (dsa or {})}
    config = LoopedConfig.tiny(pattern, loops, **(SMALL | overrides), options=options)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)

    def draw(leaf):
        spread = leaf.shape[0] ** -0.5 if leaf.ndim > 1 else 0.5
        return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def some_tokens(batch=2, time=17):
    return np.random.default_rng(1).integers(0, 30, (batch, time))


@jax.jit
def forward(model, tokens):
    return model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param({"key_value_heads": 1}, marks=pytest.mark.nightly), LT2]
)
def test_prefill_and_steps_equal_the_parallel_form(options):
    model, tokens = build("nsa dsa", dsa=options), some_tokens()
    wanted = forward(model, tokens)
    logits, cache = prefill(model, tokens[:, :8], 17)
    np.testing.assert_allclose(logits, wanted[:, 7], **FLOAT32_TOLERANCE)
    for position in range(8, 17):
        logits, cache = decode_step(model, tokens[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **FLOAT32_TOLERANCE)
    floats = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert sum(a.nbytes for a in floats) == 2 * cache_bytes_per_sequence(model.config, 17)


def test_what_a_token_costs_in_the_cache():
    """LT2: one shared key, values inside it, and an index key. Native: means beside the tokens."""
    released, native = PRESETS["lt2-sparse-dsa-600m"], PRESETS["lt2-sparse-nsa-600m"]
    pairs = 21 * 4
    assert cache_bytes_per_sequence(released, 4096) == pairs * 4096 * (576 + 64) * 2
    size = 2 * 1024 // 16
    wanted = pairs * (4096 * size * 2 + 4096 // 64 * size * 4)
    assert cache_bytes_per_sequence(native, 4096) == wanted


@pytest.mark.slow
def test_losses_of_indexers_beside_the_logits():
    model, tokens = build("dsa full dsa", loops=3, prelude="dsa"), some_tokens()

    @jax.jit
    def run(model, tokens):
        return indexer_losses(model, tokens), indexer_losses(model, tokens, stage="dense")

    (logits, sparse), (dense_logits, dense) = run(model, tokens)
    np.testing.assert_allclose(logits, forward(model, tokens), **FLOAT32_TOLERANCE)
    everything = build("dsa full dsa", loops=3, prelude="dsa", dsa={"selected_tokens": 17})
    np.testing.assert_allclose(dense_logits, forward(everything, tokens), **FLOAT32_TOLERANCE)
    for losses in (sparse, dense):
        assert losses.loops.shape == (3, 2)
        assert losses.outside.shape == (1,)
        assert all(np.all(np.asarray(part) > 0) for part in losses)
        assert losses.mean() == pytest.approx(np.mean(np.append(losses.loops, losses.outside)))
    assert not np.allclose(sparse.loops, dense.loops)


@pytest.mark.parametrize("stage", [pytest.param("dense", marks=pytest.mark.slow), "sparse"])
def test_each_loss_trains_its_own_parameters(stage):
    model, tokens = build("dsa", remat=True), some_tokens()

    @jax.jit
    def gradients(model):
        def each(pick):
            return jax.grad(lambda model: pick(*indexer_losses(model, tokens, stage=stage)))(model)

        return each(lambda logits, _: jnp.sin(logits).sum()), each(lambda _, loss: loss.mean())

    for gradient, is_indexer in zip(gradients(model), (False, True), strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            if path[0].name != "rho":
                belongs = "indexer" in jax.tree_util.keystr(path)
                assert np.any(leaf) == (belongs == is_indexer), jax.tree_util.keystr(path)


@pytest.mark.slow
def test_training_an_indexer_brings_it_near_the_attention():
    model, tokens = build("dsa", loops=1, dsa={"selected_tokens": 8}), some_tokens(4)

    @jax.jit
    @jax.value_and_grad
    def loss(model):
        return indexer_losses(model, tokens, stage="dense")[1].mean()

    before, gradient = loss(model)
    for _ in range(20):
        model = jax.tree.map(lambda w, d: w - 2.0 * d, model, gradient)
        after, gradient = loss(model)
    assert after < 0.9 * before


def test_losses_want_an_indexer():
    with pytest.raises(ValueError, match='has no "dsa" layer'):
        indexer_losses(build("nsa"), some_tokens())
    with pytest.raises(ValueError, match="stage must be 'dense' or 'sparse'; got 'warm'"):
        indexer_losses(build("dsa"), some_tokens(), stage="warm")  # pyright: ignore[reportArgumentType]


def test_lt2s_indexer_is_the_mean_of_products():
    indexer = Indexer(LoopedConfig.tiny(**SMALL), DSAOptions(**DSA | LT2), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (6, 16))
    q, k, weights = indexer(x, jnp.arange(6))
    heads = indexer.query(x).reshape(6, 2, 8)
    wanted = jnp.einsum("thi,si->ts", heads, indexer.key(x)) / 2
    np.testing.assert_allclose(index_scores(q, k, weights), wanted, **FLOAT32_TOLERANCE)


@pytest.mark.nightly
@pytest.mark.oracle
def test_the_lightning_indexer_selects_what_transformers_does():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    width, heads, size, time, count = 16, 4, 8, 13, 5
    theirs = DeepseekV32Indexer(
        DeepseekV32Config(
            hidden_size=width,
            index_n_heads=heads,
            index_head_dim=size,
            qk_rope_head_dim=size // 2,
            index_topk=count,
            q_lora_rank=width,
        ),
        0,
    ).eval()
    options = DSAOptions(**DSA, index_heads=heads)
    ours = Indexer(LoopedConfig.tiny(**SMALL), options, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    ours.key_norm.bias[...] = jnp.asarray(0.1 * random.standard_normal(size), jnp.float32)
    pairs = (
        (theirs.wq_b, ours.query), (theirs.wk, ours.key), (theirs.weights_proj, ours.weights),
    )  # fmt: skip
    with torch.no_grad():
        for linear, layer in pairs:
            linear.weight.copy_(torch.tensor(np.asarray(layer.kernel[...]).T))
        theirs.k_norm.weight.copy_(torch.tensor(np.asarray(ours.key_norm.scale[...])))
        theirs.k_norm.bias.copy_(torch.tensor(np.asarray(ours.key_norm.bias[...])))
    x = random.standard_normal((1, time, width)).astype(np.float32)
    half = size // 4
    angles = np.arange(time)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    angles = torch.tensor(np.concatenate([angles, angles], -1)[None], dtype=torch.float32)
    causal = torch.tril(torch.ones(1, time, time, dtype=torch.bool))
    hidden = torch.tensor(x)
    picked = theirs(hidden, hidden, (angles.cos(), angles.sin()), causal, None)
    q, k, weights = ours(jnp.asarray(x[0]), jnp.arange(time))
    scores = np.asarray(index_scores(q, k, weights))
    for t in range(count - 1, time):
        np.testing.assert_array_equal(
            np.sort(picked[0, t].numpy()), np.sort(np.argsort(-scores[t, : t + 1])[:count])
        )


@pytest.mark.parametrize("size", ["600m", "1.3b"])
def test_presets_have_the_parameters_of_their_equations(size):
    width = {"600m": 1024, "1.3b": 2048}[size]
    heads = {"600m": 8, "1.3b": 16}[size]
    released, native = (PRESETS[f"lt2-sparse-{kind}-{size}"] for kind in ("dsa", "nsa"))
    shared = width * (heads * 576 + 576) + heads * 512 * width + width * (heads * 64 + 64)
    assert layer_parameters("dsa", released) == shared
    per_head = width // 16
    grouped = 2 * width * width + 2 * width * per_head + width * 3 * 16
    assert layer_parameters("nsa", native) == grouped
    hybrid = PRESETS[f"lt2-hybrid-dsa-{size}"]
    layers = len(hybrid.layers)
    assert hybrid.layers.count("dsa") == layers // 5
    lightning = released.with_options(dsa={"indexer": "lightning"})
    assert layer_parameters("dsa", lightning) == (
        4 * width * width + width * (heads * 64 + 64 + heads) + 2 * 64
    )
    assert parameter_count(native) < parameter_count(released)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("nsa.selected_blocks", 2, "at least 3"),
        ("dsa.index_size", 6, "multiple of 4"),
        ("dsa.indexer", "mean", "lightning, lt2"),
        ("dsa.shared_value_size", 100, "shared_key_size"),
        ("dsa.selected_tokens", 0, "at least 1"),
    ],
)
def test_bad_fields_are_named(field, value, words):
    word, name = field.split(".")
    with pytest.raises(ValueError, match=f"{field}.*{words}"):
        LoopedConfig.tiny(word, options={word: {name: value}})


@pytest.mark.nightly
def test_packed_documents_do_not_meet_in_a_model_of_every_layer_looped():
    """One is shorter than a block of the sparse layers."""
    sizes = {"width": 32, "heads": 2, "vocabulary": 50, "feed_forward": 32}
    model = LoopedLM(LoopedConfig.tiny(" ".join(LAYERS), 2, **sizes), rngs=nnx.Rngs(0))
    texts = [jax.random.randint(jax.random.key(n), (1, n), 0, 50) for n in (11, 5, 23)]
    ids = jnp.concatenate([jnp.full(text.shape, i) for i, text in enumerate(texts)], axis=1)

    @jax.jit
    def forward(tokens, segment_ids=None):
        return model(tokens, segment_ids=segment_ids)

    packed = jnp.split(forward(jnp.concatenate(texts, axis=1), ids), (11, 16), axis=1)
    for text, logits in zip(texts, packed, strict=True):
        np.testing.assert_allclose(logits, forward(text), rtol=1e-4, atol=1e-4)
