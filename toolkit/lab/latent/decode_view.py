"""Schemes of decoding with latent attention: memory, communication and time. Pure functions."""

from dataclasses import dataclass
from typing import Any

from toolkit.attention.latent import PRESETS
from toolkit.lab.kit.view import Data, View
from toolkit.lab.latent.holding import Held, holding
from toolkit.measure import in_words
from toolkit.planning import DecodeCost, break_even_tokens, decode_cost, plan_decode

ATTENTION_ALONE = 0  # parameters beside it: experts are removed, as in what is published
SCHEMES = ("replicate", "data", "dcp", "tpla", "tpla-lean")
CONTEXTS = tuple(2**power for power in range(10, 21))
TITLES = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite", "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi-K2",
}  # fmt: skip

PUBLISHED_CONTEXTS = tuple(2**power for power in range(10, 16))
PUBLISHED = {
    "deepseek_v3": (1.33, 1.38, 1.45, 1.57, 1.65, 1.79),
    "kimi_k2": (1.28, 1.35, 1.51, 1.55, 1.76, 1.93),
}
"""Decode throughput of TPLA over MLA by context: two H800, experts removed, largest batch that fits
(not listed). Source: Tang et al. (2025), arXiv:2508.15881, figure 3."""


@dataclass(frozen=True)
class DecodeView(View):
    """Every scheme at one setting, and how much faster than `replicate` along the context.

    Attributes:
        shards: scheme -> the chosen chip's shards.
        faster: scheme -> speed relative to `replicate` at every context of `CONTEXTS`.
        break_even: context from which TPLA reads less than `replicate`, at this batch.
        reason: the planner's reason.
    """

    model: str
    chips: str
    degree: int
    chip: int
    slices: int
    batch: int
    context: int
    costs: tuple[DecodeCost, ...]
    shards: dict[str, dict[str, Held]]
    faster: dict[str, list[float]]
    break_even: float
    reason: str

    def step_seconds(self, cost: DecodeCost) -> float:
        """Seconds of attention in all layers."""
        return PRESETS[self.model].layers * cost.seconds

    def data(self) -> Data:
        costs = self.costs
        return {
            "scheme": [cost.name for cost in costs],
            "": ["exact" if cost.is_exact else "approximate" for cost in costs],
            "step (seconds)": [self.step_seconds(cost) for cost in costs],
            "per layer (seconds)": [cost.seconds for cost in costs],
            "of it sent (seconds)": [cost.collective_seconds for cost in costs],
            "weights per layer (bytes)": [cost.weight_bytes for cost in costs],
            "cache per layer (bytes)": [cost.cache_bytes for cost in costs],
            "all layers (bytes)": [cost.memory_bytes for cost in costs],
            "fits": ["yes" if cost.fits else "no" for cost in costs],
            "collectives in a layer": [collectives_of(cost) for cost in costs],
        }

    def sentence(self) -> str:
        start = in_words(max(round(self.break_even), 1), "tokens")
        return (
            f"{TITLES[self.model]} on {self.chips}, batch {self.batch:,}, context "
            f"{in_words(self.context, 'tokens')} (modelled). {self.reason} tpla with g = "
            f"{self.slices} reads less than replicate from {start} per row on. Coloured: what chip "
            f"{self.chip} holds."
        )

    def footnote(self) -> str:
        return (
            "Modelled: attention alone, no experts, from published rates of chips and links. "
            "Recorded: Tang et al. (2025), figure 3, 2 x H800, largest batch."
        )


def collectives_of(cost: DecodeCost) -> str:
    """The collectives of a layer in words, with the bytes of each."""
    words = [f"{kind} {in_words(size, 'bytes')}" for kind, size in cost.collectives]
    return ", ".join(words) or "none"


def decode_view(
    *, model: str, kind: str, degree: int, slices: int, batch: int, context: int, chip: int
) -> DecodeView:
    """All schemes on `degree` chips of a kind; `slices` is limited to the chips."""
    chips, slices, chip = f"{kind}:{degree}", min(slices, degree), min(chip, degree - 1)

    def costs_at(tokens: int) -> tuple[DecodeCost, ...]:
        return tuple(
            decode_cost(
                model,
                batch,
                tokens,
                chips,
                scheme=scheme,
                slices=_slices(scheme, slices),
                other_parameters=ATTENTION_ALONE,
            )
            for scheme in SCHEMES
        )

    costs, along = costs_at(context), [costs_at(tokens) for tokens in CONTEXTS]
    options: dict[str, Any] = {"chips": degree, "chip": chip}
    return DecodeView(
        model=model,
        chips=chips,
        degree=degree,
        chip=chip,
        slices=slices,
        batch=batch,
        context=context,
        costs=costs,
        shards={
            scheme: holding(scheme, slices=_slices(scheme, slices), **options) for scheme in SCHEMES
        },
        faster={
            scheme: [row[0].seconds / row[at].seconds for row in along]
            for at, scheme in enumerate(SCHEMES)
        },
        break_even=break_even_tokens(model, degree, slices) / batch,
        reason=_reason(model, batch, context, chips, costs),
    )


def _slices(scheme: str, slices: int) -> int:
    return slices if scheme.startswith("tpla") else 1


def _reason(model: str, batch: int, context: int, chips: str, costs: Any) -> str:
    if not any(cost.fits and cost.is_exact for cost in costs):
        return "No exact scheme fits these chips."
    return plan_decode(model, batch, context, chips, other_parameters=ATTENTION_ALONE).reason
