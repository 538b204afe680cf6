"""Backward passes that process a sequence piece by piece: exact, with one piece in memory.

The gradient of a function whose output has rows (one per token) is the sum over pieces of rows:

    dL/dW = sum_i (d out_i / d W)^T dL/d out_i,        the same for the input

So a layer keeps only its input, and its backward pass recomputes and differentiates one piece of
its output at a time. Recomputation costs as many FLOPs as with `jax.checkpoint`, except that a
piece of causal attention reads no key beyond its end, which saves half of the scores.

Source: Luo et al., "StreamBP: Memory-efficient exact backpropagation for long sequence training of
LLMs", 2025 (arXiv:2506.03077).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from toolkit._checks import checked

MOST_CHUNKS = 1024


@checked
def stream_backward(rows: Callable[..., Array], *, chunks: int) -> Callable[[Any, Array], Array]:
    """Make a causal layer whose backward pass holds the intermediates of one chunk of tokens.

        out[lo:hi] = rows(params, x[:hi], lo)                    lo, hi: the ends of each chunk
        d params = sum over chunks of d rows / d params,   d x[:hi] += d rows / d x[:hi]

    Args:
        rows: (params, x[batch, hi, width], lo) -> out[batch, hi - lo, width], rows lo..hi of the
            layer's output from the first hi rows of its input; lo is a Python int. For a layer
            without a token mixer that is `f(params, x[:, lo:])`. Other inputs (segment ids, whole)
            belong in params.
        chunks: number of parts of the sequence, as equal as possible.

    Returns:
        (params, x[batch, time, width]) -> out[batch, time, width], a replacement for the layer with
        derivatives in reverse mode.

    Cost: Keeps params and x. The backward pass computes each row again: forward and backward cost
        of the layer as `rows` computes it, with a sum of gradients per chunk. One program text per
        chunk: compile time grows with their number.

    Source: Luo et al., StreamBP, 2025, section 3.

    Example:
        >>> causal_sum = lambda w, x, lo: jnp.cumsum(w * x, axis=1)[:, lo:]
        >>> layer = stream_backward(causal_sum, chunks=2)
        >>> jax.grad(lambda w: layer(w, jnp.ones((1, 4, 1))).sum())(2.0).tolist()
        10.0
    """
    if not 1 <= chunks <= MOST_CHUNKS:
        raise ValueError(f"chunks: got {chunks}, wanted 1 to {MOST_CHUNKS}")

    def piece(params: Any, prefix: Array, lo: int) -> Array:
        out = rows(params, prefix, lo)
        if out.ndim < 2 or out.shape[1] != prefix.shape[1] - lo:
            raise ValueError(
                f"rows: returned shape {out.shape} for rows {lo} to {prefix.shape[1]}, wanted "
                f"{prefix.shape[1] - lo} rows in axis 1"
            )
        return out

    @jax.custom_vjp
    def layer(params: Any, x: Array) -> Array:
        outs = []
        for lo, hi in _pieces(x, chunks):
            outs.append(piece(params, x[:, :hi], lo))
            # Without it XLA may compute all chunks at once and hold the intermediates of each.
            params, x, outs = jax.lax.optimization_barrier((params, x, outs))
        return jnp.concatenate(outs, axis=1)

    def forward(params: Any, x: Array) -> tuple[Array, tuple[Any, Array]]:
        return layer(params, x), (params, x)

    def backward(kept: tuple[Any, Array], gradient: Array) -> tuple[Any, Array]:
        params, x = kept
        sums = jax.tree.map(_zeros, params)
        dx = _zeros(x)
        for lo, hi in _pieces(x, chunks):
            _, pull = jax.vjp(lambda p, prefix, lo=lo: piece(p, prefix, lo), params, x[:, :hi])
            of_params, of_prefix = pull(gradient[:, lo:hi])
            sums = jax.tree.map(_plus, sums, of_params)
            dx = dx.at[:, :hi].add(of_prefix.astype(dx.dtype))
            params, x, gradient, sums, dx = _barrier((params, x, gradient, sums, dx))
        return jax.tree.map(_as_gradient_of, params, sums), dx.astype(x.dtype)

    layer.defvjp(forward, backward)
    return layer


@checked
def streamed_loss(
    hidden: Float[Array, "batch time width"], table: Float[Array, "vocabulary width"],
    targets: Int[Array, "batch time"], *,
    chunks: int,
) -> Float[Array, ""]:  # fmt: skip
    """Mean cross-entropy of the next token, with the logits of one chunk of tokens in memory.

        loss = -mean_{b,t} log softmax(hidden[b, t] table^T)[target[b, t]]

    Args:
        hidden: the head's input.
        table: one row per token of the vocabulary.
        targets: the tokens to predict; negative ones do not count.
        chunks: number of parts of the sequence, a divisor of time.

    Returns:
        Nats per token, float32; NaN if no target counts, or one is beyond the vocabulary.

    Cost: 2 * batch * time * width * vocabulary FLOPs, three times as many again for the gradient
        (logits are computed twice); batch * time / chunks * vocabulary float32 at a time.

    Source: Luo et al., StreamBP, 2025, section 3.

    Example:
        >>> targets = jnp.zeros((1, 4), int)
        >>> loss = streamed_loss(jnp.ones((1, 4, 2)), jnp.ones((8, 2)), targets, chunks=2)
        >>> bool(jnp.allclose(loss, jnp.log(8)))
        True
    """
    if 0 in hidden.shape or 0 in table.shape:
        name, array = ("hidden", hidden) if 0 in hidden.shape else ("table", table)
        raise ValueError(f"{name}: got an empty one, of shape {array.shape}")
    batch, time, width = hidden.shape
    if not 1 <= chunks <= MOST_CHUNKS or time % chunks:
        raise ValueError(
            f"chunks: got {chunks} for {time} tokens, wanted a divisor of those, 1 to {MOST_CHUNKS}"
        )
    if targets.shape != (batch, time):
        raise ValueError(f"targets: got shape {targets.shape}, wanted {(batch, time)}")
    if table.shape[1] != width:
        raise ValueError(f"table: got shape {table.shape}, wanted (vocabulary, {width})")

    @jax.checkpoint
    def sum_of(part: tuple[Array, Array]) -> Array:
        rows, wanted = part
        logits = jnp.einsum("btd,vd->btv", rows, table, preferred_element_type=jnp.float32)
        counts = wanted >= 0
        chosen = jnp.take_along_axis(
            logits, jnp.where(counts, wanted, 0)[..., None], axis=-1, mode="fill"
        )[..., 0]
        return jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0).sum()

    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        return total + sum_of(part), None

    cut = jax.tree.map(
        lambda leaf: jnp.moveaxis(
            leaf.reshape(batch, chunks, time // chunks, *leaf.shape[2:]), 1, 0
        ),
        (hidden, targets),
    )
    total, _ = jax.lax.scan(add, jnp.float32(0), cut)
    return total / (targets >= 0).sum().astype(jnp.float32)


def _pieces(x: Array, chunks: int) -> list[tuple[int, int]]:
    if x.ndim != 3 or x.shape[1] < chunks:
        raise ValueError(
            f"x: got shape {x.shape}, wanted [batch, time, width] with at least {chunks} tokens"
        )
    ends = [x.shape[1] * index // chunks for index in range(chunks + 1)]
    return list(itertools.pairwise(ends))


def _zeros(leaf: Any) -> Any:
    """Zeros to sum gradients in: at least float32, and nothing for whole numbers."""
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _plus(total: Any, part: Any) -> Any:
    return total if total.dtype == jax.dtypes.float0 else total + part.astype(total.dtype)


def _as_gradient_of(leaf: Any, total: Any) -> Any:
    is_none = total.dtype == jax.dtypes.float0
    return total if is_none else total.astype(jnp.asarray(leaf).dtype)


def _barrier(tree: Any) -> Any:
    """Order the chunks; gradients of whole numbers are not arrays to XLA."""
    leaves, structure = jax.tree.flatten(tree)
    real = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    real_leaves = iter(jax.lax.optimization_barrier(real))
    leaves = [leaf if leaf.dtype == jax.dtypes.float0 else next(real_leaves) for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)
