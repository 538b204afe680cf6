"""A trained dense model becomes a mixture of experts that starts as the same function."""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
from flax import nnx

from toolkit._checks import checked
from toolkit._compat import set_value
from toolkit.looped.blocks import Block
from toolkit.looped.model import LoopedLM


@checked
def upcycled(
    model: LoopedLM, *,
    experts: int = 8, chosen: int = 2, layers: Iterable[int] | None = None, rngs: nnx.Rngs,
) -> LoopedLM:  # fmt: skip
    """The same model with a mixture of experts for feed-forward layers, each a copy of the layer.

        sum_j w_j f(x) = f(x),    since the weights of a token add up to 1

    so that the new model computes what the old one did, whatever its new routers choose. The
    experts become different as they are trained, each on its own tokens.

    Args:
        model: a looped model whose feed-forward layers are all "swiglu".
        experts: number of experts in a layer.
        chosen: experts per token, at least 2.
        layers: numbers of the layers, counted over prelude, pattern and coda, that become mixtures;
            None: all.
        rngs: where the routers' initial values come from.

    Returns:
        The mixture; neither model's later change of an array is seen by the other.

    Cost: `experts` times the memory of those layers; a token costs `chosen` times as much in them.

    Source: Komatsuzaki et al., "Sparse Upcycling", 2022, arXiv:2212.05055.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> dense = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> upcycled(dense, experts=4, layers=[1], rngs=nnx.Rngs(1)).config.feed_forwards
        'swiglu moe'
    """
    config = model.config
    words = list(config.feed_forward_words)
    if set(words) != {"swiglu"}:
        raise ValueError(
            f"model has feed_forwards {config.feed_forwards!r}; every layer must be 'swiglu'"
        )
    if config.swiglu != type(config.swiglu)():
        raise ValueError(f"model has swiglu options {config.swiglu}; experts have none, want none")
    wanted = set(range(len(words)) if layers is None else layers)
    if not wanted or (outside := wanted - set(range(len(words)))):
        named = sorted(outside) if wanted else "none"
        raise ValueError(f"layers must be some of 0 to {len(words) - 1}; got {named}")
    for layer in wanted:
        words[layer] = "moe"
    options = {"experts": experts, "chosen": chosen, "hidden": config.feed_forward_size}
    other = nnx.clone(model)
    other.config = dataclasses.replace(
        config, feed_forwards=" ".join(words), options={**config.options, "moe": options}
    )
    blocks = [*other.prelude, *other.blocks, *other.coda]
    for layer in wanted:
        blocks[layer].feed_forward = _mixture_of(blocks[layer], other, experts, rngs)
    return other


def _mixture_of(block: Block, model: LoopedLM, experts: int, rngs: nnx.Rngs) -> nnx.Module:
    dense = block.feed_forward
    made = Block(block.mixer.word, model.config, rngs=rngs, feed_forward="moe").feed_forward
    for name in ("gate", "up", "down"):
        kernel = getattr(dense, name).kernel[...]
        set_value(getattr(made.experts, name), jnp.repeat(kernel[None], experts, axis=0))
    return made
