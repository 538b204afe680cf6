"""Native and DeepSeek sparse attention against restatements made for the test, and their limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit import checking
from toolkit.attention import (
    BlockCache,
    IndexedCache,
    deepseek_sparse_attention,
    deepseek_sparse_attention_reference,
    deepseek_sparse_attention_step,
    draw_inputs,
    mixer,
    mixture_of_block_attention,
    mixture_of_block_attention_step,
    native_sparse_attention,
    native_sparse_attention_reference,
    softmax_attention,
)
from toolkit.bench.mixers.matrix_products import matrix_flops

TOLERANCE, FLOAT32_TOLERANCE = 1e-11, 1e-5
TIME, HEADS, GROUPS, KEY, VALUE = 29, 4, 2, 8, 8
NSA = {"block_size": 3, "selected_blocks": 4, "sliding_window": 5}
FORMS = pytest.mark.parametrize("form", ["masked", "gathered"])
FAST = {"xla_backend_optimization_level": 0}
# Twice the tokens need about twice the memory: more than that is room for buffers.
LINEAR = 2.3


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def attention_inputs(time=TIME, batch=2):
    return [
        draw(batch, time, heads, size, seed=seed)
        for seed, (heads, size) in enumerate(((HEADS, KEY), (GROUPS, KEY), (GROUPS, VALUE)))
    ]


def native_inputs(time=TIME):
    gates = [jax.nn.sigmoid(draw(2, time, HEADS, seed=seed)) for seed in range(3)]
    return [*attention_inputs(time), *gates]


def deepseek_inputs(time=TIME, batch=2):
    index = draw(batch, time, 3, 5), draw(batch, time, 5), draw(batch, time, 3)
    return [*attention_inputs(time, batch), *index]


def softmax(scores):
    p = np.exp(scores - np.max(scores))
    return p / p.sum()


def naive_native(q, k, v, *gates):
    """Token by token, head by head, with Python lists of blocks."""
    size, count, window = NSA.values()
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, g in np.ndindex(q.shape[0], q.shape[1], k.shape[2]):
        heads = range(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)
        keys, values = k[b, :, g], v[b, :, g]
        complete = [range(c, c + size) for c in range(0, t + 1, size) if c + size <= t + 1]
        mean_keys = [keys[block].mean(0) for block in complete]
        weight = np.zeros(len(complete))
        for h in heads:
            if complete:
                p = softmax(np.stack(mean_keys) @ q[b, t, h] / np.sqrt(KEY))
                weight += p
                means = np.stack([values[block].mean(0) for block in complete])
                out[b, t, h] += gates[0][b, t, h] * (p @ means)
        own = t // size
        forced = {0, own - 1, own}
        others = sorted(set(range(own)) - forced, key=lambda c: (-weight[c], c))
        read = sorted({c for c in forced if c >= 0} | set(others[: count - 3]))
        tokens = [s for c in read for s in range(c * size, (c + 1) * size) if s <= t]
        for gate, seen in ((gates[1], tokens), (gates[2], range(max(0, t - window + 1), t + 1))):
            for h in heads:
                p = softmax(keys[list(seen)] @ q[b, t, h] / np.sqrt(KEY))
                out[b, t, h] += gate[b, t, h] * (p @ values[list(seen)])
    return out


def naive_selection(index_q, index_k, weights, count):
    batch, time = index_k.shape[:2]
    mask = np.zeros((batch, time, time), bool)
    for b, t in np.ndindex(batch, time):
        relu = np.maximum(index_q[b, t] @ index_k[b, : t + 1].T, 0)
        scores = weights[b, t] @ relu
        mask[b, t, sorted(range(t + 1), key=lambda s: (-scores[s], s))[:count]] = True
    return jnp.asarray(mask)


def value_and_gradients(function, inputs, **options):
    def loss(*inputs):
        out = function(*inputs, **options)
        out = out[0] if isinstance(out, tuple) else out
        return jnp.sum(jnp.sin(3 * out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=range(len(inputs)), has_aux=True))
    (_, out), gradients = run(*inputs)
    return out, *gradients


def assert_close(got, wanted, tolerance=TOLERANCE):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@FORMS
def test_native_attention_of_grouped_heads(form):
    with enable_x64(True):
        inputs = native_inputs()
        got = value_and_gradients(native_sparse_attention, inputs, implementation=form, **NSA)
        wanted = value_and_gradients(native_sparse_attention_reference, inputs, **NSA)
        assert_close(got, wanted)
    naive = naive_native(*map(np.asarray, inputs))
    np.testing.assert_allclose(got[0], naive, rtol=TOLERANCE, atol=TOLERANCE)


@FORMS
def test_deepseek_attention_of_grouped_heads_equals_jax_on_the_selected_sets(form):
    count, inputs = 6, deepseek_inputs()
    mask = naive_selection(*map(np.asarray, inputs[3:]), count)
    got = value_and_gradients(
        deepseek_sparse_attention, inputs, selected_tokens=count, implementation=form
    )
    oracle = partial(jax.nn.dot_product_attention, mask=mask[:, None])
    assert_close(got[:4], value_and_gradients(oracle, inputs[:3]), FLOAT32_TOLERANCE)
    # What selects learns nothing here.
    assert not any(np.any(gradient) for gradient in got[4:])


def test_a_selection_that_holds_the_context_is_softmax_attention():
    with enable_x64(True):
        inputs = deepseek_inputs()
        for count in (TIME, 4 * TIME):
            got = value_and_gradients(deepseek_sparse_attention, inputs, selected_tokens=count)
            assert_close(got[:4], value_and_gradients(softmax_attention, inputs[:3]))
        # With one token more than fits, all queries but the last still see everything.
        got, _ = deepseek_sparse_attention(*inputs, selected_tokens=TIME - 1)
        wanted, _ = softmax_attention(*inputs[:3])
        np.testing.assert_allclose(got[:, :-1], wanted[:, :-1], atol=TOLERANCE)
        assert not np.allclose(got[:, -1], wanted[:, -1])


def test_means_of_blocks_grown_are_those_of_blocks_read():
    """MoBA's cache after a prompt and tokens one by one is that of all of them at once."""
    q, k, v = (x.astype(jnp.float32) for x in attention_inputs())
    sizes = 2, GROUPS, KEY, VALUE, TIME
    read = partial(mixture_of_block_attention, block_size=4, selected_blocks=2)
    step = jax.jit(partial(mixture_of_block_attention_step, block_size=4, selected_blocks=2))
    empty = BlockCache.empty(*sizes, block_size=4)
    wanted = read(q, k, v, initial_state=empty)[1]
    grown = read(q[:, :18], k[:, :18], v[:, :18], initial_state=empty)[1]
    for token in range(18, TIME):
        _, grown = step(q[:, token], k[:, token], v[:, token], grown)
    jax.tree.map(partial(np.testing.assert_allclose, atol=FLOAT32_TOLERANCE), grown, wanted)


def test_of_equal_index_scores_the_earliest_tokens_are_read():
    q, k, v, index_q, index_k, weights = deepseek_inputs()
    for tied in (jnp.zeros_like(weights), -jnp.ones_like(weights)):
        # Products that are all negative: every score is 0, or -0.
        out, _ = deepseek_sparse_attention(
            q, k, v, -jnp.abs(index_q), jnp.abs(index_k), tied, selected_tokens=4
        )
        wanted = jax.nn.dot_product_attention(q[:, 4:], k[:, :4], v[:, :4])
        np.testing.assert_allclose(out[:, 4:], wanted, atol=FLOAT32_TOLERANCE)


def test_blocks_that_are_all_selected_are_full_attention():
    """And so is a window that holds everything."""
    with enable_x64(True):
        q, k, v, *_ = native_inputs()
        closed, open_ = jnp.zeros(q.shape[:3]), jnp.ones(q.shape[:3])
        wanted, _ = softmax_attention(q, k, v)
        options = {"block_size": 3, "selected_blocks": TIME, "sliding_window": TIME}
        for gates in ((closed, open_, closed), (closed, closed, open_)):
            out, _ = native_sparse_attention(q, k, v, *gates, **options)
            np.testing.assert_allclose(out, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["nsa", "dsa"])
def test_a_full_cache_is_an_error_or_nan(name):
    row = mixer(name, **({"block_size": 3} if name == "nsa" else {"selected_tokens": 2}))
    inputs = [x[:, 0] for x in draw_inputs(row, 1)]
    state = row.empty_state(2, 2, 16, 8, 4, jnp.float32, **row.options)
    step = jax.jit(partial(row.step, **row.options))
    for _ in range(4):
        out, state = step(*inputs, state)
        assert np.isfinite(out).all()
    message = "holds 4 of 4 tokens and cannot take 1 more"
    with checking(), pytest.raises(ValueError, match=message):
        row.step(*inputs, state, **row.options)
    held = state
    out, state = step(*inputs, state)
    assert np.isnan(out).all()
    for a, b in zip(jax.tree.leaves(state)[:2], jax.tree.leaves(held)[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    with checking(), pytest.raises(ValueError, match="cannot take 2 more"):
        row.function(*(jnp.stack([x, x], 1) for x in inputs), initial_state=held, **row.options)
    with pytest.raises(TypeError, match="must be a"):
        row.step(*inputs, jnp.zeros(3), **row.options)


def test_values_may_be_a_part_of_their_keys():
    """The cache then holds the keys alone, as of latent attention."""
    with enable_x64(True):
        q, k, _, *index = deepseek_inputs()
        inputs = [q, k, k[..., :6], *index]
        wanted, _ = deepseek_sparse_attention(*inputs, selected_tokens=6)
        cache = IndexedCache.empty(2, GROUPS, KEY, None, 5, TIME, jnp.float64)
        out, cache = deepseek_sparse_attention(
            *(x[:, :20] for x in inputs), selected_tokens=6, initial_state=cache
        )
        np.testing.assert_allclose(out, wanted[:, :20], atol=TOLERANCE)
        step = jax.jit(partial(deepseek_sparse_attention_step, selected_tokens=6))
        for t in range(20, TIME):
            out_t, cache = step(*(x[:, t] for x in inputs), cache)
            np.testing.assert_allclose(out_t, wanted[:, t], atol=TOLERANCE)
    assert cache.keys.nbytes + cache.index_keys.nbytes == 8 * 2 * TIME * (GROUPS * KEY + 5)
    assert cache.values is None


@pytest.mark.slow
def test_reference_continues_a_cache():
    with enable_x64(True):
        inputs = deepseek_inputs()
        wanted, _ = deepseek_sparse_attention_reference(*inputs, selected_tokens=6)
        cache = IndexedCache.empty(2, GROUPS, KEY, VALUE, 5, TIME, jnp.float64)
        for part in (slice(0, 11), slice(11, TIME)):
            out, cache = deepseek_sparse_attention_reference(
                *(x[:, part] for x in inputs), selected_tokens=6, initial_state=cache
            )
            np.testing.assert_allclose(out, wanted[:, part], atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param("nsa", "masked", marks=pytest.mark.nightly), ("dsa", "gathered")],
)
def test_memory_of_training_is_linear_in_time(name, form):
    options = {"nsa": {"block_size": 16, "selected_blocks": 4, "sliding_window": 32}}
    row = mixer(name, **options.get(name, {"selected_tokens": 64}))

    def temporary(time):
        inputs = draw_inputs(row, time, batch=1, heads=2)

        def loss(*inputs):
            return row.function(*inputs, implementation=form, **row.options)[0].sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*inputs).compile(FAST)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(1024) < LINEAR * temporary(512)


@pytest.mark.parametrize("name", ["nsa", "dsa"])
def test_gathered_products_are_those_of_the_selection(name):
    options = {"nsa": {"block_size": 4, "selected_blocks": 4, "sliding_window": 16}}
    row, time = mixer(name, **options.get(name, {"selected_tokens": 16})), 128
    inputs = draw_inputs(row, time, batch=1, heads=2, key=8, value=8)
    run = partial(row.function, implementation="gathered", **row.options)
    products = 2 * 2 * time * (8 + 8)
    if name == "dsa":
        wanted = products * 16 + 2 * time * time * 2 * (8 + 1)
        assert matrix_flops(run, *inputs) == wanted
    else:
        means_and_blocks = products * (time // 4 + 16)
        window = matrix_flops(partial(softmax_attention, sliding_window=16), *inputs[:3])
        assert matrix_flops(run, *inputs) == means_and_blocks + window


@pytest.mark.parametrize("name", ["nsa", "dsa"])
def test_a_step_reads_what_the_formula_says(name):
    """A longer context adds its means, or its index keys, and nothing else."""
    sizes, element = (4, 64, 128), 2
    row = mixer(name)
    short, long = (
        row.step_bytes(2, context, *sizes, element_bytes=element, **row.options)
        for context in (8192, 16_384)
    )
    added = {"nsa": 8192 // 64 * 4 * (64 + 128) * 4, "dsa": 8192 * 64 * element}
    assert long - short == 2 * added[name]
    full = mixer("full").step_bytes(2, 16_384, *sizes, element_bytes=element)
    assert long < full / 4


def test_sizes_out_of_range_are_named():
    inputs = native_inputs(6)
    with pytest.raises(ValueError, match=r"selected_blocks must be at least 3.*got 2"):
        native_sparse_attention(*inputs, selected_blocks=2)
    with pytest.raises(ValueError, match="block_size must be at least 1 token; got 0"):
        native_sparse_attention(*inputs, block_size=0)
    with pytest.raises(ValueError, match=r"window_gate .*must have shape"):
        native_sparse_attention(*inputs[:5], inputs[5][:, :3])
    inputs = deepseek_inputs(6)
    with pytest.raises(ValueError, match="selected_tokens must be at least 1; got 0"):
        deepseek_sparse_attention(*inputs, selected_tokens=0)
    with pytest.raises(ValueError, match=r"index_k .*must have shape"):
        deepseek_sparse_attention(*inputs[:4], inputs[4][:, :3], inputs[5])
    with pytest.raises(ValueError, match="index_size of an IndexedCache must be at least 1; got 0"):
        IndexedCache.empty(1, 1, 4, None, 0, 8)
