"""The fastest scheme for decoding with latent attention on several chips, and why."""

import dataclasses
from typing import Any

from toolkit._checks import checked
from toolkit._kinds import shown
from toolkit.attention.latent import PRESETS as LATENTS
from toolkit.attention.latent import LatentConfig, SlicingReport
from toolkit.looped import LoopedConfig
from toolkit.measure import in_words
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.decode.cuts import latent_schemes
from toolkit.planning.decode.latent import DecodeCost, decode_cost, latent_config
from toolkit.planning.decode.mixtures import (
    OVERLAPS,
    MixtureCost,
    expert_degrees,
    mixture_cost,
    mixture_schemes,
)
from toolkit.planning.division import MOST_CHIPS
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import model_of
from toolkit.planning.strategy import Strategy

MOST_SHOWN = 5  # ways to cut several of rows, heads and tokens, in a table
MOST_TIMES = 64  # of the chips, for the nearest number of them that holds a model


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The fastest scheme that fits and is allowed, and all others.

    Of a mixture of experts the costs are of whole layers, and have the fields of `MixtureCost`.

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
        mixed = [cost for cost in self.costs if cost.scheme == "mixed"]
        left_out = [cost for cost in mixed[MOST_SHOWN:] if cost != self.chosen]
        shown = [cost for cost in self.costs if cost not in left_out]
        width = max(len(cost.name) for cost in shown) + 3
        rows = [f"{'scheme':{width}}{'us/layer':>9}{'of it sent':>11}{'GB/chip':>9}  "]
        for cost in shown:
            notes = [] if cost.is_exact else ["approximate"]
            notes += [] if cost.fits else ["does not fit"]
            mark = "-> " if cost == self.chosen else "   "
            rows.append(
                f"{mark}{cost.name:{width - 3}}{cost.seconds * 1e6:9.1f}"
                f"{cost.collective_seconds * 1e6:11.1f}{cost.memory_bytes / 1e9:9.2f}  "
                + ", ".join(notes)
            )
        if left_out:
            rows.append(f"   and {len(left_out)} slower ways to cut rows, heads and tokens")
        return "\n".join([*(row.rstrip() for row in rows), self.reason])


@checked
def plan_decode(
    model: str | LatentConfig | LoopedConfig,
    batch: int,
    context: int,
    chips: str | Cluster,
    *,
    link: float | None = None,
    report: SlicingReport | None = None,
    weights: str = "bfloat16",
    cache: str = "bfloat16",
    other_parameters: float | None = None,
    imbalance: float = 1.0,
) -> DecodePlan:
    """Choose how several chips decode with latent attention, or a whole mixture of experts; how
    they prefill is not planned.

        the fastest scheme that fits; an exact one, unless a report allows slices
        touched = E (1 - (1 - k/E)^batch)          experts of a layer whose weights a step reads

    Args:
        model: as in `decode_cost`; or a mixture of experts, a configuration or its name in
            `MODELS`, of latent or softmax layers, whose experts are spread over all chips.
        batch: rows.
        context: tokens in the cache of every row.
        chips: kind and number, such as "h100:8".
        link: as in `decode_cost`.
        report: the errors of slicing this model, from `toolkit.attention.latent.slicing_report`;
            allows TPLA with that many slices, and is quoted in the reason.
        weights, cache, other_parameters: as in `decode_cost`; the last is not of mixtures.
        imbalance: what the busiest chip's experts read and compute, over the mean, of a mixture.

    Returns:
        A `DecodePlan`, which prints as a table with the reason.

    Raises:
        ValueError: when nothing fits; names the nearest multiple of the chips that works.

    Example:
        >>> print(plan_decode("deepseek_v3", 16, 32768, "h200:16").reason)
        data 2 x dcp 8: 46.0 us per layer, the fastest exact scheme that fits; replicate ...
        >>> round(plan_decode("deepseek-v3", 16, 4096, "h200:16").chosen.touched)
        102
    """
    mixture = _mixture(model)
    sizes: Any = model
    if not 1 <= imbalance <= MOST_TIMES or (imbalance > 1 and mixture is None):
        raise ValueError(
            f"imbalance must be 1, or at most {MOST_TIMES} for a mixture of experts; got "
            f"{imbalance}."
        )
    if mixture is not None and other_parameters is not None:
        raise ValueError(
            "other_parameters: a mixture of experts says itself what it has beside attention; "
            "want None."
        )
    allowed = None if report is None else len(report.divergence)

    how: dict[str, Any] = {"link": link, "weights": weights, "cache": cache}

    def costs_on(chips: str | Cluster) -> list[DecodeCost]:
        where = cluster(chips)
        if mixture is None:
            own: dict[str, Any] = {"other_parameters": other_parameters}
            schemes = latent_schemes(latent_config(sizes), where.chips)
        else:
            own, schemes = {"imbalance": imbalance}, mixture_schemes(mixture, where.chips)
        found: list[DecodeCost] = []
        for scheme, slices, degrees in schemes:
            each = {"scheme": scheme, "slices": slices, **how, **own}
            if mixture is None:
                each["degrees"] = degrees if scheme == "mixed" else None
                found.append(decode_cost(sizes, batch, context, chips, **each))
                continue
            ways = [
                mixture_cost(
                    mixture, batch, context, where, degrees=degrees, expert=expert,
                    overlap=overlap, **each,
                )
                for expert in expert_degrees(mixture, degrees, where.chips)
                for overlap in (OVERLAPS if degrees.data > 1 else OVERLAPS[:1])
            ]  # fmt: skip
            fitting = [way for way in ways if way.fits]
            smallest = min(ways, key=lambda cost: cost.memory_bytes)
            found.append(min(fitting, key=lambda cost: cost.seconds) if fitting else smallest)
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


def _mixture(model: str | LatentConfig | LoopedConfig) -> LoopedConfig | None:
    """The configuration of a mixture of experts; None of sizes of latent attention."""
    if isinstance(model, LatentConfig) or model in LATENTS:
        return None
    config = model_of(model)
    check_model(config, Strategy(), 1, 1)
    if "moe" not in config.feed_forward_words:
        raise ValueError(
            "model must be a mixture of experts, or latent attention: one of "
            f"{', '.join(LATENTS)}, or sizes; got {shown(model)}."
        )
    return config


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
    if isinstance(chosen, MixtureCost):
        words += (
            f"; a step of {in_words(chosen.step_seconds, 'seconds')} reads {chosen.touched:.0f} of "
            f"{chosen.experts} experts per layer, {in_words(chosen.expert_bytes, 'bytes')} on each "
            f"chip, and attention takes {in_words(chosen.attention_seconds, 'seconds')} of it"
        )
    return words + "."
