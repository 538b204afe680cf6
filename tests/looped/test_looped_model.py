"""The looped forward pass: what loops share, what they may not see, what the scan must equal."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, parameter_count
from toolkit.looped.feed_forward.swiglu import SwiGLU
from toolkit.looped.layers import linear, rotary_embedding

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
BFLOAT16_ERROR = 0.05  # of the norm of the logits
GATED = {word: {"output_gate": True} for word in ("full", "window")}
PATTERNS = ("full", "gdn window full")


def small(pattern, loops=2, **overrides):
    sizes = {
        "vocabulary": 50,
        "width": 32,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    return LoopedConfig.tiny(pattern, loops, **(sizes | overrides))


def build(config, seed=0, *, rho=0.3):
    """A model whose residual gates and output gates are not at their (zero) start."""
    model = LoopedLM(config, rngs=nnx.Rngs(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    if model.rho is not None:
        model.rho[...] = rho * jax.random.normal(next(keys), model.rho.shape)
    for block in model.blocks:
        gate = getattr(block.mixer, "gate", None)
        if gate is not None:
            gate.kernel[...] = 0.2 * jax.random.normal(next(keys), gate.kernel.shape)
    return model


def some_tokens(batch=2, time=19, vocabulary=50, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, vocabulary)


@jax.jit
def forward(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


def test_scan_equals_loops_written_out():
    model, tokens = build(small("window full", loops=2, options=GATED)), some_tokens()

    def written_out(model):
        h, hidden = model.embedding(tokens), []
        for rho in model.rho[...]:
            h, _ = model.loop(h, rho)
            hidden.append(h)
        return model.head(h), jnp.stack(hidden)

    def scanned(model):
        return model(tokens, return_loops=True)

    def loss(form):
        def squares(model):
            logits, hidden = form(model)
            return jnp.mean(jnp.square(logits)), (logits, hidden)

        return jax.jit(jax.grad(squares, has_aux=True))

    (ours, our_values), (plain, plain_values) = (
        loss(form)(model) for form in (scanned, written_out)
    )
    for a, b in zip(our_values, plain_values, strict=True):
        np.testing.assert_allclose(a, b, **FLOAT32_TOLERANCE)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, **GRADIENT_TOLERANCE)


def test_recomputing_loops_changes_nothing():
    config = small("full", loops=3)
    tokens = some_tokens()
    model, remat = build(config), build(dataclasses.replace(config, remat=True))
    loss = jax.jit(jax.value_and_grad(lambda model: jnp.mean(jnp.square(model(tokens)))))
    (value, gradient), (value_remat, gradient_remat) = loss(model), loss(remat)
    np.testing.assert_allclose(value, value_remat, **FLOAT32_TOLERANCE)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_remat), strict=True):
        np.testing.assert_allclose(a, b, **GRADIENT_TOLERANCE)


def test_one_loop_without_residual_is_the_plain_transformer():
    gated = build(small("window full", loops=1), rho=0.0)
    plain = LoopedLM(small("window full", loops=1, residual_gate=False), rngs=nnx.Rngs(0))
    tokens = some_tokens()

    @jax.jit
    def textbook(model):
        h = model.embedding(tokens)
        for block in model.blocks:
            h = h + block.mixer(block.mixer_norm(h))[0]
            h = h + block.feed_forward(block.feed_forward_norm(h))
        return model.norm(h) @ model.embedding.embedding[...].T

    by_hand = textbook(gated)
    np.testing.assert_allclose(forward(gated, tokens), by_hand, **FLOAT32_TOLERANCE)
    np.testing.assert_allclose(forward(plain, tokens), by_hand, **FLOAT32_TOLERANCE)


def test_rho_acts_per_loop():
    model, tokens = build(small("full", loops=2)), some_tokens()
    hidden_states = jax.jit(lambda model: model(tokens, return_loops=True)[1])
    base = hidden_states(model)
    model.rho[...] = model.rho[...].at[1].add(1.0)
    changed = hidden_states(model)
    np.testing.assert_array_equal(base[0], changed[0])
    np.testing.assert_allclose(changed[1] - base[1], base[0], rtol=1e-4, atol=1e-4)


def test_program_does_not_grow_with_loops():
    def program_size(loops):
        model = nnx.eval_shape(lambda: LoopedLM(small("gdn full", loops), rngs=nnx.Rngs(0)))
        loss = jax.grad(lambda model, tokens: jnp.mean(model(tokens)))
        return len(jax.jit(loss).lower(model, some_tokens()).as_text().splitlines())

    # Numbers of loops that are no other size: equal shapes would share a function of the program.
    assert program_size(5) == program_size(11)


@pytest.mark.slow
def test_memory_of_training_does_not_grow_with_loops():
    """With `remat`, a loop more costs its input (and a row of rho), no activation inside it."""

    def temporary_bytes(loops, windows=None):
        config = small("full", loops, remat=True, windows=windows)
        model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
        loss = jax.grad(lambda model, tokens: jnp.mean(jnp.square(model(tokens))))
        # Buffers are laid out before machine code is made; its quality does not matter here.
        options = {"xla_backend_optimization_level": 0}
        compiled = jax.jit(loss).lower(model, some_tokens()).compile(options)
        return compiled.memory_analysis().temp_size_in_bytes

    hidden_states = 2 * 19 * 32 * 4
    fewer, more = temporary_bytes(3), temporary_bytes(9)
    assert fewer > 20 * hidden_states
    assert more - fewer <= 6 * 1.1 * hidden_states
    # Nor where loops differ.
    fewer, more = (temporary_bytes(n, " -> ".join(["full"] * (n - 1) + ["7"])) for n in (3, 9))
    assert more - fewer <= 6 * 1.1 * hidden_states


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_future_is_invisible(pattern):
    model, tokens = build(small(pattern, loops=2)), some_tokens()
    changed = tokens.at[:, 11:].add(7) % 50
    before, after = forward(model, tokens), forward(model, changed)
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert not np.allclose(before[:, 11:], after[:, 11:])


def test_a_window_reaches_exactly_as_far_as_its_loops_allow():
    # N layers, T loops, window w (self included): N T (w - 1) tokens back, and not one further.
    model, tokens = (
        build(small("window window", loops=2, options={"window": {"sliding_window": 3}})),
        some_tokens(time=14),
    )
    reach = 2 * 2 * (3 - 1)
    before = forward(model, tokens)
    after = forward(model, tokens.at[:, 2].add(1) % 50)
    np.testing.assert_array_equal(before[:, 2 + reach + 1 :], after[:, 2 + reach + 1 :])
    assert np.all(np.max(np.abs(before - after), axis=-1)[:, 2 : 2 + reach + 1] > 0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_documents_do_not_meet(pattern):
    model = build(small(pattern, loops=2))
    first, second = some_tokens(time=11), some_tokens(time=11, seed=1)
    packed = jnp.concatenate([first, second], axis=1)
    segment_ids = jnp.repeat(jnp.array([[3, 8]] * 2), 11, axis=1)
    logits = forward(model, packed, segment_ids)
    np.testing.assert_allclose(logits[:, :11], forward(model, first), **FLOAT32_TOLERANCE)
    np.testing.assert_allclose(logits[:, 11:], forward(model, second), **FLOAT32_TOLERANCE)


@pytest.mark.nightly
def test_bfloat16_is_finite_and_near_float32():
    config = small("gdn window full", loops=2)
    exact, coarse = build(config), build(dataclasses.replace(config, dtype="bfloat16"))
    tokens = some_tokens()

    def squares(model):
        logits = model(tokens)
        return jnp.mean(jnp.square(logits)), logits

    gradient, logits = jax.jit(jax.grad(squares, has_aux=True))(coarse)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    wanted = forward(exact, tokens)
    assert jnp.linalg.norm(logits - wanted) < BFLOAT16_ERROR * jnp.linalg.norm(wanted)


def test_every_parameter_learns():
    config = small("gdn window full", loops=2, options=GATED)
    model, tokens = build(config), some_tokens()
    gradient = jax.jit(jax.grad(lambda m: jnp.mean(jnp.square(m(tokens)))))(model)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert sum(leaf.size for _, leaf in leaves) == parameter_count(config)
    idle = [jax.tree_util.keystr(path) for path, leaf in leaves if not np.any(leaf)]
    assert idle == []


def test_initial_values():
    model = LoopedLM(LoopedConfig.tiny("gdn full", loops=2, heads=16), rngs=nnx.Rngs(0))
    gdn, attention = model.blocks
    assert not jnp.any(model.rho[...])
    rate = jnp.exp(gdn.mixer.log_rate[...])
    assert jnp.all((rate > 0.009) & (rate < 16.1))
    step = jax.nn.softplus(gdn.mixer.step_bias[...])
    assert jnp.all((step > 0.9e-3) & (step < 1.1e-1))
    for kernel, std in [
        (gdn.feed_forward.down.kernel, 128**-0.5),
        (attention.feed_forward.down.kernel, model.config.feed_forward_size**-0.5),
        (attention.mixer.query.kernel, 128**-0.5),
    ]:
        np.testing.assert_allclose(jnp.std(kernel[...]), std, rtol=0.05)
        assert jnp.max(jnp.abs(kernel[...])) <= 3.001 * std


def test_rotary_scores_depend_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 3, 8))
    score = lambda i, j: jnp.sum(  # noqa: E731
        rotary_embedding(q, jnp.array(i), theta=100.0)
        * rotary_embedding(k, jnp.array(j), theta=100.0)
    )
    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    np.testing.assert_allclose(rotary_embedding(q, jnp.array(0), theta=100.0), q)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (jnp.zeros((3,), jnp.int32), "shape"),
        (jnp.zeros((2, 3)), "float32"),
        (jnp.zeros((2, 0), jnp.int32), "empty"),
    ],
)
def test_malformed_tokens(tokens, message):
    with pytest.raises(ValueError, match=message):
        build(small("full"))(tokens)


def test_segment_ids_must_fit():
    with pytest.raises(ValueError, match="segment_ids"):
        build(small("full"))(some_tokens(), segment_ids=jnp.zeros((2, 3), jnp.int32))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA compiles for a CPU")
def test_gradients_of_matrices_are_summed_without_transposed_copies():
    """Of what flows back, [tokens, hidden], the program holds no copy [hidden, tokens]."""
    batch, time, width, hidden = 3, 16, 8, 24
    part = SwiGLU(width, hidden, down_std=1.0, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(part)

    def loss(params, x):
        return (nnx.merge(graph, params)(x) ** 2).sum()

    x = jnp.ones((batch, time, width))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    program = str(compiled.as_text())
    assert f"f32[{batch * time},{hidden}]" in program
    assert f"f32[{hidden},{batch * time}]" not in program


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_in_bfloat16_meet_a_matrix_as_it_is(rows):
    """As one product does in value and gradient, and without a copy of the matrix in float32."""
    width, outputs = 96, 160
    part = linear(width, outputs, jnp.bfloat16, nnx.Rngs(0), std=1.0)
    x, kernel = jax.random.normal(jax.random.key(1), (rows, width)), part.kernel[...]
    x, kernel = (array.astype(jnp.bfloat16) for array in (x, kernel))

    def ours(x, kernel):
        return part.dot_general(x, kernel, None)

    found, pull = jax.vjp(ours, x, kernel)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-3)
    _, plain = jax.vjp(lambda x, kernel: x @ kernel, x, kernel)
    for gradient, wanted in zip(pull(found), plain(found), strict=True):
        assert gradient.dtype == wanted.dtype
        error = jnp.linalg.norm((gradient - wanted).astype(jnp.float32))
        assert error < 2**-7 * jnp.linalg.norm(wanted.astype(jnp.float32))
    cpus = Path("/proc/cpuinfo")
    if jax.default_backend() == "cpu" and cpus.is_file() and "avx512_bf16" in cpus.read_text():
        program = str(jax.jit(ours).lower(x, kernel).compile().as_text())
        widened = f"f32[{width},{outputs}]"
        assert widened not in program
        plain_program = str(jax.jit(lambda x, k: x[:1] @ k).lower(x, kernel).compile().as_text())
        assert widened in plain_program
