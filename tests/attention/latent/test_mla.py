"""MLA: two forms that are one function, a cache, documents, gradients, and transformers' layers."""

import functools
import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from latent_layers import YARN, distance, drawn, small, stream

from toolkit import checking
from toolkit.attention.latent import (
    PRESETS,
    LatentCache,
    LatentConfig,
    LatentWeights,
    Yarn,
    mla,
    mla_step,
)


@pytest.fixture
def double():
    with enable_x64(True):
        yield


def equation(x, weights, config):
    """The layer as NumPy loops over the paper's equations."""
    w = {name: None if a is None else np.asarray(a) for name, a in vars(weights).items()}
    norm = lambda c: c / np.sqrt((c**2).mean(-1, keepdims=True) + config.epsilon)  # noqa: E731
    x = np.asarray(x)
    turns = np.exp(1j * np.arange(x.shape[1])[:, None] * config.frequencies)

    def rope(a):
        z = (a[..., ::2] + 1j * a[..., 1::2]) * config.rotary_factor
        z = z * (turns if a.ndim == 3 else turns[:, None])
        return np.stack([z.real, z.imag], -1).reshape(a.shape)

    inner = x if w["query_down"] is None else norm(x @ w["query_down"]) * w["query_norm"]
    q = np.einsum("btq,qhk->bthk", inner, w["query_up"])
    q, p = q[..., : config.key_size], rope(q[..., config.key_size :])
    c = norm(x @ w["latent_down"]) * w["latent_norm"]
    r = rope(x @ w["rope_key"])
    k, v = (np.einsum("btr,rhk->bthk", c, w[name]) for name in ("key_up", "value_up"))
    s = config.scale * (np.einsum("bihk,bjhk->bhij", q, k) + np.einsum("bihk,bjk->bhij", p, r))
    s = np.where(np.tri(x.shape[1], dtype=bool), s, -np.inf)
    a = np.exp(s - s.max(-1, keepdims=True))
    out = np.einsum("bhij,bjhv->bihv", a / a.sum(-1, keepdims=True), v)
    return np.einsum("bthv,hvw->btw", out, w["output"])


@pytest.mark.parametrize("changes", [{}, {"query_latent_size": None, "yarn": None}])
@pytest.mark.usefixtures("double")
def test_both_forms_are_the_equation(changes):
    config = small(**changes)
    weights, x = drawn(config), stream(config)
    wanted = equation(x, weights, config)
    for form in ("expanded", "absorbed"):
        assert distance(mla(x, weights, config, form=form)[0], wanted) < 1e-12


@pytest.mark.usefixtures("double")
def test_prompt_and_steps_give_what_the_whole_sequence_gives():
    config = small()
    weights, x = drawn(config), stream(config)
    wanted, _ = mla(x, weights, config)
    cache = LatentCache.empty(2, config.latent_size, config.rope_size, 7, x.dtype)
    # Empty slots may hold anything.
    cache = LatentCache(cache.latents * jnp.nan, cache.rope_keys * jnp.nan, cache.length)
    parts = []
    for form, piece in (("expanded", x[:, :2]), ("absorbed", x[:, 2:4])):
        y, cache = mla(piece, weights, config, form=form, initial_state=cache)
        parts.append(y)
    for t in range(4, 7):
        y, cache = mla_step(x[:, t], weights, cache, config)
        parts.append(y[:, None])
    assert distance(jnp.concatenate(parts, axis=1), wanted) < 1e-12
    with checking(), pytest.raises(ValueError, match="holds 7 of 7 tokens"):
        mla_step(x[:, 0], weights, cache, config)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_slots_are_met_in_blocks(monkeypatch):
    """Rows of several lengths, a last block that overlaps the one before, NaN in empty slots."""
    module, steps = (
        importlib.import_module(f"toolkit.attention.latent.{name}") for name in ("slots", "mla")
    )
    config, slots = small(), 15
    weights, x = drawn(config), stream(config, 3, 13)
    _, full = mla(x, weights, config, initial_state=LatentCache.empty(3, 16, 4, slots, x.dtype))
    length = jnp.array([12, 1, 5], jnp.int32)
    empty = (jnp.arange(slots, dtype=jnp.int32)[None] >= length[:, None])[..., None]
    cache = LatentCache(*(jnp.where(empty, jnp.nan, a) for a in (full.latents, full.rope_keys)),
                        length)  # fmt: skip

    def loss(x_t, cache):
        return (mla_step(x_t, weights, cache, config)[0] ** 2).sum()

    monkeypatch.setattr(module, "BLOCK", 4)
    steps._step.clear_cache()
    token = x[jnp.arange(3), length]
    clean = LatentCache(full.latents, full.rope_keys, length)
    found, gradient = mla_step(token, weights, cache, config)[0], jax.grad(loss)(token, cache)
    of_latents = jax.grad(lambda x: loss(token, replace(cache, latents=x)))(cache.latents)
    monkeypatch.undo()
    steps._step.clear_cache()
    wanted = mla(x, weights, config)[0][jnp.arange(3), length]
    assert distance(found, wanted) < 1e-12
    assert distance(gradient, jax.grad(loss)(token, clean)) < 1e-12
    assert bool((jnp.isfinite(of_latents) & (~empty | (of_latents == 0))).all())


@pytest.mark.usefixtures("double")
def test_documents_never_meet_and_padding_on_the_left_changes_nothing():
    config = small()
    weights, x = drawn(config), stream(config)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2, 2]])
    y, _ = mla(x, weights, config, segment_ids=segments)
    for row, start in ((0, 3), (1, 1)):
        alone, _ = mla(x[row : row + 1, start:], weights, config)
        assert distance(y[row, start:], alone[0]) < 1e-12
    empty = LatentCache.empty(2, config.latent_size, config.rope_size, 8, x.dtype)
    _, cache = mla(x[:, :6], weights, config, segment_ids=segments[:, :6], initial_state=empty)
    assert cache.length.tolist() == [3, 5]
    y_t, _ = mla_step(x[:, 6], weights, cache, config)
    assert distance(y_t, y[:, 6]) < 1e-12


@pytest.mark.usefixtures("double")
def test_gradients_are_those_of_differences():
    config = small(heads=2)
    weights, x = drawn(config), stream(config, 1, 4)
    turn = jnp.asarray(np.random.default_rng(5).normal(size=(1, 4, config.width)))

    @functools.partial(jax.jit, static_argnums=1)
    def loss(w, form):
        return (turn * mla(x, w, config, form=form)[0]).sum()

    gradients = [jax.jit(jax.grad(loss), static_argnums=1)(weights, form)
                 for form in ("expanded", "absorbed")]  # fmt: skip
    direction = drawn(config, seed=3)
    moved = [
        loss(jax.tree.map(lambda w, d, e=e: w + e * d, weights, direction), "expanded")
        for e in (1e-6, -1e-6)
    ]
    slope = float((moved[0] - moved[1]) / 2e-6)
    for gradient in gradients:
        parts = jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)
        assert sum(map(float, jax.tree.leaves(parts))) == pytest.approx(slope, rel=1e-6)
        assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient))


def test_presets_have_published_sizes():
    millions = {"deepseek_v2_lite": 13.8, "deepseek_v2": 149.2, "deepseek_v3": 187.1}
    for name, wanted in {**millions, "kimi_k2": 101.1}.items():
        assert sum(PRESETS[name].parameters.values()) / 1e6 == pytest.approx(wanted, abs=0.06)
    scales = {"deepseek_v2_lite": 0.114721, "deepseek_v3": 0.135234, "kimi_k2": 0.130861}
    for name, wanted in scales.items():
        assert PRESETS[name].scale == pytest.approx(wanted, abs=1e-6)
        assert PRESETS[name].rotary_factor == 1
    assert all(config.cache_size == 576 for config in PRESETS.values())


def test_half_precision_stays_close():
    config = small()
    weights, x = drawn(config), stream(config)
    exact, _ = mla(x, weights, config)
    halved = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, weights))
    for form in ("expanded", "absorbed"):
        assert distance(mla(*halved, config, form=form)[0].astype(jnp.float32), exact) < 0.03


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, c: mla(x[0], w, c), r"x must have 3 axes"),
        (lambda x, w, c: mla(x[..., 1:], w, c), r"latent_down \[width, latent\] must have"),
        (lambda x, w, c: mla(x, w, c, form="fast"), "form must be"),
        (lambda x, w, c: mla(x, w, small(heads=2)), "weights.query_up"),
        (lambda x, w, c: mla(x, w, small(query_latent_size=None)), "weights.query"),
        (lambda x, w, c: mla(x.astype(jnp.bfloat16), w, c), "must share a dtype"),
        (lambda x, w, c: mla(x, w, c, segment_ids=jnp.ones((2, 3), int)), "segment_ids"),
        (
            lambda x, w, c: mla(x, w, c, initial_state=LatentCache.empty(2, 9, 4, 8)),
            "initial_state.latents",
        ),
        (lambda x, w, c: LatentConfig(**{**vars(c), "rope_size": 3}), "rope_size must be even"),
        (lambda x, w, c: LatentConfig(**{**vars(c), "heads": 0}), "heads must lie in"),
        (lambda x, w, c: Yarn(factor=0.0), "factor must be above 0"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    config = small()
    with pytest.raises((ValueError, TypeError), match=message):
        call(stream(config), drawn(config), config)


@pytest.mark.oracle
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("version", "query_latent"),
    [("V2", None), pytest.param("V2", 12, marks=pytest.mark.nightly), ("V3", 12)],
)
def test_layers_of_transformers_agree(version, query_latent):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    # DeepSeek-V2's class takes one factor for all; V3's tells the two mscales apart.
    yarn = Yarn(factor=8.0, original_length=32, mscale=0.7, mscale_all_dim=0.7)
    config = small(query_latent_size=query_latent, yarn=yarn if version == "V2" else YARN)
    made = getattr(transformers, f"Deepseek{version}Config")(
        hidden_size=config.width,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        q_lora_rank=query_latent,
        kv_lora_rank=config.latent_size,
        qk_nope_head_dim=config.key_size,
        qk_rope_head_dim=config.rope_size,
        v_head_dim=config.value_size,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_length,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "mscale": config.yarn.mscale,
            "mscale_all_dim": config.yarn.mscale_all_dim,
        },
        attn_implementation="eager",
    )
    name = f"deepseek_{version.lower()}"
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    torch.manual_seed(0)
    layer = getattr(module, f"Deepseek{version}Attention")(made, 0).double()
    rotary = getattr(module, f"Deepseek{version}RotaryEmbedding")(made)
    x = torch.randn(2, 9, config.width, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand_like(parameter) - 0.5)
        mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        places = torch.arange(9)[None]
        out = layer(x, position_embeddings=rotary(x, places), attention_mask=mask)[0]
    tensors = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    weights = LatentWeights.from_tensors(tensors, config)
    for form in ("expanded", "absorbed"):
        y, _ = mla(jnp.asarray(x.numpy()), weights, config, form=form)
        assert distance(y, out.numpy()) < 1e-6
