r"""Stock kernels for softmax attention: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

They compute the same function of fewer arguments. What they do not have is refused in one line, so
that the mathematics never changes with the name. Numbers that are not finite are the exception: in
a key that no query sees, one may show.

Source: NVIDIA cuDNN, fused flash attention, through `jax.nn.dot_product_attention`; splash
attention, `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit.attention._attend import Window, bounded, run_numbers
from toolkit.attention.execution.derivatives import gradient_only, no_derivative
from toolkit.attention.execution.platforms import run_on
from toolkit.attention.softmax.scores import Options

STOCK = ("cudnn", "splash")
_TILES = (512, 256, 128)  # of splash attention; the widest that divides both lengths


def check_stock(
    name: str, q: Array, k: Array, v: Array, options: Options, window: Window, given: dict[str, Any]
) -> None:
    """Refuse what the kernel `name` does not have; `given` are the other arguments, by name."""
    has = {"cudnn": ("query_seq_lengths", "key_value_seq_lengths"), "splash": ("segment_ids",)}
    missing = [key for key, value in given.items() if value is not None and value is not False]
    missing = [argument for argument in missing if argument not in has[name]]
    if options.dropout_rate:
        missing.append("dropout_rate")
    if name == "cudnn" and options.logits_soft_cap is not None:
        missing.append("logits_soft_cap")
    if missing:
        _refuse(name, f"has no {missing[0]}")
    time, keys, (left, right) = q.shape[1], k.shape[1], window
    if not isinstance(time, int) or not isinstance(keys, int):
        _refuse(name, f"takes known numbers of tokens; got {time} and {keys}")
    if time != keys and (left, right) != (None, None):
        _refuse(name, f"takes causal queries and keys of one length; got {time} and {keys}")
    if name == "cudnn":
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            _refuse(name, f"takes bfloat16 and float16; got {q.dtype}")
        if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 256:
            sizes = f"{q.shape[3]} and {v.shape[3]}"
            _refuse(name, f"takes keys and values of one size, 8, 16 ... 256; got {sizes}")
        if right not in (None, 0) or (left is not None and right is None):
            _refuse(name, "has windows of causal attention alone")
        if (time % 2 or keys % 2) and (time != keys or right is None):
            _refuse(name, f"takes even numbers of tokens unless causal; got {time} and {keys}")
    elif q.dtype not in (jnp.bfloat16, jnp.float32):
        _refuse(name, f"takes bfloat16 and float32; got {q.dtype}")
    elif time % _TILES[-1] or keys % _TILES[-1]:
        _refuse(name, f"takes multiples of {_TILES[-1]} tokens; got {time} and {keys}")


def _refuse(name: str, why: str) -> None:
    raise ValueError(f'implementation="{name}" {why}; "blockwise" runs it.')


# Compiled as a whole, or an eager call would compile anew every time.
@partial(jax.jit, static_argnames=("name", "window", "options"))
def stock_attention(q, k, v, segment_ids, lengths, *, name, window: Window, options: Options):
    """Outputs of the kernel `name`; `lengths` are those of queries and of keys, or None."""
    if name == "cudnn":
        return _cudnn(q, k, v, *lengths, window=window, scale=options.scale)
    what = 'implementation="splash" needs a TPU'
    return run_on({"tpu": partial(_splash, window, options)}, q, k, v, segment_ids, otherwise=what)


def _cudnn(q, k, v, query_lengths, key_lengths, window: Window, scale: float) -> Array:
    q, k, v = gradient_only((q, k, v), "cudnn")
    time = q.shape[1]
    lengths = (query_lengths, time), (key_lengths, k.shape[1])
    query_lengths, key_lengths = (x if x is None else bounded(x, 0, most) for x, most in lengths)
    if time % 2:  # one more token at the end is seen by no other
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    try:
        return _cudnn_once((window, scale), q, k, v, query_lengths, key_lengths)[:, :time]
    except (RuntimeError, NotImplementedError) as error:  # jax asks the machine while it traces
        raise ValueError(f'implementation="cudnn" does not run here: {error}') from error


def _cudnn_kernel(how: tuple[Window, float], q, k, v, query_lengths, key_lengths) -> Array:
    (left, right), scale = how
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=right == 0, implementation="cudnn",
        query_seq_lengths=query_lengths, key_value_seq_lengths=key_lengths,
        local_window_size=None if left is None else (left, 0),
    )  # fmt: skip


def _cudnn_forward(how, q, k, v, *lengths):
    arrays = no_derivative("the gradient", (q, k, v), "cudnn")
    return jax.vjp(lambda *arrays: _cudnn_kernel(how, *arrays, *lengths), *arrays)


def _cudnn_backward(how, pullback, d_out):
    return *pullback(no_derivative("the gradient", d_out, "cudnn")), None, None


# Its gradient refuses to be differentiated in our words instead of jax's.
_cudnn_once = jax.custom_vjp(_cudnn_kernel, nondiff_argnums=(0,))
_cudnn_once.defvjp(_cudnn_forward, _cudnn_backward)


def _splash(window: Window, options: Options, q, k, v, segment_ids, interpret=False) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    time, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    tile = next(size for size in _TILES if time % size == 0 and keys % size == 0)
    sizes = splash.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile, block_q_dkv=tile, block_kv_dkv=tile,
        block_kv_dkv_compute=tile, block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    mask = splash.MultiHeadMask([_splash_mask(window, (time, keys))] * heads)
    kernel = splash.make_splash_mha(
        mask,
        block_sizes=sizes,
        attn_logits_soft_cap=options.logits_soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    segments = None
    if segment_ids is not None:
        numbers = run_numbers(segment_ids)
        segments = splash.SegmentIds(numbers, numbers)
    q = (q * options.scale).astype(q.dtype)
    out: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)), segments)
    return out.swapaxes(1, 2)


def _splash_mask(window: Window, shape: tuple[int, int]) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if window == (None, None):
        return splash.FullMask(shape)
    return splash.CausalMask(shape) if window == (None, 0) else splash.LocalMask(shape, window, 0)
