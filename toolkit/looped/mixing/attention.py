"""Softmax attention as a layer: rotary positions, grouped queries, all tokens or a window."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step
from toolkit.attention.latent import Yarn
from toolkit.looped.layers import (
    RotaryScaling,
    YarnScaling,
    linear,
    rotary_embedding,
    token_positions,
)
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer
from toolkit.looped.mixing.sparse.sparse_memory import SparseMemory
from toolkit.parallel.context.along import sequence_attention


@dataclasses.dataclass(frozen=True)
class AttentionOptions(LayerOptions):
    """Options of softmax layers.

    Attributes:
        key_value_heads: heads of keys and values (None: as many as the model's `heads`).
        head_size: size of a head (None: width / heads).
        query_key_norm: RMSNorm of every query and key head before the rotary embedding.
        projection_norm: the same RMSNorm over all heads at once, as in OLMoE.
        projection_biases: biases of the projections to queries, keys and values, as in Qwen2.
        rotary_fraction: share of a head's channels, the first ones, that the rotary embedding
            turns.
        rotary_factor: the divisor of slow rotary frequencies, see `RotaryScaling`; None: no
            scaling.
        rotary_low, rotary_high: likewise, `low` and `high`.
        rotary_original_length: likewise, `original_length`.
        rotary_rule: what these four numbers mean: "llama3", or "yarn", where `rotary_low` and
            `rotary_high` are its beta_slow and beta_fast.
        rotary_truncate: see `toolkit.attention.latent.Yarn`.
        sinks: learn a score per head of a key without a value, as in gpt-oss.
        output_bias: add a bias to the projection back.
        output_gate: gate the heads' outputs by sigmoid(x W_g), zero-initialised.
        quantised_cache: store keys and values in int8, as a quantised `KVCache` does;
            `attention.quantisation_error` measures the error.
    """

    key_value_heads: int | None = None
    head_size: int | None = None
    query_key_norm: bool = False
    projection_norm: bool = False
    projection_biases: bool = False
    rotary_fraction: float = 1.0
    rotary_factor: float | None = None
    rotary_low: float = 1.0
    rotary_high: float = 4.0
    rotary_original_length: int = 8192
    rotary_rule: Literal["llama3", "yarn"] = "llama3"
    rotary_truncate: bool = True
    sinks: bool = False
    output_bias: bool = False
    output_gate: bool = False
    quantised_cache: bool = False

    @property
    def yarn(self) -> Yarn | None:
        """YaRN, or None where rotary wavelengths are not stretched by it."""
        if self.rotary_factor is None or self.rotary_rule != "yarn":
            return None
        return Yarn(
            factor=self.rotary_factor,
            original_length=self.rotary_original_length,
            beta_fast=self.rotary_high,
            beta_slow=self.rotary_low,
            truncate=self.rotary_truncate,
        )

    def rotary_scaling(self, theta: float) -> RotaryScaling | YarnScaling | None:
        """The stretch of rotary wavelengths of base `theta`, or None."""
        if self.rotary_factor is None:
            return None
        if self.yarn is not None:
            return YarnScaling(self.yarn, theta)
        turns = self.rotary_low, self.rotary_high
        return RotaryScaling(self.rotary_factor, *turns, self.rotary_original_length)


@dataclasses.dataclass(frozen=True)
class WindowOptions(AttentionOptions):
    """Options of "window" layers: `AttentionOptions` and `sliding_window`, the tokens a query sees,
    its own included."""

    sliding_window: int = 64


class AttentionSizes(NamedTuple):
    """Head counts and head size of a softmax layer."""

    heads: int
    key_value_heads: int
    head_size: int


class AttentionLayer(MixingLayer):
    """Causal grouped-query softmax attention with rotary positions.

    q, k = rope(x W_q), rope(x W_k); v = x W_v; y = (softmax(q k^T / sqrt(K)) v) W_o, with the
    optional gate sigmoid(x W_g) on the heads' outputs (zero-initialised: 1/2 at the start) and the
    optional RMSNorm of each head of q and k before the rotary embedding.

    Source: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); LT2 (output gate); Henry et
        al., "Query-Key Normalization", 2020, as in Qwen3.
    """

    word: ClassVar[str] = "full"
    Options: ClassVar[type[LayerOptions]] = AttentionOptions
    starts_from_attention: ClassVar[bool] = True
    can_cut_time: ClassVar[bool] = True
    has_rows: ClassVar[bool] = True

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, key_value_heads, size = self.sizes_of(config)
        options = self.options_of(config)
        project = functools.partial(linear, width, dtype=dtype, rngs=rngs, std=std)
        project = functools.partial(project, has_bias=options.projection_biases)
        self.query = project(heads * size)
        self.key = project(key_value_heads * size)
        self.value = project(key_value_heads * size)
        has_bias = options.output_bias
        self.output = linear(heads * size, width, dtype, rngs, std=std, has_bias=has_bias)
        self.sinks = nnx.Param(jnp.zeros(heads)) if options.sinks else nnx.data(None)
        self.gate = (
            linear(width, heads * size, dtype, rngs, std=0.0)
            if options.output_gate
            else nnx.data(None)
        )
        norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.query_norm, self.key_norm = nnx.data(None), nnx.data(None)
        if options.query_key_norm:
            self.query_norm, self.key_norm = norm(size), norm(size)
        if options.projection_norm:
            self.query_norm, self.key_norm = norm(heads * size), norm(key_value_heads * size)
        self.normalises_projection = options.projection_norm
        self.head_size = size
        self.rope_theta, self.rotary_fraction = config.rope_theta, options.rotary_fraction
        self.rotary_scaling = options.rotary_scaling(config.rope_theta)
        self.sliding_window = self.window_of(config)

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """An empty cache for `capacity` tokens, or for the window if that is shorter."""
        _, key_value_heads, size = cls.sizes_of(config)
        room = window or cls.window_of(config) or capacity
        sizes = batch, key_value_heads, size, size, room, config.compute_dtype
        return KVCache.empty(*sizes, is_quantised=cls.options_of(config).quantised_cache)

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> AttentionSizes:
        """Head counts and head size from the options, or derived from the model's."""
        options = cls.options_of(config)
        return AttentionSizes(
            config.heads,
            options.key_value_heads or config.heads,
            options.head_size or config.width // config.heads,
        )

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options, (heads, key_value_heads, head_size) = cls.options_of(config), cls.sizes_of(config)
        if options.head_size is None and config.width % heads:
            raise ValueError(
                f"width {config.width} is not divisible by heads {heads}; change one of them or "
                f"give {cls.word}.head_size."
            )
        if heads % key_value_heads:
            raise ValueError(
                f"heads {heads} is not a multiple of {cls.word}.key_value_heads {key_value_heads}."
            )
        if options.query_key_norm and options.projection_norm:
            raise ValueError(
                f"{cls.word}.query_key_norm and {cls.word}.projection_norm exclude each other; "
                "turn one of them off."
            )
        if options.sinks and cls._mix is not AttentionLayer._mix:
            raise ValueError(f'{cls.word}.sinks: only "full" and "window" layers have sinks.')
        if head_size % 2:
            raise ValueError(
                f"{cls.word}.head_size is {head_size}; it must be even, since rotary embeddings "
                "turn pairs of channels."
            )
        if not 0 < options.rotary_fraction <= 1 or (options.rotary_fraction * head_size) % 2:
            raise ValueError(
                f"{cls.word}.rotary_fraction is {options.rotary_fraction!r}; it must lie in (0, 1] "
                f"and turn an even number of the {head_size} channels of a head."
            )
        try:
            options.rotary_scaling(config.rope_theta)
        except ValueError as error:
            raise ValueError(f"{cls.word}: {error}") from None

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: Any = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """Mix a sequence, after the tokens of a cache if one is given.

        `window` replaces the layer's own window, for models whose loops differ in windows.
        """
        length = None if cache is None else cache.length
        positions = token_positions(x.shape[:2], length, segment_ids)
        past = {"segment_ids": segment_ids, "initial_state": cache}
        out, cache = self._mix(x, positions, window, past)
        return self._finish(x, out), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        out_t, cache = self._mix_step(x_t, cache, window)
        return self._finish(x_t, out_t), cache

    def rows(
        self, x: Float[Array, "batch time width"], lo: int, *, window: int | None = None
    ) -> Float[Array, "batch rows width"]:
        """The outputs from token `lo` on, without the queries and scores of those before."""
        positions = token_positions(x.shape[:2], None, None)
        q, _, _ = self._project(x[:, lo:], positions[:, lo:])
        _, k, v = self._project(x, positions)
        seen = window or self.sliding_window
        how = {"query_offset": lo, "sliding_window": seen, "sinks": self._sinks()}
        out, _ = softmax_attention(q, k, v, **how)
        return self._finish(x[:, lo:], out)

    def _mix(self, x, positions, window, past):
        seen = window or self.sliding_window
        how = {"sliding_window": seen, "sinks": self._sinks(), **past}
        return sequence_attention(*self._project(x, positions), **how)

    def _mix_step(self, x_t, cache, window):
        inputs = self._project(x_t, cache.length)
        if isinstance(cache, SparseMemory):
            return cache.step(*inputs)
        seen = window or self.sliding_window
        return softmax_attention_step(*inputs, cache, sliding_window=seen, sinks=self._sinks())

    def _sinks(self):
        return None if self.sinks is None else self.sinks[...]

    def _project(self, x, positions):
        split = (*x.shape[:-1], -1, self.head_size)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.normalises_projection:
            q, k = self._normalised(q, k)
        q, k, v = (heads.reshape(split) for heads in (q, k, v))
        if not self.normalises_projection:
            q, k = self._normalised(q, k)
        return self.turn(q, positions), self.turn(k, positions), v

    def _normalised(self, q, k):
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def turn(self, x: Float[Array, "... heads size"], positions: Int[Array, "..."]) -> Array:
        """Queries or keys with the rotary embedding applied."""
        rotation = {"fraction": self.rotary_fraction, "scaling": self.rotary_scaling}
        return rotary_embedding(x, positions, theta=self.rope_theta, **rotation)

    def _finish(self, x, out):
        out = out.reshape(*x.shape[:-1], -1)
        if self.gate is not None:
            out *= jax.nn.sigmoid(self.gate(x))
        return self.output(out)


class WindowLayer(AttentionLayer):
    """`AttentionLayer` whose queries see the last `sliding_window` tokens, themselves included.

    Source: Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1.
    """

    word: ClassVar[str] = "window"
    Options: ClassVar[type[LayerOptions]] = WindowOptions

    @classmethod
    def window_of(cls, config: LayerConfig) -> int:
        return cls.options_of(config).sliding_window
