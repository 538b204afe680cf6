"""Softmax attention with learned biases by distance, between short convolutions (Inkling-2)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step
from toolkit.attention._attend import positions_in_documents
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.short_convolution import short_convolution, tokens_before
from toolkit.looped.layers import linear, normalised, token_positions
from toolkit.looped.mixing.attention import AttentionSizes, check_head_counts
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer, Separate
from toolkit.looped.mixing.sparse.pooled import PooledCache

TINY = 1e-6
"""Added to lengths of vectors that are divided by."""


@dataclasses.dataclass(frozen=True)
class RelativeOptions(LayerOptions):
    """Options of "relative" layers.

    Attributes:
        heads: query heads (None: the model's).
        key_value_heads: heads of keys and values (None: as many as query heads).
        head_size: size of a head (None: width / heads).
        relative_size: channels of a head that weigh the profiles of biases.
        extent: distances with a bias, from 0; beyond them there is none.
        bound, relative_bound: the largest length of queries and keys, and of what weighs profiles.
        convolution_size: taps of the convolutions.
        scaling_start: place from which queries are scaled up.
        scaling_rate: by how much, times the logarithm of the place over `scaling_start`.
    """

    heads: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None
    relative_size: int = 16
    extent: int = 1024
    bound: float = 512**0.5
    relative_bound: float = 8.0
    convolution_size: int = 4
    scaling_start: int = 8192
    scaling_rate: float = 0.1

    @classmethod
    def tiny(cls) -> "RelativeOptions":
        """Fewer distances than a short text has, and places that are scaled."""
        return cls(relative_size=4, extent=8, scaling_start=16)


@dataclasses.dataclass(frozen=True)
class RelativeWindowOptions(RelativeOptions):
    """Options of "relative_window" layers: `RelativeOptions` and `sliding_window`, the tokens that
    a query sees and the distances with a bias. Nothing is scaled."""

    sliding_window: int = 64

    @classmethod
    def tiny(cls) -> "RelativeWindowOptions":
        """A window shorter than a short text."""
        return cls(relative_size=4, sliding_window=8)


class ScaledConvolution(nnx.Module):
    """y_t = (x_t + sum_i w_i x_{t-i}) / sqrt(terms): a short convolution that keeps the scale.

    Attributes:
        kernel: [taps, channels], the last row for the token itself.
        weights: the projection of a `read` to weights per token and head that are added to the
            kernel's, or None.
    """

    def __init__(self, channels: int, taps: int, rngs: nnx.Rngs, *, heads=None, width: int = 1):
        self.kernel, none = nnx.Param(jnp.zeros((taps, channels))), nnx.data(None)
        make: dict[str, Any] = {"dtype": jnp.dtype("float32"), "rngs": rngs, "std": width**-0.5}
        self.weights: Any = none if heads is None else linear(width, heads * taps, **make)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "batch time channels"], read: Any = None, **past: Any
    ) -> tuple[Float[Array, "batch time channels"], Array]:
        """The output, and the state with which the next tokens go on, in at least float32."""
        wide, (taps, _) = accumulator(x.dtype), self.kernel.shape
        own, terms = x.astype(wide), taps + 1
        y, state = short_convolution(own, self.kernel[...].astype(wide), **past)
        if self.weights is not None:
            earlier, _ = tokens_before(own, taps - 1, **past)
            # In the stream's own type where that is wider than the projection's.
            table = self.weights.kernel[...].astype(wide)
            weights = read.astype(wide) @ table
            weights = weights.reshape(*x.shape[:2], self.heads, 1, taps)
            for lag, tokens in enumerate((own, *earlier)):
                by_head = tokens.reshape(*x.shape[:2], self.heads, -1)
                y += (weights[..., lag] * by_head).reshape(x.shape)
            terms += taps
        return ((y + own) / math.sqrt(terms)).astype(x.dtype), state


class RelativeWindowLayer(MixingLayer):
    """Grouped-query attention to a window whose scores have a bias by distance.

        q = clip(s * x W_q);   k = clip(C(x W_k));   v = RMS(C(x W_v));   r = clip(t * x W_r)
        s = q . k_j / sqrt(K) + r . P_{i-j},   and a sink x W_s
        y = C((softmax_j(s) v * sigmoid(x W_g)) W_o)

    C are short convolutions (`ScaledConvolution`), P profiles of biases by distance, and clip
    shortens vectors that are longer than a bound. What the feed-forward layer of the block returns
    passes one more convolution, which is this layer's too, as its state is in this layer's cache.

    Source: Inkling-2, its modelling file in Hugging Face transformers ("inkling2_loop").
    """

    word: ClassVar[str] = "relative_window"
    mixer: ClassVar[str] = "window"
    Options: ClassVar[type[LayerOptions]] = RelativeWindowOptions
    follows_feed_forward: ClassVar[bool] = True
    is_dynamic: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, options = config.width, config.compute_dtype, self.options_of(config)
        heads, shared, size = self.sizes = self.sizes_of(config)
        extent = self.window_of(config) or options.extent
        taps, relative = options.convolution_size, options.relative_size

        def project(inputs: int, outputs: int, std: float = width**-0.5) -> nnx.Linear:
            return linear(inputs, outputs, dtype, rngs, std=std)

        self.query, self.relative = project(width, heads * size), project(width, heads * relative)
        self.key, self.value = project(width, shared * size), project(width, shared * size)
        self.output, self.gate = project(heads * size, width), project(width, heads * size, 0.0)
        self.sinks = project(width, heads, 0.0)
        self.query_scale = nnx.Param(jnp.ones((heads, size)))
        self.relative_scale = nnx.Param(jnp.ones((heads, relative)))
        self.profiles = nnx.Param(
            0.02 * nnx.initializers.normal(1.0)(rngs.params(), (relative, extent))
        )
        how: dict[str, Any] = {"heads": shared, "width": width} if self.is_dynamic else {}
        self.key_convolution = ScaledConvolution(shared * size, taps, rngs, **how)
        self.value_convolution = ScaledConvolution(shared * size, taps, rngs, **how)
        self.end_convolution = ScaledConvolution(width, taps, rngs)
        self.fed_convolution = ScaledConvolution(width, taps, rngs)
        self.options, self.sliding_window = options, self.window_of(config)
        self.dtype, self.epsilon = dtype, config.norm_epsilon

    @classmethod
    def window_of(cls, config: LayerConfig) -> int | None:
        return cls.options_of(config).sliding_window

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> AttentionSizes:
        """Head counts and head size from the options, or derived from the model's."""
        options = cls.options_of(config)
        heads = options.heads or config.heads
        size = options.head_size or config.width // heads
        return AttentionSizes(heads, options.key_value_heads or heads, size)

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options = cls.options_of(config)
        check_head_counts(cls.word, config, cls.sizes_of(config), options.head_size)
        for name in ("bound", "relative_bound"):
            if not getattr(options, name) > 0:
                raise ValueError(f"{cls.word}.{name} must be positive.")

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: Any = None
    ) -> Any:
        """Keys and values, and the last inputs of the convolutions."""
        _, shared, size = cls.sizes_of(config)
        past, dtype = cls.options_of(config).convolution_size - 1, config.compute_dtype
        room = cls.window_of(config) or capacity
        wide, heads = accumulator(dtype), {"key": shared * size, "value": shared * size}
        channels = heads | {"end": config.width, "fed": config.width}
        tails = {name: jnp.zeros((batch, past, count), wide) for name, count in channels.items()}
        return PooledCache(KVCache.empty(batch, shared, size, size, room, dtype), tails)

    def __call__(
        self, x: Float[Array, "batch time width"] | Separate, *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: PooledCache | None = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], PooledCache | None]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given."""
        return self._mix(_separate(x), segment_ids, cache, is_step=False)

    def step(
        self, x_t: Float[Array, "batch width"] | Separate, cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        x = Separate(*(part[:, None] for part in _separate(x_t)))
        out, cache = self._mix(x, None, cache, is_step=True)
        return out[:, 0], cache

    def after_feed_forward(
        self, fed: Float[Array, "... width"], cache: Any, segment_ids: Any = None
    ) -> tuple[Float[Array, "... width"], Any]:
        """What the block adds to its stream, of a sequence or of one token, and the cache."""
        is_step = fed.ndim == 2
        out, tail = self.fed_convolution(
            fed[:, None] if is_step else fed, **_past(cache, "fed", segment_ids)
        )
        return out[:, 0] if is_step else out, _with_tail(cache, fed=tail)

    def _mix(self, x, segment_ids, cache, *, is_step):
        options, (_, shared, size) = self.options, self.sizes
        batch, time = x.query.shape[:2]
        of_key, of_value = (_past(cache, name, segment_ids) for name in ("key", "value"))
        key, key_tail = self.key_convolution(self.key(x.key), x.key, **of_key)
        value, value_tail = self.value_convolution(self.value(x.value), x.value, **of_value)
        split = (batch, time, shared, size)
        k = _clipped(key.reshape(split), options.bound).astype(self.dtype)
        v = normalised(value.reshape(split), self.epsilon).astype(self.dtype)
        q = self._scaled(self.query(x.query), self.query_scale, options.bound)
        r = self._scaled(self.relative(x.query), self.relative_scale, options.relative_bound)
        if (factor := self._factor(batch, time, segment_ids, cache)) is not None:
            q, r = q * factor, r * factor
        profiles = self.profiles[...].astype(r.dtype)
        biases = {"relative_bias": r @ profiles, "sinks": self.sinks(x.query)}
        q = q.astype(self.dtype)
        how: dict[str, Any] = {"sliding_window": self.sliding_window}
        if is_step:
            q, k, v = (array[:, 0] for array in (q, k, v))
            biases = {name: array[:, 0] for name, array in biases.items()}
            out, state = softmax_attention_step(q, k, v, cache.state, **biases, **how)
        else:
            how |= {"segment_ids": segment_ids}
            state = None if cache is None else cache.state
            out, state = softmax_attention(q, k, v, initial_state=state, **biases, **how)
        gate = nnx.sigmoid(self.gate(x.query).astype(accumulator(self.dtype)))
        out = (out.reshape(gate.shape) * gate).astype(self.dtype)
        y, end = self.end_convolution(self.output(out), **_past(cache, "end", segment_ids))
        if cache is None:
            return y, None
        cache = PooledCache(state, cache.tail)
        return y, _with_tail(cache, key=key_tail, value=value_tail, end=end)

    def _scaled(self, x, scale, bound):
        """Heads times a learned scale, in at least float32, none longer than the bound."""
        x = x.reshape(*x.shape[:2], *scale.shape)
        wide = accumulator(x.dtype)
        return _clipped(x.astype(wide) * scale[...].astype(wide)[None, None], bound)

    def _factor(self, batch, time, segment_ids, cache):
        """What queries are multiplied by at their places [batch, time, 1, 1]; None for 1."""
        return None


class RelativeLayer(RelativeWindowLayer):
    """`RelativeWindowLayer` for all tokens, with weights of convolutions that follow from a token.

    Its queries and what weighs the profiles are scaled up with the logarithm of their place. In a
    block that attends to earlier groups of layers, queries, keys and values read each their own
    mean, through a norm of their own.
    """

    word: ClassVar[str] = "relative"
    mixer: ClassVar[str] = "full"
    Options: ClassVar[type[LayerOptions]] = RelativeOptions
    reads_separately: ClassVar[bool] = True
    is_dynamic: ClassVar[bool] = True

    @classmethod
    def window_of(cls, config: LayerConfig) -> int | None:
        return None

    def _factor(self, batch, time, segment_ids, cache):
        length = None if cache is None else cache.length
        if segment_ids is None:
            places = token_positions((batch, time), length, None)
        else:
            places = positions_in_documents(segment_ids, 0 if length is None else length)
        start, rate = self.options.scaling_start, self.options.scaling_rate
        wide = accumulator(self.dtype)
        beyond = jnp.maximum((places + 1).astype(wide) / start, 1)
        return (1 + rate * jnp.log(beyond))[..., None, None]


def _separate(x: Any) -> Separate:
    return x if isinstance(x, Separate) else Separate(x, x, x)


def _clipped(x: Float[Array, "... size"], bound: float) -> Float[Array, "... size"]:
    """Vectors shortened to a length of `bound`, in at least float32."""
    x = x.astype(accumulator(x.dtype))
    # Not a norm, which has no derivative at zero.
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + jnp.finfo(x.dtype).tiny)
    return x * jnp.minimum(bound / (length + TINY), 1)


def _past(cache: Any, name: str, segment_ids: Any) -> dict[str, Any]:
    tail = None if cache is None else cache.tail[name]
    return {"initial_state": tail, "segment_ids": segment_ids}


def _with_tail(cache: Any, **tails: Array) -> Any:
    return None if cache is None else PooledCache(cache.state, cache.tail | tails)
