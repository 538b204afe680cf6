"""Multi-head latent attention as a layer, with whole or sliced latents (TPLA)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention.latent import (
    LatentCache,
    LatentConfig,
    LatentSlices,
    LatentWeights,
    Yarn,
    mla_step,
    slice_latents,
    tpla,
    tpla_step,
)
from toolkit.attention.latent.tpla import Norm
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer
from toolkit.parallel.context.along import check_word, sequence_latents


@dataclasses.dataclass(frozen=True)
class LatentOptions(LayerOptions):
    """Options of all layers with latents, as `toolkit.attention.latent.LatentConfig` has them.

    Attributes:
        latent_size: numbers per token that all heads share.
        key_size: size of a head's query and key without position.
        rope_size: size of the rotary key that all heads share.
        value_size: size of a head's value.
        query_latent_size: size of the latent that makes the queries; None makes them from the
            residual stream.
        latent_epsilon: `norm_epsilon` of the norms of latents (None: the model's).
        rotary: whether the rotary channels turn; Kimi Linear leaves them as they are.
        yarn_factor: factor by which the context was extended, or None; this and the following are
            fields of `toolkit.attention.latent.Yarn`.
        yarn_original_length, yarn_beta_fast, yarn_beta_slow: see `yarn_factor`.
        yarn_mscale, yarn_mscale_all_dim, yarn_truncate: see `yarn_factor`.
    """

    latent_size: int = 512
    key_size: int = 128
    rope_size: int = 64
    value_size: int = 128
    query_latent_size: int | None = None
    latent_epsilon: float | None = None
    rotary: bool = True
    yarn_factor: float | None = None
    yarn_original_length: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 1.0
    yarn_truncate: bool = True

    @classmethod
    def tiny(cls) -> "LatentOptions":
        """A latent half as wide as a tiny model's residual stream."""
        return cls(latent_size=64, key_size=32, rope_size=16, value_size=32)


@dataclasses.dataclass(frozen=True)
class MLAOptions(LatentOptions):
    """Options of "mla" layers: those of `LatentOptions`, and:

    Attributes:
        slices: slices of the latents in decoding, with one softmax each; 1 is exact.
        slices_prompt: use the slices in prompts and training too.
        exact_norm: every slice knows the norm of the whole latent; otherwise it estimates the norm
            from its own features, assuming equal shares of the energy unless `with_slices` measured
            them.
    """

    slices: int = 1
    slices_prompt: bool = False
    exact_norm: bool = True


class LatentLayer(MixingLayer):
    """The projections of a layer with latents, and its cache of latents and rotary keys."""

    Options: ClassVar[type[LayerOptions]] = LatentOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        sizes, dtype = self.sizes_of(config), config.compute_dtype

        def project(inputs: int, outputs: int) -> nnx.Linear:
            return linear(inputs, outputs, dtype, rngs, std=inputs**-0.5)

        def norm(size: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(size, epsilon=sizes.epsilon, dtype=dtype, rngs=rngs)

        query, heads, latent = sizes.query_latent_size, sizes.heads, sizes.latent_size
        has_latent = query is not None
        self.query_down = project(sizes.width, query) if has_latent else nnx.data(None)
        self.query_norm = norm(query) if has_latent else nnx.data(None)
        self.query_up = project(query or sizes.width, heads * (sizes.key_size + sizes.rope_size))
        self.latent_down = project(sizes.width, latent)
        self.rope_key = project(sizes.width, sizes.rope_size)
        self.latent_norm = norm(latent)
        softmaxes, read = self.softmaxes(config)
        self.key_up = project(read, softmaxes * sizes.key_size)
        self.value_up = project(read, softmaxes * sizes.value_size)
        self.output = project(heads * sizes.value_size, sizes.width)
        self.sizes = sizes
        self.read_options(config)

    @classmethod
    def softmaxes(cls, config: LayerConfig) -> tuple[int, int]:
        """Softmaxes of a token, and how many numbers of a latent each of them reads."""
        return config.heads, cls.sizes_of(config).latent_size

    def read_options(self, config: LayerConfig) -> None:
        """Copy the options that shape no parameter."""

    def array_of(self, module: Any, *shape: int) -> Array:
        """The kernel or the gain of a part, in the compute type, and in a shape if one is given."""
        array = module.kernel[...] if isinstance(module, nnx.Linear) else module.scale[...]
        array = array.astype(self.latent_down.dtype)
        return array.reshape(*shape) if shape else array

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> LatentConfig:
        """The sizes of these layers in a model."""
        options = cls.options_of(config)
        yarn, own = None, options.latent_epsilon
        if options.yarn_factor is not None:
            yarn = Yarn(
                **{
                    field.name: getattr(options, f"yarn_{field.name}")
                    for field in dataclasses.fields(Yarn)
                }
            )
        return LatentConfig(
            width=config.width,
            heads=config.heads,
            latent_size=options.latent_size,
            key_size=options.key_size,
            rope_size=options.rope_size,
            value_size=options.value_size,
            query_latent_size=options.query_latent_size,
            rope_theta=config.rope_theta,
            rotary=options.rotary,
            yarn=yarn,
            epsilon=config.norm_epsilon if own is None else own,
        )

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        try:
            cls.sizes_of(config)
        except ValueError as error:
            raise ValueError(f"{cls.word}.{error}") from None

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Latents and rotary keys for `capacity` tokens."""
        options = cls.options_of(config)
        sizes = (options.latent_size, options.rope_size)
        return LatentCache.empty(batch, *sizes, capacity, config.compute_dtype)


class MLALayer(LatentLayer):
    """Multi-head latent attention: the keys and values of all heads come from one latent per token.

    c = RMSNorm(x W_c); k_h = [K_h c; rope(x W_r)]; v_h = V_h c; y = softmax attention, W_o.

    With `slices` above 1, decoding takes one softmax per slice of the latents, as on devices that
    hold a slice each. This is an approximation, for which `rotate_latents` prepares a model.
    Latents are stored without the gain of their norm, which is folded into the projections that
    read them.

    Attributes:

        shares: share of the latents' energy per slice, which `with_slices` measures; or None.

    Source: DeepSeek-V2 (2024), arXiv:2405.04434; Tang et al. (2025), arXiv:2508.15881 (slices).
    """

    word: ClassVar[str] = "mla"
    Options: ClassVar[type[LayerOptions]] = MLAOptions
    can_cut_time: ClassVar[bool] = True

    def read_options(self, config: LayerConfig) -> None:
        """Copy the options that shape no parameter."""
        options = self.options_of(config)
        self.slices, self.slices_prompt = options.slices, options.slices_prompt
        self.shares: tuple[float, ...] | None = None
        self.norm_of_slices: Norm = "exact" if options.exact_norm else "sliced"

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options = cls.options_of(config)
        if options.latent_size % options.slices:
            raise ValueError(
                f"{cls.word}.slices must divide latent_size {options.latent_size}; "
                f"got {options.slices}."
            )

    def weights(self) -> LatentWeights:
        """The layer's weights in the form of `toolkit.attention.latent`, in the compute type."""
        dtype, heads, of = self.latent_down.dtype, self.sizes.heads, self.array_of
        has_latent, size = self.query_down is not None, self.sizes.latent_size
        gain = of(self.latent_norm, -1, 1, 1)
        return LatentWeights(
            query_up=of(self.query_up, self.query_up.in_features, heads, -1),
            latent_down=of(self.latent_down),
            rope_key=of(self.rope_key),
            latent_norm=jnp.ones(size, dtype),
            key_up=gain * of(self.key_up, size, heads, -1),
            value_up=gain * of(self.value_up, size, heads, -1),
            output=of(self.output, heads, -1, self.sizes.width),
            query_down=of(self.query_down) if has_latent else None,
            query_norm=of(self.query_norm) if has_latent else None,
        )

    def sliced(self) -> LatentSlices:
        """The same by slices."""
        shares = None if self.shares is None else np.asarray(self.shares)
        return slice_latents(self.weights(), self.slices, shares=shares)

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given."""
        past = {"segment_ids": segment_ids, "initial_state": cache}
        if self.slices > 1 and self.slices_prompt:
            check_word("mla with slices_prompt", can_cut_time=False)
            return tpla(x, self.sliced(), self.sizes, norm=self.norm_of_slices, **past)
        return sequence_latents(x, self.weights(), self.sizes, **past)

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        if self.slices > 1:
            return tpla_step(x_t, self.sliced(), cache, self.sizes, norm=self.norm_of_slices)
        return mla_step(x_t, self.weights(), cache, self.sizes)
