"""What softmax attention takes besides q, k and v: every combination, in both forms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from toolkit.attention import (
    merge_attention,
    online_softmax,
    softmax_attention,
    softmax_attention_reference,
)
from toolkit.attention.softmax import tiles

BATCH, HEADS, KEY, VALUE = 2, 4, 4, 3
TOLERANCE = 1e-11
FORMS = ("dense", "blockwise")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16, so that short sequences have several."""
    monkeypatch.setattr(tiles, "largest_tile", lambda keys: 16)


def numbers(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def broadcasting(*sizes):
    """Shapes in which any axis may be 1, or None for no array."""
    axes = st.tuples(*(st.sampled_from((1, size)) for size in sizes))
    return st.one_of(st.none(), axes)


@st.composite
def calls(draw):
    """Shapes, and arrays and options by name."""
    time = draw(st.sampled_from((1, 5, 37)))
    keys = draw(st.sampled_from((time, 40)))
    key_heads = draw(st.sampled_from((1, 2, 4)))
    seed = draw(st.integers(0, 2**16))
    arrays, options = {}, {"is_causal": draw(st.booleans())}
    bias, mask = (draw(broadcasting(BATCH, HEADS, time, keys)) for _ in range(2))
    if bias is not None:
        arrays["bias"] = numbers(seed + 1, *bias)
    if mask is not None:
        options["mask"] = numbers(seed + 2, *mask) > -0.5
    for number, name in enumerate(("alibi_slopes", "sinks")):
        if draw(st.booleans()):
            by_query = draw(st.booleans()) and name == "sinks"
            arrays[name] = numbers(seed + 3 + number, *((BATCH, time) * by_query), HEADS)
    if draw(st.booleans()):
        arrays["relative_bias"] = numbers(seed + 8, BATCH, time, HEADS, 6)
    if draw(st.booleans()):
        options["logits_soft_cap"] = 1.5
    if draw(st.booleans()):
        options |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(seed)}
    window = draw(st.sampled_from((None, 0, 9, (3, None), (None, 2), (6, 1))))
    if window is not None:
        options["local_window_size"] = window
    if draw(st.booleans()):
        options["query_offset"] = draw(st.sampled_from((keys - time, jnp.asarray([0, 7]))))
    if draw(st.booleans()):
        options["key_value_seq_lengths"] = jnp.asarray([keys, keys // 2])
    if draw(st.booleans()):
        options["query_seq_lengths"] = jnp.asarray([time // 2, time])
    if keys == time and draw(st.booleans()):
        options["segment_ids"] = jnp.asarray(np.arange(time) // 11 % 2)[None].repeat(BATCH, 0)
    inputs = {
        "q": numbers(seed + 5, BATCH, time, HEADS, KEY),
        "k": numbers(seed + 6, BATCH, keys, key_heads, KEY),
        "v": numbers(seed + 7, BATCH, keys, key_heads, VALUE),
    }
    return inputs | arrays, options


def weighed(function, arrays, **options):
    """A loss of the output and of the log-sum-exp where it is one."""
    out, _, residual = function(**arrays, **options, return_residual=True)
    residual = jnp.where(jnp.isfinite(residual), residual, 0)
    weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return jnp.sum(out * weights) + jnp.sum(residual * weights[..., 0]), (out, residual)


def assert_close(got, wanted, tolerance=TOLERANCE):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * scale)


def holds(call):
    arrays, options = call
    gradient = lambda f: jax.jit(jax.value_and_grad(partial(weighed, f, **options), has_aux=True))  # noqa: E731
    wanted = gradient(softmax_attention_reference)(arrays)
    for form in FORMS:
        got = gradient(partial(softmax_attention, implementation=form))(arrays)
        assert_close(got, wanted)


FEW = settings(
    max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
MANY = settings(FEW, max_examples=8, suppress_health_check=list(HealthCheck))


@settings(FEW, suppress_health_check=list(HealthCheck))
@given(calls())
def test_any_combination_is_the_equation(call):
    with enable_x64(True):
        holds(call)


@pytest.mark.nightly
@MANY
@given(calls())
def test_many_combinations_are_the_equation(call):
    with enable_x64(True):
        holds(call)


def everything(time, keys, key_heads=2):
    """A call with every argument at once, differentiable ones first."""
    arrays = {
        "q": numbers(0, BATCH, time, HEADS, KEY),
        "k": numbers(1, BATCH, keys, key_heads, KEY),
        "v": numbers(2, BATCH, keys, key_heads, VALUE),
        "bias": numbers(3, 1, HEADS, 1, keys),
        "alibi_slopes": numbers(4, HEADS),
        "sinks": numbers(5, BATCH, time, HEADS),
        "relative_bias": numbers(7, BATCH, time, HEADS, 9),
    }
    options = {
        "mask": numbers(6, BATCH, 1, time, keys) > -1,
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.2,
        "dropout_key": jax.random.key(1),
        "local_window_size": (20, 0),
        "query_offset": keys - time,
        "key_value_seq_lengths": jnp.asarray([keys, keys - 3]),
    }
    return arrays, options


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        ("forward", "dense"),
        ("forward", "blockwise"),
        pytest.param("forward over reverse", "dense", marks=pytest.mark.nightly),
        pytest.param("reverse over reverse", "blockwise", marks=pytest.mark.nightly),
        pytest.param("reverse over forward", "blockwise", marks=pytest.mark.nightly),
    ],
)
def test_derivatives_of_any_mode_are_the_equations(mode, form):
    """Longer than the chunks in which second derivatives go."""
    time = 20 if mode == "forward" else 140
    with enable_x64(True):
        arrays, options = everything(time, time + 10)
        direction = jax.tree.map(
            lambda x: jnp.cos(jnp.arange(x.size * 1.0)).reshape(x.shape), arrays
        )

        def along(f, arrays):
            return jax.jvp(f, (arrays,), (direction,))[1]

        def derivative(function):
            loss = lambda arrays: weighed(function, arrays, **options)[0] ** 2  # noqa: E731
            inner = lambda arrays: sum(  # noqa: E731
                jnp.vdot(a, b)
                for a, b in zip(
                    *map(jax.tree.leaves, (jax.grad(loss)(arrays), direction)), strict=True
                )
            )
            return jax.jit(
                {
                    "forward": partial(along, loss),
                    "forward over reverse": partial(along, jax.grad(loss)),
                    "reverse over reverse": jax.grad(inner),
                    "reverse over forward": jax.grad(partial(along, loss)),
                }[mode]
            )(arrays)

        got = derivative(partial(softmax_attention, implementation=form))
        assert_close(got, derivative(softmax_attention_reference), 1e-10)


def test_merged_parts_are_the_whole():
    """Ring attention and split-k: keys in parts of any length, one of them seen by no query."""
    q, k, v = (numbers(seed, BATCH, 24, HEADS, KEY, dtype=np.float32) for seed in range(3))

    def whole(q, k, v):
        return softmax_attention(q, k, v, return_residual=True)[::2]

    def parts(q, k, v):
        cuts = ((0, 5), (5, 20), (20, 24))
        found = [
            softmax_attention(
                q[:, 5:],
                k[:, start:stop],
                v[:, start:stop],
                query_offset=5 - start,
                return_residual=True,
            )[::2]
            for start, stop in cuts
        ]
        return merge_attention(*found)

    def loss(function, q, k, v):
        out, residual = function(q, k, v)
        return jnp.sum(out[:, -19:] ** 2) + jnp.sum(residual[:, -19:])

    got, wanted = (
        jax.jit(jax.value_and_grad(partial(loss, function), argnums=(0, 1, 2)))(q, k, v)
        for function in (parts, whole)
    )
    assert_close(got, wanted, 1e-5)
    empty = jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf)
    out, residual = merge_attention(empty, empty)
    assert not out.any()
    assert (residual == -jnp.inf).all()
    with pytest.raises(ValueError, match="at least one part"):
        merge_attention()


@pytest.mark.parametrize("form", FORMS)
def test_overflowing_scores_give_nan_as_in_jax_nn(form):
    q = jnp.full((1, 3, 1, 4), 1e30, jnp.float32)
    for k in (q, -q):
        wanted = jax.nn.dot_product_attention(q, k, q)
        out, _, residual = softmax_attention(
            q, k, q, is_causal=False, implementation=form, return_residual=True
        )
        assert jnp.isnan(wanted).all()
        assert jnp.isnan(out).all()
        assert jnp.isnan(residual).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_not_finite_stays_in_its_document(form):
    q, k, v = (numbers(seed, 1, 20, 2, KEY, dtype=np.float32) for seed in range(3))
    segment_ids = (jnp.arange(20) >= 10).astype(jnp.int32)[None]
    attend = partial(softmax_attention, segment_ids=segment_ids, implementation=form)
    _, backward = jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)
    d_out = jnp.ones((1, 20, 2, KEY)).at[:, 15].set(jnp.nan)
    d_q, d_k, d_v = backward(d_out)
    for gradient, poisoned in ((d_q, [15]), (d_k, range(10, 16)), (d_v, range(10, 16))):
        found = jnp.isnan(gradient).any(axis=(0, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(found), list(poisoned))


@pytest.mark.parametrize("form", FORMS)
def test_a_huge_token_that_a_loss_does_not_reach_leaves_its_gradient_alone(form):
    q, k, v = (numbers(seed, 1, 20, 2, KEY, dtype=np.float32) for seed in range(3))
    loss = lambda q, k, v: softmax_attention(q, k, v, implementation=form)[0][:, :15].sum()  # noqa: E731
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    q[:, 15:], k[:, 15:] = 1e30, 1e30
    assert all(jnp.isfinite(x).all() for x in gradient(q, k, v))


def test_dropout_keeps_the_mean_and_follows_its_key():
    q = k = jnp.zeros((1, 512, 1, 2))
    v = jnp.ones((1, 512, 1, 2))
    attend = partial(softmax_attention, q, k, v, is_causal=False, dropout_rate=0.25)
    first, same, other = (attend(dropout_key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    # Of 512 x 512 weights the standard error of the mean is 0.001; of a row of 512, 0.026.
    assert abs(first.mean() - 1) < 0.005
    assert 0.02 < first[..., 0].std() < 0.03
    old_style, _ = attend(dropout_key=jax.random.PRNGKey(0))
    np.testing.assert_array_equal(old_style, first)


def test_tiles_follow_the_cores(monkeypatch):
    monkeypatch.undo()
    for cores, largest in ((1, 256), (2, 512)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: range(n), raising=False)
        assert tiles.largest_tile(keys=4096) == largest


def bad_calls():
    q = k = v = jnp.ones((2, 5, 4, 3))
    ids = jnp.zeros((2, 5), jnp.int32)
    return [
        ({"bias": q[0]}, ValueError, "bias must have 4 axes"),
        ({"bias": jnp.ones((2, 3, 5, 5))}, ValueError, "bias .* 4 or 1 along heads"),
        ({"bias": [1.0]}, TypeError, "bias must be an array"),
        ({"bias": jnp.ones((1, 1, 1, 5), bool)}, TypeError, "bias must be floating point"),
        ({"mask": jnp.ones((1, 1, 1, 5))}, TypeError, "mask must be boolean"),
        ({"alibi_slopes": jnp.ones(3)}, ValueError, "alibi_slopes .* must have shape"),
        ({"sinks": jnp.ones(3)}, ValueError, "sinks .* must have shape"),
        ({"query_seq_lengths": jnp.ones(2)}, TypeError, "query_seq_lengths must be integers"),
        ({"local_window_size": (1, 2), "sliding_window": 2}, ValueError, "give one of them"),
        ({"local_window_size": (1.5, 2)}, TypeError, "local_window_size"),
        ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size"),
        ({"local_window_size": -1}, ValueError, "local_window_size"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap"),
        ({"dropout_rate": 1.0}, ValueError, "dropout_rate"),
        ({"dropout_rate": 0.5}, ValueError, "dropout_key"),
        ({"scale": jnp.ones(2)}, ValueError, "scale"),
        ({"k": k[:, :3], "v": v[:, :3], "segment_ids": ids}, ValueError, "the same tokens"),
    ]


@pytest.mark.parametrize("number", range(len(bad_calls())))
def test_bad_arguments_are_refused_in_words(number):
    changes, error, message = bad_calls()[number]
    q = k = v = jnp.ones((2, 5, 4, 3))
    with pytest.raises(error, match=message):
        softmax_attention(**({"q": q, "k": k, "v": v} | changes))


def test_rescaling_less_often_changes_nothing_but_the_count():
    """Scores that grow along the keys, as when attention is to what is near."""
    rows, keys = 50, 170
    with enable_x64(True):
        scores = numbers(0, rows, keys) + np.linspace(0, 6, keys)
        values = numbers(1, keys, VALUE)
        wanted = jax.nn.softmax(scores, axis=-1) @ values
        counts, of_random = [], []
        for slack in (0.0, 8 * np.log(2)):  # 0 and 5.5
            out, lse, rescales = online_softmax(scores, values, tile=16, slack=slack)
            assert_close((out, lse), (wanted, jax.nn.logsumexp(scores, axis=-1)), 1e-13)
            counts.append(int(rescales.sum()))
            random = online_softmax(3 * numbers(2, rows, keys), values, tile=16, slack=slack)
            of_random.append(random.rescales.mean())
    # Of 11 maxima of random tiles about ln 11 are the largest so far.
    assert of_random[0] == pytest.approx(np.log(11), rel=0.2)
    assert of_random[1] < of_random[0] / 5
    padded = np.pad(scores, ((0, 0), (0, -keys % 16)), constant_values=-9)
    largest = np.maximum.accumulate(padded.reshape(rows, -1, 16).max(axis=2), axis=1)
    assert counts[0] == np.sum(np.diff(largest, axis=1) > 0)
    assert counts[1] < counts[0] / 3
    # Where nothing is seen yet, or ever, there is nothing to rescale.
    out, lse, rescales = online_softmax(jnp.full((1, 8), -jnp.inf), jnp.ones((8, 2)), tile=4)
    assert not out.any()
    assert lse == -jnp.inf
    assert rescales == 0


def test_biases_by_distance_take_memory_linear_in_time():
    """Four times the queries take little more: no bias per query and key is held."""

    def temporary(time):
        q, keys = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (time, 4096))
        nearer = jax.ShapeDtypeStruct((1, time, 2, 16), jnp.float32)
        loss = lambda q, k, v, nearer: softmax_attention(  # noqa: E731
            q, k, v, relative_bias=nearer, implementation="blockwise"
        )[0].sum()
        program = jax.jit(jax.grad(loss, argnums=(0, 3))).lower(q, keys, keys, nearer).compile()
        return program.memory_analysis().temp_size_in_bytes

    pairs = 4 * 2 * 4096**2
    assert temporary(4096) < min(0.6 * pairs, 1.5 * temporary(1024))
