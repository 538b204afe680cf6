"""How decoding is cut over chips: rows, heads, cached tokens or latents, and a chip's share."""

import math
from typing import Any, NamedTuple

from toolkit._checks import check_choice
from toolkit.attention.latent import LatentConfig

SCHEMES = ("replicate", "data", "dcp", "mixed", "tpla", "tpla-lean")


class Degrees(NamedTuple):
    """Over how many chips rows, heads and cached tokens are cut; tokens over neighbours.

    Attributes:
        data: groups of chips with rows of their own.
        tensor: chips of a group that share the heads.
        dcp: chips that share the tokens of the same heads.
    """

    data: int = 1
    tensor: int = 1
    dcp: int = 1

    @property
    def group(self) -> int:
        """Chips that work on the same rows."""
        return self.tensor * self.dcp


class Share(NamedTuple):
    """One chip's share of a layer.

    Attributes:
        parameters: number of weights.
        per_token: numbers cached per token that the chip stores, times the share of tokens that it
            stores.
        core_flops: FLOPs per row and cached token.
        collectives: (kind, numbers per row, members) of each collective.
    """

    parameters: float
    per_token: float
    core_flops: float
    collectives: tuple[tuple[str, float, int], ...]


def divides(config: LatentConfig, scheme: str, slices: int, chips: int) -> bool:
    """Whether chips and slices divide the heads and the latent."""
    heads = chips // slices if scheme == "tpla" and chips % slices == 0 else chips
    fits = config.latent_size % slices == 0 and chips % slices == 0
    return fits and (scheme == "data" or config.heads % heads == 0)


def latent_schemes(config: LatentConfig, chips: int) -> list[tuple[str, int, Degrees]]:
    """The schemes, with slices and degrees, that divide on these chips."""
    plain = [
        (scheme, 2**power, pure_degrees(scheme, chips))
        for scheme in SCHEMES
        if scheme != "mixed"
        for power in (range(1, 11) if scheme.startswith("tpla") else range(1))
        if divides(config, scheme, 2**power, chips)
    ]
    return plain + [("mixed", 1, cut) for cut in mixed_degrees(chips, config.heads)]


def pure_degrees(scheme: str, chips: int) -> Degrees:
    """Of a scheme that cuts one thing over all chips."""
    name = {"data": "data", "dcp": "dcp"}.get(scheme, "tensor")
    return Degrees(**{name: chips})


def mixed_degrees(chips: int, heads: int) -> list[Degrees]:
    """All ways to cut at least two of rows, heads and tokens, the last two by powers of two."""
    powers = [2**power for power in range(chips.bit_length()) if chips % 2**power == 0]
    found = [
        Degrees(chips // (tensor * dcp), tensor, dcp)
        for tensor in powers
        for dcp in powers
        if chips % (tensor * dcp) == 0 and heads % (tensor * dcp) == 0
    ]
    return [cut for cut in found if sum(each > 1 for each in cut) > 1]


def degrees_of(
    config: LatentConfig, scheme: str, slices: int, chips: int, given: tuple[int, int, int] | None
) -> Degrees:
    """The degrees of a scheme; refuses what does not divide."""
    check_choice("scheme", scheme, SCHEMES)
    if (given is not None) != (scheme == "mixed"):
        raise ValueError(f"degrees go with the scheme 'mixed', and only with it; got {given}.")
    if slices < 1 or chips < 1 or (slices > 1 and not scheme.startswith("tpla")):
        raise ValueError(f"slices must be 1 for scheme {scheme!r}; got {slices} on {chips} chips.")
    if given is not None:
        cut = Degrees(*given)
        if min(cut) < 1 or math.prod(cut) != chips or config.heads % cut.group:
            raise ValueError(
                f"degrees must multiply to {chips} chips, and those of heads and tokens divide "
                f"{config.heads} heads; got {given}."
            )
        return cut
    if not divides(config, scheme, slices, chips):
        raise ValueError(
            f"slices must divide {chips} chips and a latent of {config.latent_size}, and chips "
            f"{config.heads} heads; got {slices}."
        )
    return pure_degrees(scheme, chips)


def share_of(config: LatentConfig, scheme: str, degrees: Degrees, slices: int) -> Share:
    """One chip's share under a scheme; only the tpla schemes use `slices`."""
    sizes: dict[str, Any] = config.parameters
    query, latent = sizes["query_down"], sizes["latent_down"] + sizes["rope_key"]
    heads = sizes["query_up"] + sizes["output"]
    ups, rope = sizes["key_up"] + sizes["value_up"], config.rope_size
    of_queries = config.heads * (config.key_size + rope)
    if not scheme.startswith("tpla"):
        core = 2 * config.heads * (2 * config.latent_size + rope)
        moved = merges(degrees, of_queries, config.heads * (config.value_size + 1), config.width)
        parameters = query + latent + heads / degrees.group + ups / degrees.tensor
        return Share(parameters, config.cache_size / degrees.dcp, core / degrees.group, moved)
    chips, end = degrees.tensor, ("all-reduce", float(config.width), degrees.tensor)
    own = config.latent_size / slices
    down = config.width * (own + rope)
    core = 2 * config.heads * slices / chips * (2 * own + rope)
    if scheme == "tpla":
        parameters = query + down + heads * slices / chips + ups / chips
        return Share(parameters, own + rope, core, (end,))
    share = slices / chips
    moved = (
        ("gather in row", of_queries * share, slices),
        ("scatter in row", config.heads * config.value_size * share, slices),
        end,
    )
    return Share(query + down + (heads + ups) / chips, own + rope, core, moved)


def merges(
    degrees: Degrees, of_queries: float, of_values: float, width: int
) -> tuple[tuple[str, float, int], ...]:
    """Collectives of exact attention: queries and outputs among chips that share tokens, and the
    residual stream in a group; numbers per row of all heads."""
    moved = ()
    if degrees.dcp > 1:
        moved = (
            ("all-gather", of_queries / degrees.tensor, degrees.dcp),
            ("reduce-scatter", of_values / degrees.tensor, degrees.dcp),
        )
    return (*moved, ("all-reduce", float(width), degrees.group)) if degrees.group > 1 else ()
