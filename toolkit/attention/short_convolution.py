"""Short causal convolution over a few tokens, and the token before, for layers around a mixer.

Both respect the borders of packed documents, and both continue a sequence from its *state*, the
last inputs before the next one.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._annotations import SameDtype
from toolkit._checks import checked
from toolkit.attention._attend import run_numbers
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.derivatives import differentiable

_ALIKE = SameDtype("x and kernel")


@checked
@compiled
def short_convolution(
    x: Annotated[Float[Array, "batch time channels"], _ALIKE],
    kernel: Annotated[Float[Array, "taps channels"], _ALIKE],
    bias: Float[Array, "channels"] | None = None,
    *,
    initial_state: Float[Array, "batch past channels"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch past channels"]]:
    """Depthwise causal convolution over a few tokens.

        y_t = bias + sum_i kernel_i x_(t - taps + 1 + i)

    Written as `taps` shifted products, which every backend fuses into one pass (XLA's grouped
    convolution is far slower on CPU) and which can respect document borders.

    Args:
        x: [batch, time, channels].
        kernel: [taps, channels]; the last row multiplies the current token.
        bias: [channels], none if None.
        initial_state: [batch, taps - 1, channels], the inputs before the first; zeros if None.
        segment_ids: [batch, time] document of each token; equal numbers in a row are one document,
            and a token sees its own. The initial state belongs to the first, the final state to
            the last.

    Returns:
        Outputs like x, and the state with which the next piece continues: the last taps - 1 inputs
        of the last document.

    Cost:
        2 taps FLOPs per number, backward twice that.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.4.

    Example:
        >>> x, kernel = jnp.arange(4.0).reshape(1, 4, 1), jnp.asarray([[10.0], [1.0]])
        >>> y, state = short_convolution(x, kernel)
        >>> y[0, :, 0].tolist(), state.tolist()
        ([0.0, 1.0, 12.0, 23.0], [[[3.0]]])
    """
    taps = kernel.shape[0]
    if initial_state is not None and initial_state.shape[1] != taps - 1:
        raise ValueError(
            f"the state must hold {taps - 1} inputs, one fewer than the kernel has taps; "
            f"got {initial_state.shape[1]}."
        )
    if segment_ids is None:
        padded = _after(initial_state, x, taps - 1)
        # Zeros that vary like both: a hand-written gradient needs one set of `shard_map` axes.
        zero = jnp.zeros_like(padded, shape=()) + jnp.zeros_like(kernel, shape=())
        (y,) = _convolve((padded + zero, kernel + zero), ())
        state = _last(padded, taps - 1, None)
    else:
        how = {"initial_state": initial_state, "segment_ids": segment_ids}
        past, state = tokens_before(x, taps - 1, **how)
        y = x * kernel[-1, None, None]
        for lag, earlier in enumerate(past, start=1):
            y += earlier * kernel[-1 - lag, None, None]
    return y if bias is None else y + bias[None, None], state


@checked
@compiled
def short_convolution_step(
    x_t: Annotated[Float[Array, "batch channels"], _ALIKE],
    kernel: Annotated[Float[Array, "taps channels"], _ALIKE],
    state: Float[Array, "batch past channels"],
    bias: Float[Array, "channels"] | None = None,
) -> tuple[Float[Array, "batch channels"], Float[Array, "batch past channels"]]:
    """Convolve one token.

        y_t = bias + sum_i kernel_i x_(t - taps + 1 + i)

    Arguments as `short_convolution`, without the time axis; `state` as it returns it.

    Example:
        >>> x_t, kernel = jnp.asarray([[4.0]]), jnp.asarray([[10.0], [1.0]])
        >>> y_t, state = short_convolution_step(x_t, kernel, jnp.asarray([[[3.0]]]))
        >>> y_t.tolist(), state.tolist()
        ([[34.0]], [[[4.0]]])
    """
    y, state = short_convolution(x_t[:, None], kernel, bias, initial_state=state)
    return y[:, 0], state


def token_before(
    x: Float[Array, "batch time channels"],
    *,
    initial_state: Float[Array, "batch 1 channels"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch 1 channels"]]:
    """RWKV's token shift, x_{t-1} at every t or zero before a document, and the new state."""
    (past,), state = tokens_before(x, 1, initial_state=initial_state, segment_ids=segment_ids)
    return past, state


def tokens_before(
    x: Float[Array, "batch time channels"],
    count: int,
    *,
    initial_state: Float[Array, "batch past channels"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[list[Float[Array, "batch time channels"]], Float[Array, "batch past channels"]]:
    """x_{t-1}, ..., x_{t-count} at every t, zero before a document, and the new state."""
    padded, time = _after(initial_state, x, count), x.shape[1]
    past = [padded[:, count - lag :][:, :time] for lag in range(1, count + 1)]
    if segment_ids is not None:
        segment_ids = run_numbers(segment_ids)
        past = [_same_document(x, segment_ids, lag) for lag, x in enumerate(past, start=1)]
    return past, _last(padded, count, segment_ids)


def _after(state, x, past):
    if state is None:
        state = jnp.zeros((x.shape[0], past, x.shape[2]), x.dtype)
    return jnp.concatenate([state, x], axis=1)


def _same_document(past, segment_ids, lag):
    """`past`, the inputs of `lag` tokens ago, where they belong to the same document.

    What came before the sequence belongs to its first document.
    """
    time = segment_ids.shape[1]
    theirs = jnp.pad(segment_ids, ((0, 0), (lag, 0)), mode="edge")[:, :time]
    return jnp.where((theirs == segment_ids)[..., None], past, 0)


def _last(padded, past, segment_ids):
    """The last `past` inputs, with zeros for those that are not of the last document."""
    state = padded[:, padded.shape[1] - past :]
    if segment_ids is None or past == 0:
        return state
    theirs = jnp.pad(segment_ids, ((0, 0), (past, 0)), mode="edge")[:, -past:]
    return jnp.where((theirs == segment_ids[:, -1:])[..., None], state, 0)


def _shifts(inputs):
    """The window of padded tokens that each tap of the kernel multiplies, and its weights."""
    padded, kernel = inputs
    taps = kernel.shape[0]
    time = padded.shape[1] - taps + 1
    return [(padded[:, i : i + time], kernel[i, None, None]) for i in range(taps)]


def _shifted_products(inputs, _=()):
    """y_t = sum_i w_i x_{t + i}."""
    y, *rest = (past * weight for past, weight in _shifts(inputs))
    return (sum(rest, y),)


def _shifted_products_backward(_, inputs, context, d_outputs, is_wanted):
    """The same sum with the taps reversed; derived by JAX, it would be one padded array per tap."""
    (d_y,), (_, kernel) = d_outputs, inputs
    reach = kernel.shape[0] - 1
    (d_padded,) = _shifted_products((jnp.pad(d_y, ((0, 0), (reach, reach), (0, 0))), kernel[::-1]))
    d_kernel = [jnp.sum(d_y * past, axis=(0, 1)) for past, _ in _shifts(inputs)]
    # Without the barrier XLA sums the taps inside the transposition its next product asks for.
    return jax.lax.optimization_barrier(d_padded), jnp.stack(d_kernel)


_convolve = differentiable(_shifted_products, _shifted_products_backward, _shifted_products)
