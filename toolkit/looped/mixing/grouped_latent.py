"""Latents cut into parts that train: grouped latent attention, multi-head low-rank attention and
grouped tied attention.

All keep the parts side by side in a `LatentCache`, with one rotary key per token for all heads, so
that devices can hold a part each; a token's latent is as large as without the cut.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention.latent import LatentCache, LatentConfig, LatentSlices, tpla, tpla_step
from toolkit.attention.latent.slices import Norm
from toolkit.looped.layers import linear
from toolkit.looped.mixing.latent import LatentLayer, LatentOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer


class PartedLayer(MixingLayer):
    """What the three share: attention by parts, whole and token by token."""

    norm: ClassVar[Norm] = "sliced"
    scale: float = 1.0
    sizes: LatentConfig

    def parts(self) -> LatentSlices:
        """The layer's weights, part by part."""
        raise NotImplementedError

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given."""
        past: Any = {"segment_ids": segment_ids, "initial_state": cache}
        parts = self.parts()
        y, cache = tpla(
            x.astype(parts.output.dtype), parts, self.sizes, norm=self.norm, form="expanded", **past
        )
        return self.scale * y, cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token, in the absorbed form, and append it to the cache."""
        parts = self.parts()
        y, cache = tpla_step(
            x_t.astype(parts.output.dtype), parts, cache, self.sizes, norm=self.norm
        )
        return self.scale * y, cache


def _parts(query_up, latent_down, rope_key, key_up, value_up, output, **query) -> LatentSlices:
    """Slices whose energy is even: each is normalised by itself."""
    count, size, heads, _ = key_up.shape
    even = jnp.full(count, 1 / count, jnp.promote_types(key_up.dtype, jnp.float32))
    return LatentSlices(
        query_up, jnp.stack(jnp.split(latent_down, count, axis=1)), rope_key, key_up, value_up,
        output, features=jnp.arange(count * size).reshape(count, size),
        owned=jnp.ones((count, size), even.dtype), shares=even,
        multipliers=jnp.ones((count, heads), even.dtype), **query,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GroupedLatentOptions(LatentOptions):
    """Options of "grouped_latent" layers: those of `LatentOptions`, and:

    Attributes:
        groups: groups of heads, each with a latent of latent_size / groups to itself.
    """

    groups: int = 2


class GroupedLatentLayer(PartedLayer, LatentLayer):
    """Grouped latent attention (GLA): every group of heads has a latent of its own.

    c_g = RMSNorm(x W_g); k_h = [K_h c_g; rope(x W_r)]; v_h = V_h c_g for the heads h of group g.

    Source: Zadouri, Strauss and Dao (2025), arXiv:2505.21487, section 3.3.
    """

    word: ClassVar[str] = "grouped_latent"
    Options: ClassVar[type[LayerOptions]] = GroupedLatentOptions
    count: ClassVar[str] = "groups"

    @classmethod
    def count_of(cls, config: LayerConfig) -> int:
        """Parts of a latent."""
        return getattr(cls.options_of(config), cls.count)

    @classmethod
    def softmaxes(cls, config: LayerConfig) -> tuple[int, int]:
        return config.heads, cls.sizes_of(config).latent_size // cls.count_of(config)

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        count = cls.count_of(config)
        heads = cls.softmaxes(config)[0]
        for name, size in (("latent_size", cls.options_of(config).latent_size), ("heads", heads)):
            if size % count:
                raise ValueError(f"{cls.word}.{cls.count} must divide {name} {size}; got {count}.")

    def read_options(self, config: LayerConfig) -> None:
        """Copy the number of parts."""
        self.number = self.count_of(config)

    def parts(self) -> LatentSlices:
        """The layer's weights; gains of the norms are in the projections that read the latents."""
        of, sizes, number = self.array_of, self.sizes, self.number
        gain = of(self.latent_norm, number, -1, 1, 1)

        def up(module: nnx.Linear, size: int) -> Array:
            kernel = of(module, module.in_features, number, -1, size)
            return gain * kernel.swapaxes(0, 1)

        query = {}
        if self.query_down is not None:
            query = {"query_down": of(self.query_down), "query_norm": of(self.query_norm)}
        return _parts(
            of(self.query_up, self.query_up.in_features, sizes.heads, -1), of(self.latent_down),
            of(self.rope_key), up(self.key_up, sizes.key_size), up(self.value_up, sizes.value_size),
            of(self.output, sizes.heads, -1, sizes.width), **query,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LowRankOptions(LatentOptions):
    """Options of "mlra" layers: those of `LatentOptions`, and:

    Attributes:
        branches: parts of the latent, over each of which every head has a softmax.
    """

    branches: int = 4


class LowRankLayer(GroupedLatentLayer):
    """Multi-head low-rank attention (MLRA): every head has a softmax per part of the latent.

    c_i = RMSNorm(x W_i); k_hi = [K_hi c_i; rope(x W_r)]; v_hi = V_hi c_i;
    y_h = branches^-1/2 sum_i softmax attention to (k_hi, v_hi).

    Factors (width / size)^1/2 that the paper gives normalised latents are those of the projections
    here, which are drawn larger for it.

    Source: Liu et al. (2026), arXiv:2603.02188, section 3.
    """

    word: ClassVar[str] = "mlra"
    Options: ClassVar[type[LayerOptions]] = LowRankOptions
    count: ClassVar[str] = "branches"

    @classmethod
    def softmaxes(cls, config: LayerConfig) -> tuple[int, int]:
        heads, size = super().softmaxes(config)
        return heads * cls.count_of(config), size

    def read_options(self, config: LayerConfig) -> None:
        """Copy the number of parts, and scale their sum."""
        super().read_options(config)
        self.scale = self.number**-0.5


@dataclasses.dataclass(frozen=True)
class GroupedTiedOptions(LayerOptions):
    """Options of "grouped_tied" layers.

    Attributes:
        key_value_heads: tied states, each of a group of the heads.
        head_size: size of a state, a value and a key; None: width / heads. Half of a key turns.
    """

    key_value_heads: int = 2
    head_size: int | None = None


class GroupedTiedLayer(PartedLayer):
    """Grouped tied attention (GTA): a value is a state, a key its first half and a rotary key.

    s_g = x W_g; v_h = s_g; k_h = [first half of s_g; rope(x W_r)] for the heads h of group g.

    Source: Zadouri, Strauss and Dao (2025), arXiv:2505.21487, section 3.2.
    """

    word: ClassVar[str] = "grouped_tied"
    Options: ClassVar[type[LayerOptions]] = GroupedTiedOptions
    norm: ClassVar[Norm] = "none"

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        sizes, dtype = self.sizes_of(config), config.compute_dtype

        def project(inputs: int, outputs: int) -> nnx.Linear:
            return linear(inputs, outputs, dtype, rngs, std=inputs**-0.5)

        self.query = project(sizes.width, sizes.heads * sizes.value_size)
        self.state = project(sizes.width, sizes.latent_size)
        self.rope_key = project(sizes.width, sizes.rope_size)
        self.output = project(sizes.heads * sizes.value_size, sizes.width)
        self.sizes = sizes

    @classmethod
    def softmaxes(cls, config: LayerConfig) -> tuple[int, int]:
        """Softmaxes of a token, and how many numbers of the states each of them reads."""
        return config.heads, cls.sizes_of(config).value_size

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> LatentConfig:
        """States as latents: half of a key is a state's, half is rotary."""
        options = cls.options_of(config)
        size = options.head_size or config.width // config.heads
        return LatentConfig(
            width=config.width, heads=config.heads, latent_size=options.key_value_heads * size,
            key_size=size - size // 2, rope_size=size // 2, value_size=size,
            rope_theta=config.rope_theta,
        )  # fmt: skip

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        groups = cls.options_of(config).key_value_heads
        if config.heads % groups:
            raise ValueError(
                f"{cls.word}.key_value_heads must divide heads {config.heads}; got {groups}."
            )
        try:
            cls.sizes_of(config)
        except ValueError as error:
            raise ValueError(f"{cls.word}.head_size: {error}") from None

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """States and rotary keys for `capacity` tokens."""
        sizes = cls.sizes_of(config)
        arrays = sizes.latent_size, sizes.rope_size
        return LatentCache.empty(batch, *arrays, capacity, config.compute_dtype)

    def parts(self) -> LatentSlices:
        """The layer's weights, where identities read the states."""
        sizes, dtype = self.sizes, self.query.dtype
        count = sizes.latent_size // sizes.value_size
        query, state, rope, output = (
            module.kernel[...].astype(dtype)
            for module in (self.query, self.state, self.rope_key, self.output)
        )
        identity = jnp.eye(sizes.value_size, dtype=dtype)[None, :, None]
        whole = jnp.broadcast_to(
            identity, (count, sizes.value_size, sizes.heads // count, sizes.value_size)
        )
        return _parts(
            query.reshape(sizes.width, sizes.heads, -1), state, rope,
            whole[..., : sizes.key_size], whole, output.reshape(sizes.heads, -1, sizes.width),
        )  # fmt: skip
