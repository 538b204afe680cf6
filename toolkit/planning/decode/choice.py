"""The fastest scheme for decoding with latent attention on several chips, and why."""

import dataclasses

from toolkit._checks import checked
from toolkit.attention.latent import LatentConfig, SlicingReport
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.decode.latent import (
    SCHEMES,
    DecodeCost,
    decode_cost,
    divides,
    latent_config,
)
from toolkit.planning.strategy import MOST_CHIPS

MOST_TIMES = 64  # of the chips, for the nearest number of them that holds a model


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The fastest scheme that fits and is allowed, and all others.

    Attributes:
        chosen: the scheme.
        costs: all schemes, fastest first.
        reason: why it was chosen, in words.

    Example:
        >>> plan = plan_decode("deepseek_v3", 1, 4096, "h200:8", weights="float8")
        >>> plan.chosen.scheme, plan.chosen.fits
        ('replicate', True)
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
def plan_decode(
    model: str | LatentConfig,
    batch: int,
    context: int,
    chips: str | Cluster,
    *,
    link: float | None = None,
    report: SlicingReport | None = None,
    weights: str = "bfloat16",
    cache: str = "bfloat16",
    other_parameters: float | None = None,
) -> DecodePlan:
    """Choose how several chips decode with latent attention.

        the fastest scheme that fits; an exact one, unless a report allows slices

    Args:
        model: as in `decode_cost`.
        batch: rows.
        context: tokens in the cache of every row.
        chips: kind and number, such as "h100:8".
        link: as in `decode_cost`.
        report: the errors of slicing this model, from `toolkit.attention.latent.slicing_report`;
            allows TPLA with that many slices, and is quoted in the reason.
        weights, cache, other_parameters: as in `decode_cost`.

    Returns:
        A `DecodePlan`, which prints as a table with the reason.

    Raises:
        ValueError: when nothing fits; names the nearest multiple of the chips that works.

    Example:
        >>> print(plan_decode("deepseek_v3", 16, 32768, "h200:16").reason)
        dcp: 64.4 us per layer, the fastest exact scheme that fits; replicate takes 2.37 times that.
    """
    allowed = None if report is None else len(report.divergence)

    def costs_on(chips: str | Cluster) -> list[DecodeCost]:
        config, count = latent_config(model), cluster(chips).chips
        options = [
            (scheme, 2**power)
            for scheme in SCHEMES
            for power in (range(1, 11) if scheme.startswith("tpla") else range(1))
            if divides(config, scheme, 2**power, count)
        ]
        found = [
            decode_cost(
                model, batch, context, chips, scheme=scheme, slices=slices, link=link,
                weights=weights, cache=cache, other_parameters=other_parameters,
            )
            for scheme, slices in options
        ]  # fmt: skip
        return sorted(found, key=lambda cost: cost.seconds)

    costs = costs_on(chips)
    usable = [c for c in costs if c.fits and (c.is_exact or c.slices == allowed)]
    if not usable:
        least = min((c for c in costs if c.is_exact), key=lambda cost: cost.memory_bytes)
        needed = f"{least.name} needs {least.memory_bytes / 1e9:.1f} GB on each"
        name, count = cluster(chips).name, cluster(chips).chips
        kind, colon, _ = name.partition(":")
        times = range(2, min(MOST_TIMES, MOST_CHIPS // count) + 1 if colon else 2)
        larger = (f"{kind}:{each * count}" for each in times)
        works = (each for each in larger if any(c.fits and c.is_exact for c in costs_on(each)))
        nearest = next((f"; nearest multiple that works: {each}" for each in works), "")
        raise ValueError(f"chips {name!r} hold no exact scheme: {needed}{nearest}.")
    chosen = usable[0]
    return DecodePlan(chosen, tuple(costs), _reason(chosen, costs, report))


def _reason(chosen: DecodeCost, costs: list[DecodeCost], report: SlicingReport | None) -> str:
    kind = "exact scheme" if report is None else "scheme allowed"
    words = f"{chosen.name}: {chosen.seconds * 1e6:.1f} us per layer, the fastest {kind} that fits"
    base = next((cost for cost in costs if cost.scheme == "replicate"), None)
    if base is None:
        words += "; replicate does not cut the heads evenly"
    elif base != chosen:
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
