r"""Decoding with latent attention on several chips: memory per chip and time per layer.

    seconds = max(bytes / bandwidth, FLOPs / peak) + sum over collectives
    bytes   = parameters of a chip + batch context numbers per token     1 or 2 bytes each
    FLOPs   = 2 batch parameters of a chip + 2 batch context heads (2 latent + rope)

A collective costs its start (5 us on GPUs, 1 us per hop on TPUs) and its bytes over the link that
reaches all chips of a group; between nodes (or slices) also that link's delay, once per doubling. A
merge over token shards exchanges log-sum-exps only, no maxima first. Parameters outside attention
(experts, tables) count in memory, evenly sharded over the chips.

The schemes on k chips, g of them along the latents (`parallel.latent.decode_step` runs all but
the mixed ones):

    replicate   heads sharded, the whole cache on every chip (MLA)                     exact
    data        rows cut, every chip has all weights ("DP attention")               exact
    dcp         tokens cut, parts merged                                            exact
    mixed       rows cut over groups of chips, heads and tokens within a group      exact
    tpla        latents cut, a softmax per slice; head weights held g times         approximate
    tpla-lean   the same, no weight held twice, two collectives more                approximate
"""

import dataclasses
import math

from toolkit._checks import check_choice, checked
from toolkit.attention.latent import PRESETS, LatentConfig
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.decode.cuts import Degrees, Share, degrees_of, share_of
from toolkit.planning.decode.rates import ROOFLINE
from toolkit.planning.time.products import product_rate
from toolkit.planning.time.seconds import Constants

BYTES = {"bfloat16": 2, "float8": 1}
SENT = BYTES["bfloat16"]
"""Of a number in a collective."""

MOST_TOKENS = 2**40
# Parameters beside attention, from the sizes in the models' config.json files: dense and mixture
# layers with shared experts and routers, both tables.
ELSEWHERE = {
    "deepseek_v2_lite": 15_334_881_280,
    "deepseek_v2": 226_787_783_680,
    "deepseek_v3": 659_612_872_192,
    "kimi_k2": 1_020_239_662_592,
}


@dataclasses.dataclass(frozen=True)
class DecodeCost:
    """The cost of one token per row through one layer (modelled), and the memory of all layers.

    Attributes:
        scheme: one of `SCHEMES`.
        slices: chips along the latents; 1 if they are not sharded.
        degrees: over how many chips rows, heads and tokens are cut; of the tpla schemes all chips
            count as "tensor".
        is_exact: whether the scheme computes the model exactly.
        weight_bytes: per chip and layer.
        cache_bytes: per chip and layer.
        flops: per chip and layer.
        seconds: per layer.
        collectives: (kind, bytes of all rows) of each collective in a layer.
        collective_seconds: the part of `seconds` spent on communication.
        memory_bytes: per chip, all layers: weights and cache of attention, and the chip's share of
            the other parameters.
        fits: whether the chip's memory holds them.

    Example:
        >>> decode_cost("deepseek_v3", 16, 32768, "h100:2", scheme="tpla", slices=2).is_exact
        False
    """

    scheme: str
    slices: int
    degrees: Degrees
    is_exact: bool
    weight_bytes: float
    cache_bytes: float
    flops: float
    seconds: float
    collectives: tuple[tuple[str, float], ...]
    collective_seconds: float
    memory_bytes: float
    fits: bool

    @property
    def name(self) -> str:
        """The scheme, with its number of slices if that is above 1, or its degrees."""
        if self.scheme == "mixed":
            return " x ".join(f"{k} {n}" for k, n in self.degrees._asdict().items() if n > 1)
        return self.scheme if self.slices == 1 else f"{self.scheme}, g = {self.slices}"


@checked
def decode_cost(
    model: str | LatentConfig,
    batch: int,
    context: int,
    chips: str | Cluster,
    *,
    scheme: str = "replicate",
    slices: int = 1,
    degrees: tuple[int, int, int] | None = None,
    link: float | None = None,
    weights: str = "bfloat16",
    cache: str = "bfloat16",
    other_parameters: float | None = None,
    rates: Constants = ROOFLINE,
) -> DecodeCost:
    """Predict the cost of one token per row through one layer of latent attention.

        seconds = max(bytes / bandwidth, FLOPs / peak) + sum over collectives

    Args:
        model: a key of `toolkit.attention.latent.PRESETS`, or sizes.
        batch: rows.
        context: tokens in the cache of every row.
        chips: kind and number, such as "h100:8"; see `cluster`.
        scheme: one of "replicate", "data", "dcp", "mixed", "tpla", "tpla-lean".
        slices: chips along the latents, for the tpla schemes.
        degrees: of the scheme "mixed": over how many chips rows, heads and cached tokens are cut.
        link: bytes per second that a chip sends one way; None: as published for the links within
            the group, which are slower between nodes.
        weights, cache: "bfloat16" or "float8" (scales not counted), in which products and attention
            are also computed, where chips have it; communication uses bfloat16.
        other_parameters: parameters outside attention, for `fits`; None: those of the preset; 0:
            attention alone. Required if `model` is given as sizes.
        rates: what chips and links reach of their published rates; by default all of it.

    Returns:
        A `DecodeCost` (modelled, not measured).

    Source: the roofline of Williams et al. (2009); schemes of Tang et al. (2025),
        arXiv:2508.15881, and Bhatia et al. (2025), arXiv:2507.07120.

    Example:
        >>> cost = decode_cost("deepseek_v3", 16, 32768, "h100:8", scheme="dcp")
        >>> round(cost.cache_bytes / 16 / 32768)
        144
    """
    config = latent_config(model)
    where = cluster(chips)
    check_rows(batch, context, link, weights, cache)
    cut = degrees_of(config, scheme, slices, where.chips, degrees)
    others = _elsewhere(model, other_parameters)
    share = share_of(config, scheme, cut, slices)
    rows = math.ceil(batch / cut.data)
    how = {"scheme": scheme, "slices": slices, "degrees": cut, "link": link, "rates": rates}
    how |= {"weights": weights, "cache": cache}
    return cost_of(share, config.layers, where, rows, rows * context, others / where.chips, **how)


def check_rows(batch: int, context: int, link: float | None, weights: str, cache: str) -> None:
    """Refuse numbers that no step of decoding has."""
    for name, number in (("batch", batch), ("context", context)):
        if not 1 <= number <= MOST_TOKENS:
            raise ValueError(f"{name} must lie in [1, {MOST_TOKENS:,}]; got {number}.")
    if link is not None and not link > 0:
        raise ValueError(f"link must be above 0 bytes per second; got {link}.")
    for name, kind in (("weights", weights), ("cache", cache)):
        check_choice(name, kind, BYTES)


def cost_of(
    share: Share,
    layers: int,
    where: Cluster,
    rows: int,
    cached_tokens: float,
    others: float,
    *,
    scheme: str,
    slices: int,
    degrees: Degrees,
    link: float | None,
    weights: str,
    cache: str,
    rates: Constants,
    queries: int = 1,
) -> DecodeCost:
    """The cost of a chip's share of attention with `rows` rows, each of `queries` new tokens, and
    that many cached tokens in each of the layers; `others` are the other parameters on a chip."""
    chip, read = where.chip, BYTES[weights] * share.parameters
    cached = BYTES[cache] * cached_tokens * share.per_token
    products = 2 * rows * queries * share.parameters
    core = queries * cached_tokens * share.core_flops
    sizes = [(kind, SENT * rows * queries * each, to) for kind, each, to in share.collectives]
    sent = sum(collective_seconds(where, *each, link, rates) for each in sizes)
    memory = layers * (read + cached) + BYTES[weights] * others
    moving = (read + cached) / chip.bytes_per_second / rates.memory
    computing = products / product_rate(chip, weights) / rates.matmul
    computing += core / product_rate(chip, cache) / rates.attention
    return DecodeCost(
        scheme=scheme,
        slices=slices,
        degrees=degrees,
        is_exact=not scheme.startswith("tpla") or slices == 1,
        weight_bytes=read,
        cache_bytes=cached,
        flops=products + core,
        seconds=max(moving, computing) + sent,
        collectives=tuple((kind, size) for kind, size, _ in sizes),
        collective_seconds=sent,
        memory_bytes=memory,
        fits=memory <= chip.memory_bytes,
    )


@checked
def break_even_tokens(model: str | LatentConfig, chips: int, slices: int) -> float:
    """Cached tokens (batch x context) above which TPLA reads fewer bytes than MLA sharded by heads.

        (parameters(tpla) - parameters(replicate)) / (latent + rope - latent/slices - rope)

    Args:
        model: as in `decode_cost`.
        chips: how many.
        slices: chips along the latents.

    Returns:
        Number of tokens; 0 if TPLA always reads fewer bytes.

    Example:
        >>> round(break_even_tokens("deepseek_v3", 2, 2) / 1000)
        296
    """
    config = latent_config(model)
    if slices < 2:
        raise ValueError(f"slices must be at least 2; got {slices}.")
    degrees = degrees_of(config, "tpla", slices, chips, None)
    whole, cut = (share_of(config, scheme, degrees, slices) for scheme in ("replicate", "tpla"))
    return max(0.0, (cut.parameters - whole.parameters) / (whole.per_token - cut.per_token))


def latent_config(model: str | LatentConfig) -> LatentConfig:
    """Sizes, of a preset by its name."""
    if isinstance(model, LatentConfig):
        return model
    if model not in PRESETS:
        raise ValueError(f"model must be one of {', '.join(PRESETS)}, or sizes; got {model!r}.")
    return PRESETS[model]


def _elsewhere(model: str | LatentConfig, given: float | None) -> float:
    if given is None and isinstance(model, LatentConfig):
        raise ValueError(
            "other_parameters must be given with sizes, because they decide what fits; 0 counts "
            "attention alone."
        )
    if given is not None and not 0 <= given <= MOST_TOKENS**2:
        raise ValueError(f"other_parameters must not be negative; got {given}.")
    return ELSEWHERE[str(model)] if given is None else given


def collective_seconds(
    where: Cluster, kind: str, size: float, members: int, rate: float | None, rates: Constants
) -> float:
    """Seconds of one collective of neighbours whose unsharded array has `size` bytes."""
    if members == 1:
        return 0.0
    passes = 2 if kind == "all-reduce" else 1
    link, near = where.link(1, members), min(members, where.chip.links[0].chips)
    start = 1e-6 * near / 2 * passes if where.chip.name.startswith("TPU") else 5e-6
    start += passes * link.seconds * rates.latency * math.ceil(math.log2(members / near))
    rate = rate or link.bytes_per_second * rates.link
    return start + passes * (members - 1) / members * size / rate
