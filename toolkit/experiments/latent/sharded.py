"""A language model that decodes on several devices, by the program of `toolkit.parallel.latent`.

Every token goes through `decode_step` in each layer, with the caches cut over simulated devices:
along the tokens (DCP, which is exact) or along the latents (TPLA).
"""

from functools import partial
from typing import Literal

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from toolkit.attention.latent import LatentCache
from toolkit.attention.latent.tpla import Norm
from toolkit.experiments.latent.sliced import Slices
from toolkit.looped import LoopedLM
from toolkit.parallel import make_mesh
from toolkit.parallel.latent import decode_step, hand_over, place_slices


def devices_for(scheme: Literal["tpla", "dcp"], count: int) -> Mesh:
    """A mesh of `count` devices: along "latent" for tpla, along "heads" for dcp."""
    if len(jax.devices()) < count:
        raise ValueError(
            f"{scheme} over {count} devices: jax runs with {len(jax.devices())}; call "
            f"toolkit.parallel.simulate_devices({count}) before the first array"
        )
    sizes = {"latent": count, "heads": 1} if scheme == "tpla" else {"latent": 1, "heads": count}
    return make_mesh(sizes, devices=jax.devices()[:count])


@partial(jax.jit, static_argnames=("mesh", "scheme", "norm"))
def decoded(
    model: LoopedLM,
    layers: Slices,
    tokens: Int[Array, "batch time"],
    *,
    mesh: Mesh,
    scheme: Literal["tpla", "dcp"],
    norm: Norm = "exact",
) -> Float[Array, "batch time vocabulary"]:
    """Logits of `model` token by token; `layers` have a slice per device under tpla, and one under
    dcp.
    """
    placed = [place_slices(sliced, mesh, scheme=scheme) for sliced in layers]
    (batch, time), size = tokens.shape, mesh.shape["heads"]
    room = -(-time // size) * size

    def empty(sliced, sizes) -> LatentCache:
        latents = sliced.slices * sliced.owned.shape[1]
        cache = LatentCache.empty(batch, latents, sizes.rope_size, room)
        return hand_over(cache, sliced, mesh, scheme=scheme)

    def step(caches, token):
        h, kept = model.embedding(token), []
        for block, sliced, cache in zip(model.blocks, placed, caches, strict=True):
            how = {"mesh": mesh, "scheme": scheme, "norm": norm}
            x = block.mixer_norm(h)
            mixed, cache = decode_step(x, sliced, cache, block.mixer.sizes, **how)
            h = h + mixed
            h = h + block.feed_forward(block.feed_forward_norm(h))
            kept.append(cache)
        return kept, model.head(h)

    start = [empty(s, block.mixer.sizes) for s, block in zip(placed, model.blocks, strict=True)]
    return jax.lax.scan(step, start, tokens.T)[1].swapaxes(0, 1)
