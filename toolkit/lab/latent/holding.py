"""The shards of a layer of latent attention when it decodes on several chips. Pure functions.

Chips of the tpla schemes are a grid: `slices` along the latents, the others along the heads, and
chip 0 and 1 are neighbours along the heads.
"""

from typing import NamedTuple

from toolkit.attention.latent import LatentConfig

ARRAYS = ("heads", "down", "up", "cache")

Part = tuple[float, float]
"""Start and length along one side, as shares of the whole."""

WHOLE: Part = (0.0, 1.0)


class Held(NamedTuple):
    """One chip's shard of an array: a rectangle, as shares of its two sides.

    Attributes:
        across: start and length along heads ("heads", "up") or latents ("down", "cache").
        along: start and length along latents ("up") or tokens of all rows ("cache"); else
            everything.
    """

    across: Part
    along: Part

    @property
    def share(self) -> float:
        """The share of the whole array."""
        return self.across[1] * self.along[1]


def holding(scheme: str, chips: int, slices: int, chip: int) -> dict[str, Held]:
    """A chip's shard of every array of `ARRAYS` under a scheme of `toolkit.planning`.

    heads  what makes queries, and the output projection, cut by heads
    down   what makes latents
    up     keys and values of every head out of a latent
    cache  latents; the rotary keys beside them are cut by tokens or rows alone
    """

    def one_of(parts: int, number: int) -> Part:
        return number / parts, 1 / parts

    own = one_of(chips, chip)
    if scheme in ("replicate", "data"):
        is_cut = scheme == "replicate"
        heads = own if is_cut else WHOLE
        cache = Held(WHOLE, WHOLE if is_cut else own)
        return dict(zip(ARRAYS, (Held(heads, WHOLE), _ALL, Held(heads, WHOLE), cache), strict=True))
    if scheme == "dcp":
        return {"heads": Held(own, WHOLE), "down": _ALL, "up": _ALL, "cache": Held(WHOLE, own)}
    row, column = divmod(chip, chips // slices)
    latents, heads = one_of(slices, row), one_of(chips // slices, column)
    return {
        "heads": Held(own if scheme == "tpla-lean" else heads, WHOLE),
        "down": Held(latents, WHOLE),
        "up": Held(heads, latents),
        "cache": Held(latents, WHOLE),
    }


_ALL = Held(WHOLE, WHOLE)


def numbers_held(config: LatentConfig, shards: dict[str, Held]) -> tuple[float, float]:
    """The number of weights, and of cached numbers per token of all rows, in a shard."""
    sizes = config.parameters
    weights = (
        sizes["query_down"]
        + sizes["rope_key"]
        + (sizes["query_up"] + sizes["output"]) * shards["heads"].share
        + sizes["latent_down"] * shards["down"].share
        + (sizes["key_up"] + sizes["value_up"]) * shards["up"].share
    )
    cache = shards["cache"]
    return weights, config.latent_size * cache.share + config.rope_size * cache.along[1]
