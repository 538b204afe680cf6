"""Softmax attention as a layer: rotary positions, grouped queries, all tokens or a window."""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step
from toolkit.looped.layers import linear, rotary_embedding, token_positions
from toolkit.looped.mixing.attention_options import AttentionOptions, WindowOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer, Separate
from toolkit.looped.mixing.sparse.sparse_memory import SparseMemory
from toolkit.looped.mixing.unwritten import UnwrittenCache
from toolkit.parallel.context.along import sequence_attention


class AttentionSizes(NamedTuple):
    """Head counts and head size of a softmax layer."""

    heads: int
    key_value_heads: int
    head_size: int


def check_head_counts(
    word: str, config: LayerConfig, sizes: AttentionSizes, head_size: int | None
) -> None:
    """Refuse heads that do not divide the width, or that their key heads do not divide."""
    heads, key_value_heads, _ = sizes
    if head_size is None and config.width % heads:
        raise ValueError(
            f"width {config.width} is not divisible by heads {heads}; change one of them or "
            f"give {word}.head_size."
        )
    if heads % key_value_heads:
        raise ValueError(
            f"heads {heads} is not a multiple of {word}.key_value_heads {key_value_heads}."
        )


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
        if (epsilon := options.plain_norm_epsilon) is not None:
            self.query_norm = self.key_norm = norm(size, epsilon=epsilon, use_scale=False)
        self.normalises_projection = options.projection_norm
        self.head_size = size
        self.rope_theta = options.rope_theta or config.rope_theta
        self.rotary_fraction = options.rotary_fraction
        self.rotary_scaling = options.rotary_scaling(self.rope_theta)
        self.sliding_window, self.longest = self.window_of(config), options.longest
        self.logits_soft_cap = options.logits_soft_cap
        scale = options.score_scale
        self.query_factor = 1.0 if scale is None else scale * size**0.5

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """An empty cache for `capacity` tokens, or for the window if that is shorter."""
        _, key_value_heads, size = cls.sizes_of(config)
        cls._check_length(capacity, cls.options_of(config).longest)
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
        options, sizes = cls.options_of(config), cls.sizes_of(config)
        check_head_counts(cls.word, config, sizes, options.head_size)
        head_size = sizes.head_size
        norms = ("query_key_norm", "plain_norm_epsilon", "projection_norm")
        norms = [name for name in norms if getattr(options, name)]
        if len(norms) > 1:
            raise ValueError(
                f"{cls.word}.{norms[0]} and {cls.word}.{norms[1]} exclude each other; turn one of "
                "them off."
            )
        for name in ("sinks", "score_scale", "logits_soft_cap"):
            if getattr(options, name) and cls._mix is not AttentionLayer._mix:
                raise ValueError(
                    f'{cls.word}.{name}: only "full", "window" and "nope" layers have it.'
                )
        for name in ("score_scale", "logits_soft_cap", "rope_theta", "plain_norm_epsilon"):
            number = getattr(options, name)
            if number is not None and not number > 0:
                raise ValueError(f"{cls.word}.{name} is {number!r}; it must be positive.")
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
            scaling = options.rotary_scaling(options.rope_theta or config.rope_theta)
            if scaling is not None:
                half = round(options.rotary_fraction * head_size) // 2
                jax.eval_shape(scaling, jax.ShapeDtypeStruct((half,), jnp.float32))
        except ValueError as error:
            raise ValueError(f"{cls.word}: {error}") from None

    @classmethod
    def _check_length(cls, tokens: int, longest: int | None) -> None:
        if longest is not None and tokens > longest:
            raise ValueError(
                f"{tokens} tokens are more than {cls.word}.longest {longest}: the rotary positions "
                "of this model are known for shorter texts only."
            )

    def __call__(
        self, x: Float[Array, "batch time width"] | Separate, *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
        window: int | None = None, positions: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given.

        `window` replaces the layer's own window, for models whose loops differ in windows, and
        `positions` those that follow from the place in the sequence.
        """
        length, (batch, time) = None if cache is None else cache.length, _query(x).shape[:2]
        self._check_length(time, self.longest)
        if positions is None:
            positions = token_positions((batch, time), length, segment_ids)
        past = {"segment_ids": segment_ids, "initial_state": cache}
        out, cache = self._mix(x, positions, window, past)
        return self._finish(_query(x), out), cache

    def step(
        self, x_t: Float[Array, "batch width"] | Separate, cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        out_t, cache = self._mix_step(x_t, cache, window)
        return self._finish(_query(x_t), out_t), cache

    def rows(
        self, x: Float[Array, "batch time width"], lo: int, *, window: int | None = None
    ) -> Float[Array, "batch rows width"]:
        """The outputs from token `lo` on, without the queries and scores of those before."""
        positions = token_positions(x.shape[:2], None, None)
        q, _, _ = self._project(x[:, lo:], positions[:, lo:])
        _, k, v = self._project(x, positions)
        out, _ = softmax_attention(q, k, v, query_offset=lo, **self._how(window))
        return self._finish(x[:, lo:], out)

    def _mix(self, x, positions, window, past):
        return sequence_attention(*self._project(x, positions), **self._how(window), **past)

    def _mix_step(self, x_t, cache, window):
        inputs = self._project(x_t, cache.length)
        if isinstance(cache, SparseMemory):
            return cache.step(*inputs)
        if isinstance(cache, UnwrittenCache):
            return cache.step(*inputs, **self._how(window))
        return softmax_attention_step(*inputs, cache, **self._how(window))

    def _how(self, window):
        """Keywords of the softmax."""
        return {
            "sliding_window": window or self.sliding_window,
            "sinks": None if self.sinks is None else self.sinks[...],
            "logits_soft_cap": self.logits_soft_cap,
        }

    def _project(self, x, positions):
        of = x if isinstance(x, Separate) else Separate(x, x, x)
        split = (*of.query.shape[:-1], -1, self.head_size)
        q, k, v = self.query(of.query), self.key(of.key), self.value(of.value)
        if self.normalises_projection:
            q, k = self._normalised(q, k)
        q, k, v = (heads.reshape(split) for heads in (q, k, v))
        if not self.normalises_projection:
            q, k = self._normalised(q, k)
        q = self.turn(q, positions)
        q = q if self.query_factor == 1 else q * jnp.asarray(self.query_factor, q.dtype)
        return q, self.turn(k, positions), v

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


def _query(x: Any) -> Array:
    return x.query if isinstance(x, Separate) else x


class WindowLayer(AttentionLayer):
    """`AttentionLayer` whose queries see the last `sliding_window` tokens, themselves included.

    Source: Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1.
    """

    word: ClassVar[str] = "window"
    Options: ClassVar[type[LayerOptions]] = WindowOptions

    @classmethod
    def window_of(cls, config: LayerConfig) -> int:
        return cls.options_of(config).sliding_window


class UnrotatedLayer(AttentionLayer):
    """`AttentionLayer` without positions, for patterns such as "full full full nope".

    Its options are those of "full" layers; what they say of rotary positions is not used.

    Source: Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization in
        Transformers", 2023; Yang et al., "RoPE to NoPE and Back Again", 2025, arXiv:2501.18795.
    """

    word: ClassVar[str] = "nope"
    mixer: ClassVar[str] = "full"

    def turn(self, x: Float[Array, "... heads size"], positions: Int[Array, "..."]) -> Array:
        return x
