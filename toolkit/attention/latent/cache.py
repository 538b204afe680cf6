"""The cache of latent attention: one latent and one rotary key per token, for all heads."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import check_shape
from toolkit._pytrees import register_dataclass
from toolkit.attention._caches import Rows
from toolkit.attention._checks import check_count, check_same_dtype


@register_dataclass
@dataclass(frozen=True)
class LatentCache(Rows):
    """Latents and rotary keys of the tokens seen so far; a pytree of arrays that begin with batch.

    Every row has a length of its own. Donate it (`jax.jit(step, donate_argnames="cache")`) so that
    a step writes in place.

    Attributes:
        latents: normalised, and multiplied by the basis if there is one [batch, capacity, latent].
        rope_keys: rotated, neighbouring channels a pair [batch, capacity, rope].
        length: tokens seen so far by each row, int32.

    Example:
        >>> cache = LatentCache.empty(2, 16, 8, capacity=4)
        >>> cache.latents.shape, cache.rope_keys.shape
        ((2, 4, 16), (2, 4, 8))
    """

    latents: Float[Array, "batch capacity latent"]
    rope_keys: Float[Array, "batch capacity rope"]
    length: Int[Array, "batch"]

    @classmethod
    def empty(
        cls, batch: int, latent_size: int, rope_size: int, capacity: int, dtype=jnp.float32
    ) -> "LatentCache":
        """Make a cache without tokens, with room for `capacity` of them in every row."""
        sizes = {"batch": batch, "latent_size": latent_size, "rope_size": rope_size}
        for name, size in (sizes | {"capacity": capacity}).items():
            check_count(name, size, 1)
        latents = jnp.zeros((batch, capacity, latent_size), dtype)
        rope_keys = jnp.zeros((batch, capacity, rope_size), dtype)
        return cls(latents, rope_keys, jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.latents.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of latents and rotary keys."""
        return self.latents.nbytes + self.rope_keys.nbytes


def check_latent_cache(cache: LatentCache, x: Array, latent_size: int, rope_size: int) -> None:
    """Refuse a cache of other rows, sizes or dtype than the tokens x [batch, ...] have."""
    axes = "batch capacity size"
    for name, size in (("latents", latent_size), ("rope_keys", rope_size)):
        array = getattr(cache, name)
        check_shape(f"cache.{name}", array, (x.shape[0], cache.capacity, size), axes)
    check_shape("cache.length", cache.length, x.shape[:1], "batch")
    check_same_dtype(x=x, cache_latents=cache.latents, cache_rope_keys=cache.rope_keys)
