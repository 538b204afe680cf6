"""Exact softmax attention: dense and blockwise against the equation, JAX's own, and hard inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import AxisType, PartitionSpec

from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.softmax_attention import softmax_attention

FLOAT64_TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 2e-5
BFLOAT16_TOLERANCE = 2e-2

IMPLEMENTATIONS = ["dense", "blockwise"]
BATCH, HEADS, KEY_HEADS, KEY, VALUE = 2, 4, 2, 8, 6


def draw(time, dtype=np.float32, *, heads=HEADS, key_heads=KEY_HEADS, batch=BATCH, seed=0):
    """Random q, k, v and a cotangent of the output."""
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, time, heads, KEY),
        (batch, time, key_heads, KEY),
        (batch, time, key_heads, VALUE),
        (batch, time, heads, VALUE),
    )
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def output(function, **options):
    return jax.jit(lambda q, k, v: function(q, k, v, **options)[0])


def output_and_gradient(function, q, k, v, d_out, **options):
    @jax.jit
    def run(q, k, v, d_out):
        out, backward = jax.vjp(lambda *qkv: function(*qkv, **options)[0], q, k, v)
        return out, *backward(d_out)

    return run(q, k, v, d_out)


def assert_close(got, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("time", "options"),
    [
        (1, {}),
        pytest.param(7, {"is_causal": False}, marks=pytest.mark.nightly),
        pytest.param(127, {}, marks=pytest.mark.nightly),
        (129, {"sliding_window": 20, "scale": 0.7}),
        pytest.param(300, {"is_causal": False}, marks=pytest.mark.nightly),
        (300, {"sliding_window": 33, "is_causal": False}),
        (520, {"sliding_window": 400}),
    ],
)
def test_value_and_gradient_in_float64(implementation, time, options):
    with enable_x64(True):
        inputs = draw(time, np.float64)
        got = output_and_gradient(
            partial(softmax_attention, implementation=implementation), *inputs, **options
        )
        wanted = output_and_gradient(softmax_attention_reference, *inputs, **options)
        assert all(array.dtype == jnp.float64 for array in got)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_agrees_with_jax_nn_on_packed_documents(implementation):
    q, k, v, _ = draw(150)
    v = jnp.concatenate([v, v[..., :2]], axis=-1)
    numbers = np.sort(np.random.default_rng(1).integers(0, 3, (BATCH, 150)), axis=1)
    segment_ids = jnp.asarray(numbers, jnp.int32)
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    wanted = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    got, _ = softmax_attention(q, k, v, segment_ids=segment_ids, implementation=implementation)
    assert_close(got, wanted, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_grouped_queries_share_a_head(implementation, key_heads):
    inputs = draw(70, heads=4, key_heads=key_heads)
    got = output_and_gradient(partial(softmax_attention, implementation=implementation), *inputs)
    wanted = output_and_gradient(softmax_attention_reference, *inputs)
    assert_close(got, wanted, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_accumulates_in_float32(implementation):
    q, k, v, d_out = draw(300, jnp.bfloat16)
    got = output_and_gradient(
        partial(softmax_attention, implementation=implementation), q, k, v, d_out
    )
    assert all(array.dtype == jnp.bfloat16 for array in got)
    wanted = output_and_gradient(
        softmax_attention_reference, *(x.astype(jnp.float32) for x in (q, k, v, d_out))
    )
    for a, b in zip(got, wanted, strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_past_is_bit_identical_when_the_future_changes(implementation):
    q, k, v, _ = draw(300)
    attend = output(softmax_attention, implementation=implementation)
    cut = 211
    changed = [x.at[:, cut:].multiply(-3.7) for x in (q, k, v)]
    np.testing.assert_array_equal(attend(q, k, v)[:, :cut], attend(*changed)[:, :cut])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_finite_future_never_shows_in_values_or_gradients_of_the_past(implementation):
    q, k, v, d_out = draw(300)
    cut = 211
    d_out = d_out.at[:, cut:].set(0)  # a loss on the past only
    attend = partial(softmax_attention, implementation=implementation)
    clean = output_and_gradient(attend, q, k, v, d_out)
    poisons = (jnp.nan, jnp.inf, jnp.nan)
    poisoned = [x.at[:, cut:, :, 1].set(p) for x, p in zip((q, k, v), poisons, strict=True)]
    out, *gradients = output_and_gradient(attend, *poisoned, d_out)
    np.testing.assert_array_equal(out[:, :cut], clean[0][:, :cut])
    assert not jnp.isfinite(out[:, cut:]).any()
    assert_close(gradients, clean[1:], FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_finite_document_never_leaks_into_another(implementation):
    q, k, v, d_out = draw(130)
    segment_ids = jnp.where(jnp.arange(130) % 3 == 0, 7, 2)[None].repeat(BATCH, axis=0)
    ours = (segment_ids == 2)[:, :, None, None]
    d_out = jnp.where(ours, d_out, 0)
    attend = partial(softmax_attention, implementation=implementation, segment_ids=segment_ids)
    clean = output_and_gradient(attend, q, k, v, d_out)
    poisoned = [jnp.where(ours, x, jnp.nan) for x in (q, k, v)]
    out, *gradients = output_and_gradient(attend, *poisoned, d_out)
    np.testing.assert_array_equal(jnp.where(ours, out, 0), jnp.where(ours, clean[0], 0))
    assert_close(gradients, clean[1:], FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_visible_nan_shows(implementation):
    q, k, v, d_out = draw(40)
    v = v.at[0, 10, 0, 0].set(jnp.nan)
    out, *_ = output_and_gradient(
        partial(softmax_attention, implementation=implementation), q, k, v, d_out
    )
    assert jnp.isnan(out[0, 10:, :2]).any(axis=-1).all()
    assert jnp.isfinite(out[0, :10]).all()
    assert jnp.isfinite(out[1]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_gradient_is_passed_on(implementation):
    q, k, v, d_out = draw(300)
    for others in (0, 1):  # a maximum over the row may pass over NaN
        d_bad = (others * d_out).at[0, 211, 0, 3].set(jnp.nan)
        attend = partial(softmax_attention, implementation=implementation)
        _, d_q, d_k, d_v = output_and_gradient(attend, q, k, v, d_bad)
        assert jnp.isnan(d_q[0, 211, 0]).all()
        assert all(jnp.isnan(d[0, :212, 0]).any(axis=-1).all() for d in (d_k, d_v))
        assert all(jnp.isfinite(d[0, 212:]).all() for d in (d_k, d_v))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    q, k, v, d_out = draw(64)
    inputs = 1e3 * q, 1e3 * k, v, d_out
    got = output_and_gradient(partial(softmax_attention, implementation=implementation), *inputs)
    assert all(jnp.isfinite(x).all() for x in got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_equals_a_loop(implementation):
    q, k, v, d_out = draw(40)
    stack = [jnp.stack([x, 2 * x]) for x in (q, k, v, d_out)]
    run = partial(output_and_gradient, partial(softmax_attention, implementation=implementation))
    wanted = [
        jnp.stack(pair)
        for pair in zip(run(*(x[0] for x in stack)), run(*(x[1] for x in stack)), strict=True)
    ]
    assert_close(jax.vmap(run)(*stack), wanted, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keys_are_replicated", [False, True])
def test_shard_map_over_batch_and_heads(implementation, keys_are_replicated):
    inputs = draw(40, heads=4, key_heads=1 if keys_are_replicated else 4)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    many = PartitionSpec("data", None, "model")
    few = PartitionSpec("data") if keys_are_replicated else many
    attend = jax.shard_map(
        lambda q, k, v: softmax_attention(q, k, v, implementation=implementation)[0],
        mesh=mesh,
        in_specs=(many, few, few),
        out_specs=many,
    )
    got = output_and_gradient(lambda *qkv: (attend(*qkv), None), *inputs)
    wanted = output_and_gradient(softmax_attention_reference, *inputs)
    assert_close(got, wanted, FLOAT32_TOLERANCE)


def test_second_call_does_not_compile_again():
    traces = []

    @jax.jit
    def attend(q, k, v):
        traces.append(q.shape)
        return softmax_attention(q, k, v)[0]

    q, k, v, _ = draw(160)
    attend(q, k, v)
    attend(k=k + 1, q=q, v=v)
    attend(q, k, v + 1)
    assert len(traces) <= 2  # positional and keyword calls are two signatures
    assert attend(q, k, v).shape == (BATCH, 160, HEADS, VALUE)


@pytest.mark.parametrize("has_everything", [False, True])
def test_blockwise_memory_is_linear_in_time(has_everything):
    def temporary_bytes(time):
        inputs = [jnp.ones((1, time, 2, 32))] * 3
        if has_everything:
            inputs += [jnp.ones((1, 2, 1, time)), jnp.ones(2), jnp.ones(2)]

        def loss(q, k, v, *optional):
            options = dict(zip(("bias", "alibi_slopes", "sinks"), optional, strict=False))
            if has_everything:
                mask, key = jnp.ones((1, 1, 1, time), bool), jax.random.key(0)
                options |= {"mask": mask, "dropout_rate": 0.5, "dropout_key": key}
                options |= {"logits_soft_cap": 1.0, "local_window_size": (time // 2, 0)}
            return softmax_attention(q, k, v, **options, implementation="blockwise")[0].sum()

        function = jax.grad(loss, argnums=range(len(inputs)))
        compiled = jax.jit(function).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large, dense_scores = temporary_bytes(8192), temporary_bytes(16384), 2 * 16384**2 * 4
    assert large <= 2.1 * small
    assert large < dense_scores / 10


def test_keys_outside_every_window_never_show():
    q, k, v, _ = draw(2048)
    windowed = output(softmax_attention, implementation="blockwise", sliding_window=64)
    far = k.at[:, :1024].set(jnp.nan)
    out = windowed(q, far, v)
    np.testing.assert_array_equal(out[:, 1024 + 63 :], windowed(q, k, v)[:, 1024 + 63 :])


def bad_inputs():
    q, k, v, _ = draw(5)
    ids = jnp.zeros((BATCH, 5), jnp.int32)
    return [
        ((q[0], k, v), {}, ValueError, "q must have 4 axes"),
        ((q, k[:, :4], v), {}, ValueError, "v .* must have shape"),
        ((q, k, v[:1]), {}, ValueError, "v .* must have shape"),
        ((q[:, :, :3], k, v), {}, ValueError, "multiple"),
        ((q, k[..., :4], v), {}, ValueError, "k .* must have shape"),
        ((q, k.astype(jnp.bfloat16), v), {}, TypeError, "share one dtype"),
        ((q.astype(jnp.int32), k, v), {}, TypeError, "floating point"),
        ((q, k, v), {"sliding_window": 0}, ValueError, "at least 1"),
        ((q, k, v), {"sliding_window": 2.5}, TypeError, "sliding_window"),
        ((q, k, v), {"implementation": "fast"}, ValueError, "implementation"),
        ((q, k, v), {"segment_ids": ids[:, :3]}, ValueError, "segment_ids"),
        ((q, k, v), {"segment_ids": ids.astype(jnp.float32)}, TypeError, "segment_ids"),
        ((q, k, v), {"initial_state": (k, v)}, TypeError, "KVCache"),
    ]


@pytest.mark.parametrize("number", range(len(bad_inputs())))
def test_bad_input_is_refused_in_words(number):
    arrays, options, error, message = bad_inputs()[number]
    with pytest.raises(error, match=message):
        softmax_attention(*arrays, **options)


@pytest.mark.oracle
def test_agrees_with_torch():
    torch = pytest.importorskip("torch")
    q, k, v, _ = draw(300, heads=2, key_heads=2)
    tensors = [torch.from_numpy(np.array(x)).transpose(1, 2) for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    got, _ = softmax_attention(q, k, v)
    assert_close(got, wanted.transpose(1, 2).numpy(), FLOAT32_TOLERANCE)
