"""Backward passes chunk by chunk: the same gradients, in less memory, for fewer FLOPs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.attention import softmax_attention
from toolkit.measure import program_cost
from toolkit.parallel import stream_backward, streamed_loss

WIDTH, HEADS, LAYERS = 16, 4, 2
HIDDEN, TABLE = np.ones((1, 4, 2), np.float32), np.ones((8, 2), np.float32)


def layer_params(layer, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(layer), 4)
    draw = functools.partial(jax.random.normal, dtype=dtype)
    params = [draw(key, (WIDTH, WIDTH)) / 4 for key in keys]
    return dict(zip(("query", "key", "value", "out"), params, strict=True))


def masked_rows(params, x, lo):
    """Attention of rows lo.. to all before, with its square of scores, and a nonlinear end."""
    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
    q, k, v = (heads(y @ params[n]) for y, n in ((x[:, lo:], "query"), (x, "key"), (x, "value")))
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    ahead = jnp.arange(x.shape[1]) > jnp.arange(lo, x.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(ahead, -1e30, scores), axis=-1)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*x[:, lo:].shape)
    return x[:, lo:] + jnp.tanh(mixed @ params["out"])


def whole(params, x):
    return masked_rows(params, x, 0)


def loss_of(layer, params, x):
    for one in params:
        x = layer(one, x)
    return (x**2).mean()


def gradient(layer):
    return jax.jit(jax.grad(functools.partial(loss_of, layer), argnums=(0, 1)))


@pytest.mark.parametrize(("time", "chunks"), [(7, 3), (4, 1)])
def test_gradients_are_those_of_the_whole_layer(time, chunks):
    params = [layer_params(layer) for layer in range(LAYERS)]
    x = jax.random.normal(jax.random.key(9), (2, time, WIDTH))
    streamed = stream_backward(masked_rows, chunks=chunks)
    values = [jax.jit(functools.partial(loss_of, form))(params, x) for form in (streamed, whole)]
    np.testing.assert_allclose(*values, rtol=1e-6)
    for ours, wanted in zip(
        *map(jax.tree.leaves, (gradient(streamed)(params, x), gradient(whole)(params, x))),
        strict=True,
    ):
        np.testing.assert_allclose(ours, wanted, atol=1e-6)


def test_memory_halves_and_flops_fall():
    """The compiled program's own count, against recomputation of the whole layer."""
    params = [layer_params(layer) for layer in range(LAYERS)]
    x = jnp.zeros((1, 512, WIDTH))
    forms = {"checkpoint": jax.checkpoint(whole), "stream": stream_backward(masked_rows, chunks=8)}
    costs = {
        name: program_cost(gradient(form).lower(params, x).compile())
        for name, form in forms.items()
    }
    assert costs["stream"].temp_bytes <= 0.55 * costs["checkpoint"].temp_bytes
    assert costs["stream"].flops <= 0.75 * costs["checkpoint"].flops


def test_packed_documents_and_half_precision():
    """Whole numbers among the parameters have no gradient; sums of halves are float32."""
    params = layer_params(0, jnp.bfloat16)
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    x = jax.random.normal(jax.random.key(9), (1, 8, WIDTH), jnp.bfloat16)

    def rows(both, x, lo):
        params, segments = both
        q, k, v = (
            (x @ params[name]).reshape(1, -1, HEADS, WIDTH // HEADS)
            for name in ("query", "key", "value")
        )
        ids = segments[:, : x.shape[1]]
        out, _ = softmax_attention(q, k, v, segment_ids=ids)
        return x[:, lo:] + out.reshape(x.shape)[:, lo:] @ params["out"]

    def loss(layer, params, x):
        return (layer((params, segments), x).astype(jnp.float32) ** 2).mean()

    streamed = stream_backward(rows, chunks=2)
    ours, wanted = (
        jax.grad(functools.partial(loss, layer))(params, x)
        for layer in (streamed, lambda p, x: rows(p, x, 0))
    )
    for name, leaf in ours.items():
        assert leaf.dtype == jnp.bfloat16
        scale = float(jnp.abs(wanted[name]).max())
        np.testing.assert_allclose(
            leaf.astype(jnp.float32), wanted[name].astype(jnp.float32), atol=0.02 * scale
        )


def head_loss(hidden, table, targets):
    logits = jnp.einsum("btd,vd->btv", hidden, table)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def test_the_head_streams_too():
    """Value and gradients are those of all logits at once, and an eighth of them is in memory."""
    hidden, table = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 256, WIDTH), (512, WIDTH)])
    )
    targets = jax.random.randint(jax.random.key(2), (2, 256), 0, 512)
    ours = functools.partial(streamed_loss, chunks=8)
    programs = [jax.jit(jax.value_and_grad(form, argnums=(0, 1))) for form in (ours, head_loss)]
    results = (program(hidden, table, targets) for program in programs)
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    streamed, at_once = (
        program_cost(p.lower(hidden, table, targets).compile()).temp_bytes for p in programs
    )
    logits = 2 * 256 * 512 * 4
    assert at_once >= logits
    assert streamed <= 0.4 * logits
    counted = targets.at[:, 100:].set(-1)
    np.testing.assert_allclose(
        ours(hidden, table, counted),
        head_loss(hidden[:, :100], table, targets[:, :100]),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: stream_backward(masked_rows, chunks=0), "chunks"),
        (lambda: stream_backward(masked_rows, chunks=2)({}, jnp.ones((4, 2))), "x"),
        (lambda: stream_backward(masked_rows, chunks=5)({}, jnp.ones((1, 4, 2))), "x"),
        (lambda: stream_backward(lambda p, x, lo: x, chunks=2)(1.0, jnp.ones((1, 4, 2))), "rows"),
        (lambda: streamed_loss(HIDDEN, TABLE, jnp.zeros((1, 4), int), chunks=3), "chunks"),
        (lambda: streamed_loss(HIDDEN, TABLE, jnp.zeros((1, 5), int), chunks=2), "targets"),
        (lambda: streamed_loss(HIDDEN, TABLE.T, jnp.zeros((1, 4), int), chunks=2), "table"),
    ],
)
def test_what_cannot_be_streamed_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
