"""Megatron's products and the vocabulary: equal to whole ones, with the textbook's collectives."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.attention import softmax_attention
from toolkit.measure import collectives
from toolkit.parallel import (
    column_parallel,
    make_mesh,
    row_parallel,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_embedding,
    vocabulary_parallel_loss,
)

DEVICES, BATCH, TIME, WIDTH, HEAD = 8, 2, 16, 16, 4
TOLERANCE = 1e-5


def kernels():
    shapes = {
        "qkv": (WIDTH, 3, DEVICES * HEAD),
        "out": (DEVICES * HEAD, WIDTH),
        "up": (WIDTH, 64),
        "down": (64, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for key, (name, shape) in pairs}


CUTS = {
    "qkv": P(None, None, "model"),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}


def block(column, row, params, x):
    """A transformer block's two pairs of products; norms, which send nothing, are left out."""
    width = params["qkv"].shape[0]
    qkv = column(x, params["qkv"].reshape(width, -1))
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], -1, HEAD), 3, axis=2)
    mixed = softmax_attention(q, k, v)[0]
    x = x + row(mixed.reshape(*mixed.shape[:2], -1), params["out"])
    return x + row(jnp.tanh(column(x, params["up"])), params["down"])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("time_axis", "forward", "backward"),
    [
        (None, {"all-reduce": 2}, {"all-reduce": 4}),
        (1, {"all-gather": 2, "reduce-scatter": 2}, {"all-gather": 4, "reduce-scatter": 4}),
    ],
)
def test_a_block_sends_what_the_textbook_says(time_axis, forward, backward, check_vma):
    params = kernels()
    x, weights = jax.random.normal(jax.random.key(1), (2, BATCH, TIME, WIDTH))
    mesh = make_mesh({"model": DEVICES})
    column = partial(column_parallel, axis="model", time_axis=time_axis)
    row = partial(row_parallel, axis="model", time_axis=time_axis)
    stream = P() if time_axis is None else P(None, "model")

    def gradients(params, x, weights):
        out, pull = jax.vjp(partial(block, column, row), params, x)
        return out, pull(weights * out)  # independent sums would be merged into one

    over = partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    forward_only = over(partial(block, column, row), in_specs=(CUTS, stream), out_specs=stream)
    both = over(gradients, in_specs=(CUTS, stream, stream), out_specs=(stream, (CUTS, stream)))
    compiled = jax.jit(both).lower(params, x, weights).compile()
    if check_vma:
        assert Counter(c.kind for c in collectives(compiled)) == backward
        alone = jax.jit(forward_only).lower(params, x).compile()
        assert Counter(c.kind for c in collectives(alone)) == forward
    wanted, pull = jax.vjp(partial(block, jnp.matmul, jnp.matmul), params, x)
    found = jax.tree.leaves(compiled(params, x, weights))
    for left, right in zip(found, jax.tree.leaves((wanted, pull(weights * wanted))), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_vocabulary_s_loss_never_gathers_logits(dtype):
    vocabulary, mesh = 48, make_mesh({"data": 2, "model": 4})
    keys = jax.random.split(jax.random.key(2), 3)
    hidden = jax.random.normal(keys[0], (BATCH, TIME, WIDTH)).astype(dtype)
    table = 3 * jax.random.normal(keys[1], (vocabulary, WIDTH)).astype(dtype)
    targets = jax.random.randint(keys[2], (BATCH, TIME), 0, vocabulary)

    def plain(hidden, table):
        logits = (hidden @ table.T).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    def ours(hidden, table):
        return vocabulary_parallel_cross_entropy(
            hidden, table, targets, mesh, batch_axis="data"
        ).mean()

    compiled = jax.jit(jax.value_and_grad(ours, (0, 1))).lower(hidden, table).compile()
    largest_logits = BATCH // 2 * TIME * vocabulary * 4
    # Gradients of hidden and of the table are summed; of the logits nobody sends anything.
    sent = [item for item in collectives(compiled) if item.kind != "all-reduce"]
    assert sum(item.bytes for item in sent) < largest_logits / 4
    found, wanted = compiled(hidden, table), jax.value_and_grad(plain, (0, 1))(hidden, table)
    tolerance = TOLERANCE if dtype == "float32" else 2e-2
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_loss_and_embedding_inside_shard_map(check_vma):
    mesh, cut = make_mesh({"model": DEVICES}), P("model")
    table = jax.random.normal(jax.random.key(3), (24, WIDTH))
    tokens = jnp.array([[0, 23, 11], [5, 5, 24]])

    def value(table):
        rows = vocabulary_parallel_embedding(tokens, table, "model")
        logits = column_parallel(rows, table.T, "model")
        losses = vocabulary_parallel_loss(logits, tokens, "model")
        return jnp.where(tokens < 24, losses, 0).sum(), (rows, losses)

    step = jax.shard_map(
        jax.value_and_grad(value, has_aux=True),
        mesh=mesh,
        in_specs=cut,
        out_specs=((P(), (P(), P())), cut),
        check_vma=check_vma,
    )

    def plain(table):
        rows = jnp.where((tokens < 24)[..., None], table[jnp.minimum(tokens, 23)], 0)
        logs = jax.nn.log_softmax(rows @ table.T)
        chosen = jnp.take_along_axis(logs, jnp.minimum(tokens, 23)[..., None], -1)[..., 0]
        return -jnp.where(tokens < 24, chosen, 0).sum(), rows

    (loss, (rows, losses)), gradient = jax.jit(step)(table)
    whole = jax.jit(jax.value_and_grad(plain, has_aux=True))
    (wanted, wanted_rows), wanted_gradient = whole(table)
    assert jnp.isnan(losses[1, 2])
    assert jnp.isfinite(losses).sum() == 5
    for left, right in ((loss, wanted), (rows, wanted_rows), (gradient, wanted_gradient)):
        np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=TOLERANCE)


def test_what_does_not_fit_is_said():
    mesh = make_mesh({"model": DEVICES})
    hidden, targets = jnp.ones((1, 2, 4)), jnp.zeros((1, 2), int)
    with pytest.raises(ValueError, match=r"vocabulary=20 .*of size 8; 24 would be"):
        vocabulary_parallel_cross_entropy(hidden, jnp.ones((20, 4)), targets, mesh)
    with pytest.raises(ValueError, match="axis must be one of 'model'"):
        vocabulary_parallel_cross_entropy(
            hidden, jnp.ones((16, 4)), targets, mesh, batch_axis="data"
        )

    def over(function):
        return jax.shard_map(
            function, mesh=mesh, in_specs=P(), out_specs=P("model"), check_vma=False
        )

    with pytest.raises(ValueError, match=r"shapes do not fit: x \(2, 4\), kernel \(5, 4\)"):
        over(lambda x: column_parallel(x, jnp.ones((5, 4)), "model"))(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"time_axis=0: .* of size 6.*; 8 would be"):
        over(lambda x: row_parallel(x, jnp.ones((4, 4)), "model", time_axis=0))(jnp.ones((6, 4)))
