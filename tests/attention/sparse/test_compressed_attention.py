"""Compressed attention and Qwen's: grouped heads, sinks, costs, pooling, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    CompressedCache,
    block_pooling,
    compressed_sparse_attention,
    compressed_sparse_attention_reference,
    compressed_sparse_attention_step,
    draw_inputs,
    heavily_compressed_attention,
    mixer,
    qwen_sparse_attention,
    qwen_sparse_attention_reference,
    qwen_sparse_attention_step,
)

TOLERANCE = 1e-11
TIME = 23  # odd, and ends within a block of 3
COMPRESSED = {"block_size": 3, "sliding_window": 4, "selected_entries": 2}
QWEN = {"block_size": 3, "selected_tokens": 6}


def grouped(name):
    """Four query heads to every key head."""
    row = mixer(name)
    inputs = draw_inputs(row, TIME, heads=8, key=4, value=3, dtype=jnp.float64)
    shared = ("k", "v", "block_k", "block_v")
    return [x[:, :, :2] if n in shared else x for n, x in zip(row.names, inputs, strict=True)]


def results(function, inputs, sinks=None):
    """The output, and the gradients of all inputs."""

    def loss(inputs, sinks):
        out, _ = function(*inputs) if sinks is None else function(*inputs, sinks=sinks)
        return jnp.sum(jnp.sin(3 * out)), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(inputs, sinks)
    return jax.tree.leaves((out, gradients))


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_grouped_heads_and_sinks_in_both_forms_equal_the_equation():
    with enable_x64(True):
        inputs = grouped("csa")
        sinks = jnp.asarray(np.random.default_rng(1).standard_normal(8))
        reference = partial(compressed_sparse_attention_reference, **COMPRESSED)
        wanted = results(reference, inputs, sinks)
        for form in ("masked", "gathered"):
            function = partial(compressed_sparse_attention, **COMPRESSED, implementation=form)
            assert_close(results(function, inputs, sinks), wanted)
        # Controls: another sink, and one entry fewer, are something else.
        assert np.abs(reference(*inputs)[0] - wanted[0]).max() > 1e-3
        fewer = COMPRESSED | {"selected_entries": 1}
        other, _ = compressed_sparse_attention(*inputs, sinks=sinks, **fewer)
        assert np.abs(other - wanted[0]).max() > 1e-3


def test_all_entries_are_read_where_none_are_selected():
    with enable_x64(True):
        inputs = grouped("csa")
        how = {name: COMPRESSED[name] for name in ("block_size", "sliding_window")}
        heavy, _ = heavily_compressed_attention(*inputs[:5], **how)
        every = COMPRESSED | {"selected_entries": TIME // 3}
        np.testing.assert_allclose(
            compressed_sparse_attention(*inputs, **every)[0], heavy, atol=TOLERANCE
        )


@pytest.mark.slow
def test_grouped_heads_of_qwen_sparse_attention_equal_the_equation():
    with enable_x64(True):
        inputs = grouped("qsa")
        wanted = results(partial(qwen_sparse_attention_reference, **QWEN), inputs)
        for form in ("masked", "gathered"):
            function = partial(qwen_sparse_attention, **QWEN, implementation=form)
            assert_close(results(function, inputs), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csa", "qsa"])
def test_grouped_steps_equal_one_pass(name):
    function, one, how = {
        "csa": (compressed_sparse_attention, compressed_sparse_attention_step, COMPRESSED),
        "qsa": (qwen_sparse_attention, qwen_sparse_attention_step, QWEN),
    }[name]
    with enable_x64(True):
        inputs, row = grouped(name), mixer(name, **how)
        wanted, _ = function(*inputs, **how)
        state = row.empty_state(2, 2, 4, 3, TIME, jnp.float64, **row.options)
        step = jax.jit(partial(one, **how))
        for t in range(TIME):
            out, state = step(*(x[:, t] for x in inputs), state)
            np.testing.assert_allclose(out, wanted[:, t], atol=TOLERANCE)


def test_pairs_are_counted_exactly():
    """FLOPs of attention alone: every pair of a query and a row that it reads."""
    for time in (1, 7, 22, 23, 24):
        t, s = np.indices((time, time))
        window = np.sum((s <= t) & (t - s < 4))
        entries = (np.arange(time) + 1) // 3
        sizes = {"block_size": 3, "sliding_window": 4}
        found = mixer("hca").forward_flops(1, time, 1, 2, 3, **sizes)
        assert found == 2 * 5 * (window + entries.sum())
        scored = entries.sum() * (2 + 1) if time // 3 > 2 else 0
        pairs = window + np.minimum(entries, 2).sum()
        found = mixer("csa").forward_flops(1, time, 1, 2, 3, **sizes, selected_entries=2)
        assert found == 2 * (5 * pairs + scored)
        read = 3 * np.minimum(entries, 2) + (np.arange(time) + 1) % 3
        scored = entries.sum() * (2 + 1) if time // 3 > 2 else 0
        found = mixer("qsa").forward_flops(1, time, 1, 2, 3, **QWEN)
        assert found == 2 * (5 * read.sum() + scored)


@pytest.mark.parametrize("series", [1, 2])
def test_blocks_are_pooled_in_pieces_as_in_one(series):
    with enable_x64(True):
        rng, size, block = np.random.default_rng(0), 3, 4
        x, gates = rng.standard_normal((2, 2, TIME, series * size))
        bias = rng.standard_normal((block, series * size))
        ids = np.repeat([0, 1], [10, TIME - 10])[None].repeat(2, 0)
        wanted = np.zeros((2, TIME, size))
        for start, stop in ((0, 10), (10, TIME)):
            for first in range(start, stop - block + 1, block):
                here = slice(first, first + block)
                logits = gates[:, here, -size:] + bias[:, -size:]
                values = x[:, here, -size:]
                if series == 2 and first > start:  # the block before, by its own channels
                    before = slice(first - block, first)
                    own = gates[:, before, :size] + bias[:, :size]
                    logits = np.concatenate([own, logits], axis=1)
                    values = np.concatenate([x[:, before, :size], values], axis=1)
                p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
                wanted[:, first + block - 1] = (p * values).sum(1)
        x, gates, bias, ids = map(jnp.asarray, (x, gates, bias, ids))
        how = {"block_size": block, "series": series}
        found, _ = block_pooling(x, gates, bias, segment_ids=ids, **how)
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
        # The last document again, alone and in two pieces.
        x, gates = x[:, 10:], gates[:, 10:]
        first, state = block_pooling(x[:, :6], gates[:, :6], bias, **how)
        length = jnp.full(2, 6, jnp.int32)
        how |= {"initial_state": state, "length": length}
        second, _ = block_pooling(x[:, 6:], gates[:, 6:], bias, **how)
        pieces = jnp.concatenate([first, second], axis=1)
        np.testing.assert_allclose(pieces, wanted[:, 10:], atol=TOLERANCE)


def test_wrong_blocks_are_refused_by_name():
    inputs = draw_inputs(mixer("hca"), 6)
    how = {"block_size": 2, "sliding_window": 3}
    cache = CompressedCache.empty(2, 2, 16, 8, capacity=4, **how)
    with pytest.raises(ValueError, match="block_size must be 2, that of the cache; got 3"):
        heavily_compressed_attention(*inputs, initial_state=cache, **how | {"block_size": 3})
    with pytest.raises(ValueError, match="holds 0 of 5 tokens and cannot take 6 more"):
        heavily_compressed_attention(*inputs, initial_state=cache, **how)
    inputs = draw_inputs(mixer("qsa"), 6)
    with pytest.raises(ValueError, match="selected_tokens must be a multiple of block_size 4"):
        qwen_sparse_attention(*inputs, block_size=4, selected_tokens=6)
    with pytest.raises(ValueError, match="series must be 1 or 2 and divide 3 channels; got 2"):
        block_pooling(jnp.ones((1, 4, 3)), block_size=2, series=2)
