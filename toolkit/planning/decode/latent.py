r"""Decoding with latent attention on several chips: what each holds, how long a layer takes.

    seconds = max(bytes / bandwidth, FLOPs / peak) + sum over collectives
    bytes   = parameters of a chip + batch context numbers per token     2 bytes each
    FLOPs   = 2 batch parameters of a chip + 2 batch context heads (2 latent + rope)

Collectives cost a start (5 us on GPUs, 1 us per hop on TPUs) and their bytes over the link. A
merge of parts of the tokens is counted as one of log-sum-exps, without an exchange of maxima first.

Schemes on k chips, g of them along the latents (`parallel.latent.decode_step` runs them):

    replicate   heads cut, every chip has the whole cache (MLA)                     exact
    data        rows cut, every chip has all weights ("DP attention")               exact
    dcp         tokens cut, parts merged                                            exact
    tpla        latents cut, a softmax per slice; head weights held g times         approximate
    tpla-lean   the same, no weight held twice, two collectives more                approximate
"""

import dataclasses
import math
from typing import Any, NamedTuple

from toolkit._checks import checked
from toolkit.attention.latent import PRESETS, LatentConfig, SlicingReport
from toolkit.measure import Peak
from toolkit.planning.clusters import cluster

BYTES = 2
"""Of a number in bfloat16."""

MOST_TOKENS = 2**40
SCHEMES = ("replicate", "data", "dcp", "tpla", "tpla-lean")


class Share(NamedTuple):
    """What one chip has of a layer.

    Attributes:
        parameters: numbers of its weights.
        per_token: numbers it keeps of every token that it keeps anything of, times the share of
            tokens.
        core_flops: FLOPs per row and cached token.
        collectives: (kind, numbers per row) of each.
    """

    parameters: float
    per_token: float
    core_flops: float
    collectives: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class DecodeCost:
    """One token of every row through one layer of attention (modelled), and the memory of all.

    Attributes:
        scheme: one of `SCHEMES`.
        slices: chips along the latents; 1 where they are whole.
        is_exact: whether it computes the model.
        weight_bytes: of a chip, one layer.
        cache_bytes: likewise.
        flops: of a chip, one layer.
        seconds: of one layer.
        collectives: (kind, bytes of all rows) of each in a layer.
        collective_seconds: what of it is communication.
        memory_bytes: weights and cache of attention, all layers, on a chip.
        fits: whether the chip holds them.

    Example:
        >>> decode_cost("deepseek_v3", 16, 32768, "h100:2", scheme="tpla", slices=2).is_exact
        False
    """

    scheme: str
    slices: int
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
        """The scheme, with its slices if it has some."""
        return self.scheme if self.slices == 1 else f"{self.scheme}, g = {self.slices}"


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The fastest scheme that fits and may be used, beside the others.

    Attributes:
        chosen: the scheme.
        costs: all schemes, fastest first.
        reason: why it was chosen, in words.

    Example:
        >>> plan = plan_decode("deepseek_v3", 1, 4096, "h100:8")
        >>> plan.chosen.scheme
        'replicate'
    """

    chosen: DecodeCost
    costs: tuple[DecodeCost, ...]
    reason: str

    def __str__(self) -> str:
        rows = [f"{'scheme':18}{'us/layer':>9}{'of it sent':>11}{'GB/chip':>9}  "]
        for cost in self.costs:
            notes = [] if cost.is_exact else ["approximate"]
            notes += [] if cost.fits else ["does not fit"]
            mark = "-> " if cost == self.chosen else "   "
            rows.append(
                f"{mark}{cost.name:15}{cost.seconds * 1e6:9.1f}"
                f"{cost.collective_seconds * 1e6:11.1f}{cost.memory_bytes / 1e9:9.2f}  "
                + ", ".join(notes)
            )
        return "\n".join([*(row.rstrip() for row in rows), self.reason])


@checked
def decode_cost(
    model: str | LatentConfig,
    batch: int,
    context: int,
    chips: str,
    *,
    scheme: str = "replicate",
    slices: int = 1,
    link: float | None = None,
) -> DecodeCost:
    """Predict one token of every row through one layer of latent attention.

        seconds = max(bytes / bandwidth, FLOPs / peak) + sum over collectives

    Args:
        model: a key of `toolkit.attention.latent.PRESETS`, or sizes.
        batch: rows.
        context: tokens in the cache of every row.
        chips: kind and number, such as "h100:8"; see `cluster`.
        scheme: one of "replicate", "data", "dcp", "tpla", "tpla-lean".
        slices: chips along the latents, of the tpla schemes.
        link: bytes per second that a chip sends one way; None: as published.

    Returns:
        A `DecodeCost` (modelled, not measured).

    Raises:
        ValueError: an unknown model, chip or scheme, numbers that do not divide.

    Source: the roofline of Williams et al. (2009); schemes of Tang et al. (2025),
        arXiv:2508.15881, and Bhatia et al. (2025), arXiv:2507.07120.

    Example:
        >>> cost = decode_cost("deepseek_v3", 16, 32768, "h100:8", scheme="dcp")
        >>> round(cost.cache_bytes / 16 / 32768)
        144
    """
    config = _config(model)
    where = cluster(chips)
    for name, number in (("batch", batch), ("context", context)):
        if not 1 <= number <= MOST_TOKENS:
            raise ValueError(f"{name} must lie in [1, {MOST_TOKENS:,}]; got {number}.")
    if link is not None and not link > 0:
        raise ValueError(f"link must be above 0 bytes per second; got {link}.")
    _check_scheme(config, scheme, slices, where.chips)
    chip, share = where.chip, _share(config, scheme, where.chips, slices)
    rows = math.ceil(batch / where.chips) if scheme == "data" else batch
    rate = where.chip.links[0].bytes_per_second if link is None else link
    weights, cache = BYTES * share.parameters, BYTES * rows * context * share.per_token
    flops = 2 * rows * share.parameters + rows * context * share.core_flops
    collectives = tuple((kind, BYTES * rows * numbers) for kind, numbers in share.collectives)
    sent = sum(
        _collective_seconds(chip, kind, size, where.chips, slices, rate)
        for kind, size in collectives
    )
    memory = config.layers * (weights + cache)
    read, computed = (weights + cache) / chip.bytes_per_second, flops / chip.flops_per_second
    return DecodeCost(
        scheme=scheme,
        slices=slices,
        is_exact=not scheme.startswith("tpla") or slices == 1,
        weight_bytes=weights,
        cache_bytes=cache,
        flops=flops,
        seconds=max(read, computed) + sent,
        collectives=collectives,
        collective_seconds=sent,
        memory_bytes=memory,
        fits=memory <= chip.memory_bytes,
    )


@checked
def break_even_tokens(model: str | LatentConfig, chips: int, slices: int) -> float:
    """Cached tokens, batch times context, from which TPLA reads fewer bytes than MLA by heads.

        (parameters(tpla) - parameters(replicate)) / (latent + rope - latent/slices - rope)

    Args:
        model: as in `decode_cost`.
        chips: how many.
        slices: of them along the latents.

    Returns:
        Tokens; 0 if it always does.

    Raises:
        ValueError: an unknown model, numbers that do not divide, one slice.

    Example:
        >>> round(break_even_tokens("deepseek_v3", 2, 2) / 1000)
        296
    """
    config = _config(model)
    if slices < 2:
        raise ValueError(f"slices must be at least 2; got {slices}.")
    _check_scheme(config, "tpla", slices, chips)
    whole, cut = (_share(config, scheme, chips, slices) for scheme in ("replicate", "tpla"))
    return max(0.0, (cut.parameters - whole.parameters) / (whole.per_token - cut.per_token))


@checked
def plan_decode(
    model: str | LatentConfig,
    batch: int,
    context: int,
    chips: str,
    *,
    link: float | None = None,
    report: SlicingReport | None = None,
) -> DecodePlan:
    """Choose how several chips decode with latent attention.

        the fastest of the schemes that fit; of the exact ones, unless a report allows slices

    Args:
        model: as in `decode_cost`.
        batch: rows.
        context: tokens in the cache of every row.
        chips: kind and number, such as "h100:8".
        link: bytes per second that a chip sends one way; None: as published.
        report: what slicing this model costs, `toolkit.attention.latent.slicing_report`: TPLA of
            as many slices may then be chosen, and its errors are part of the reason.

    Returns:
        A `DecodePlan`; printed, a table and the reason.

    Raises:
        ValueError: an unknown model or chip, or nothing that fits.

    Example:
        >>> print(plan_decode("deepseek_v3", 16, 32768, "h100:8").reason)
        dcp: 71.6 us per layer, the fastest exact scheme that fits; replicate takes 2.90 times that.
    """
    config, count = _config(model), cluster(chips).chips
    allowed = None if report is None else len(report.divergence)
    options = [
        (scheme, 2**power)
        for scheme in SCHEMES
        for power in (range(1, 11) if scheme.startswith("tpla") else range(1))
        if _divides(config, scheme, 2**power, count)
    ]
    costs = [
        decode_cost(config, batch, context, chips, scheme=scheme, slices=slices, link=link)
        for scheme, slices in options
    ]
    costs.sort(key=lambda cost: cost.seconds)
    usable = [c for c in costs if c.fits and (c.is_exact or c.slices == allowed)]
    if not usable:
        least = min((c for c in costs if c.is_exact), key=lambda cost: cost.memory_bytes)
        needed = f"{least.name} needs {least.memory_bytes / 1e9:.1f} GB on each"
        raise ValueError(f"chips {chips!r} hold no exact scheme: {needed}.")
    chosen = usable[0]
    return DecodePlan(chosen, tuple(costs), _reason(chosen, costs, report))


def _reason(chosen: DecodeCost, costs: list[DecodeCost], report: SlicingReport | None) -> str:
    kind = "exact scheme" if report is None else "scheme allowed"
    words = f"{chosen.name}: {chosen.seconds * 1e6:.1f} us per layer, the fastest {kind} that fits"
    base = next(cost for cost in costs if cost.scheme == "replicate")
    if base != chosen:
        words += f"; replicate takes {base.seconds / chosen.seconds:.2f} times that"
    faster = [cost for cost in costs if cost.seconds < chosen.seconds and not cost.is_exact]
    if faster and report is None:
        words += f"; {faster[0].name} would be faster and is approximate"
    if not chosen.is_exact and report is not None:
        words += (
            f"; outputs are off by {report.output_error:.1%}, and the first slice's largest weight "
            f"is the true one for {float(report.top_agreement[0]):.0%} of the queries"
        )
    return words + "."


def _config(model: str | LatentConfig) -> LatentConfig:
    if isinstance(model, LatentConfig):
        return model
    if model not in PRESETS:
        raise ValueError(f"model must be one of {', '.join(PRESETS)}, or sizes; got {model!r}.")
    return PRESETS[model]


def _divides(config: LatentConfig, scheme: str, slices: int, chips: int) -> bool:
    heads = chips // slices if scheme == "tpla" and chips % slices == 0 else chips
    fits = config.latent_size % slices == 0 and chips % slices == 0
    return fits and (scheme == "data" or config.heads % heads == 0)


def _check_scheme(config: LatentConfig, scheme: str, slices: int, chips: int) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}; got {scheme!r}.")
    if slices < 1 or chips < 1 or (slices > 1 and not scheme.startswith("tpla")):
        raise ValueError(f"slices must be 1 for scheme {scheme!r}; got {slices} on {chips} chips.")
    if not _divides(config, scheme, slices, chips):
        raise ValueError(
            f"slices must divide {chips} chips and a latent of {config.latent_size}, and chips "
            f"{config.heads} heads; got {slices}."
        )


def _share(config: LatentConfig, scheme: str, chips: int, slices: int) -> Share:
    """What one chip has under a scheme; slices count for the tpla schemes alone."""
    sizes: dict[str, Any] = config.parameters
    query, latent = sizes["query_down"], sizes["latent_down"] + sizes["rope_key"]
    heads = sizes["query_up"] + sizes["output"]
    ups, rope = sizes["key_up"] + sizes["value_up"], config.rope_size
    whole = config.cache_size
    core = 2 * config.heads * (2 * config.latent_size + rope)
    end = ("all-reduce", float(config.width))
    of_queries = config.heads * (config.key_size + rope)
    if scheme == "replicate":
        return Share(query + latent + (heads + ups) / chips, whole, core / chips, (end,))
    if scheme == "data":
        return Share(query + latent + heads + ups, whole, core, ())
    if scheme == "dcp":
        merged = config.heads * (config.value_size + 1)
        moved = (("all-gather", of_queries), ("reduce-scatter", merged), end)
        parameters = query + latent + heads / chips + ups
        return Share(parameters, whole / chips, core / chips, moved)
    own = config.latent_size / slices
    down = config.width * (own + rope)
    core = 2 * config.heads * slices / chips * (2 * own + rope)
    if scheme == "tpla":
        parameters = query + down + heads * slices / chips + ups / chips
        return Share(parameters, own + rope, core, (end,))
    share = slices / chips
    moved = (
        ("gather in row", of_queries * share),
        ("scatter in row", config.heads * config.value_size * share),
        end,
    )
    return Share(query + down + (heads + ups) / chips, own + rope, core, moved)


def _collective_seconds(
    chip: Peak, kind: str, size: float, chips: int, slices: int, rate: float
) -> float:
    """Of one collective whose whole result or operand has `size` bytes."""
    members = slices if kind.endswith("row") else chips
    if members == 1:
        return 0.0
    passes = 2 if kind == "all-reduce" else 1
    start = 1e-6 * members / 2 * passes if chip.name.startswith("TPU") else 5e-6
    return start + passes * (members - 1) / members * size / rate
