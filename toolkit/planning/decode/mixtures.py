r"""Decoding with a whole mixture of experts on several chips.

    touched  = E (1 - (1 - k/E)^tokens)               distinct experts of a layer, at an even load
    products = max(bytes of weights / bandwidth, FLOPs / peak)      of each kind of weights
    layer    = attention + products + what starts and waits, beside its two exchanges

Rows are cut over groups of chips, and heads and cached tokens within a group. Experts are spread
over all chips, or over some of them, and then several sets of chips hold all experts. With more
than one group, tokens go to their experts and back by all-to-alls, and a group's chips share the
rest; otherwise every chip has all rows, its part of all weights, and an all-reduce adds the parts
up. Few rows touch few experts, so the weights that a step reads grow with the batch until all
experts are touched. Exchanges may be hidden: with "two" batches the halves of the rows take turns,
one computes while the other is exchanged, and weights are read twice; in a "single" batch tokens
arrive while the shared expert computes, and leave while the experts' last product does.
"""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

from toolkit.looped import LoopedConfig, parameter_count
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS
from toolkit.looped.parameters import layer_parameters
from toolkit.planning.clusters import Cluster
from toolkit.planning.decode.cuts import (
    Degrees,
    Share,
    latent_schemes,
    merges,
    mixed_degrees,
    pure_degrees,
    share_of,
)
from toolkit.planning.decode.latent import (
    BYTES,
    SENT,
    DecodeCost,
    check_rows,
    collective_seconds,
    cost_of,
)
from toolkit.planning.decode.rates import SERVED, exchange_seconds
from toolkit.planning.mixtures import SCALE_BYTES
from toolkit.planning.models import expert_hidden, kinds_of
from toolkit.planning.time.products import product_rate
from toolkit.planning.time.seconds import Constants, overlapped

OVERLAPS = ("none", "single", "two")


@dataclasses.dataclass(frozen=True)
class MixtureCost(DecodeCost):
    """A `DecodeCost` of whole layers: its figures per layer are means over all layers.

    Attributes:
        expert: chips over which a whole set of experts is spread.
        touched: distinct experts that the rows of these chips choose, expected at an even load.
        experts: experts of a mixture.
        expert_bytes: weights of experts that a chip reads in a step.
        attention_seconds: the part of attention in a step.
        overlap: how exchanges are hidden: "none", in a "single" batch, or by "two" of them.
        step_seconds: one pass of every row through the model, with what drafts its tokens.
        tokens_per_second: of all chips.
    """

    expert: int
    touched: float
    experts: int
    expert_bytes: float
    attention_seconds: float
    overlap: str
    step_seconds: float
    tokens_per_second: float

    @property
    def name(self) -> str:
        """The degrees of attention and of experts, and how exchanges are hidden."""
        words = f"{super().name}, expert {self.expert}"
        return words if self.overlap == "none" else f"{words}, {self.overlap} batch"


def touched_experts(experts: int, chosen: int, rows: int) -> float:
    """Distinct experts that some rows choose, expected if all are chosen alike."""
    return (
        experts * -math.expm1(rows * math.log1p(-chosen / experts)) if chosen < experts else experts
    )


def mixture_schemes(config: LoopedConfig, chips: int) -> list[tuple[str, int, Degrees]]:
    """The schemes of attention, with slices and degrees, that these chips can run."""
    if latent := _latent(config):
        return latent_schemes(latent, chips)
    schemes = ("replicate", "data", "dcp") if config.heads % chips == 0 else ("data",)
    plain = [(scheme, 1, pure_degrees(scheme, chips)) for scheme in schemes]
    return plain + [("mixed", 1, cut) for cut in mixed_degrees(chips, config.heads)]


def expert_degrees(config: LoopedConfig, degrees: Degrees, chips: int) -> list[int]:
    """Over how many chips a set of experts may be spread: whole groups, and at least one expert
    on a chip."""
    found = [
        chips // sets
        for sets in (2**power for power in range(chips.bit_length()))
        if degrees.data % sets == 0
    ]
    return [each for each in found if each <= config.moe.experts] or found[-1:]


def mixture_cost(
    config: LoopedConfig,
    batch: int,
    context: int,
    where: Cluster,
    *,
    scheme: str,
    slices: int,
    degrees: Degrees,
    expert: int | None = None,
    redundant: int = 0,
    drafted: int = 0,
    accepted: float = 0.0,
    overlap: str = "none",
    link: float | None = None,
    weights: str = "bfloat16",
    cache: str = "bfloat16",
    imbalance: float = 1.0,
    rates: Constants = SERVED,
) -> MixtureCost:
    """The cost of one step of every row through the whole model, and the memory of a chip.

    `redundant` experts are second copies in every set. A step checks `drafted` tokens per row
    beside the next one and keeps `accepted` of them on average; drafting one takes one layer more.
    """
    check_rows(batch, context, link, weights, cache)
    kinds, chips, chip, size = kinds_of(config), where.chips, where.chip, BYTES[weights]
    expert, group, queries = expert or chips, degrees.group, 1 + drafted
    rows, passes = math.ceil(batch / degrees.data), 2 if overlap == "two" else 1
    share, cached = _attention(config, scheme, slices, degrees, rows, context)
    attention = cost_of(
        share, len(config.layers), where, rows, cached, 0.0, scheme=scheme, slices=slices,
        degrees=degrees, link=link, weights=weights, cache=cache, rates=rates, queries=queries,
    )  # fmt: skip

    def products(parameters: float, flops: float) -> float:
        moving = passes * size * parameters / chip.bytes_per_second / rates.memory
        return max(moving, flops / product_rate(chip, weights) / rates.matmul)

    moe, fed = config.moe, [fed for _, fed in kinds]
    layers, mixtures = len(kinds), fed.count("moe")
    each = 3 * config.width * expert_hidden(config)
    touched = touched_experts(moe.experts, moe.chosen, math.ceil(batch * queries * expert / chips))
    own = min(imbalance * touched, moe.experts) * (1 + redundant / moe.experts) / expert * each
    routed = 2 * each * imbalance * batch * queries * moe.chosen / chips
    # What every token passes beside the experts, in all layers.
    beside = sum(FEED_FORWARDS[word].parameters(config)[1] for word in fed)
    beside -= mixtures * moe.chosen * each
    head, whole = config.vocabulary * config.width / chips, beside / group
    of_experts = mixtures * products(own, routed)
    of_head = products(head, 2 * batch * queries * head)
    of_others = products(whole, 2 * rows * queries * whole)

    # Tokens to experts and back, if a group's chips do not have all of them; sums within a group.
    sums = SENT * rows * queries * config.width
    moved = [("all-reduce", float(sums))] if group > 1 else []
    summed = layers * collective_seconds(where, "all-reduce", sums, group, link, rates)
    exchanged = 0.0
    if degrees.data > 1:
        tokens = imbalance * rows * queries / group * moe.chosen * config.width
        there = tokens * (1 + SCALE_BYTES if weights == "float8" else SENT)
        moved += [("all-to-all", there), ("all-to-all", SENT * tokens)]
        exchanged = mixtures * sum(
            exchange_seconds(where, sent, expert, rates, link) for sent in (there, SENT * tokens)
        )

    computing = layers * (attention.seconds - attention.collective_seconds + rates.launch)
    computing += of_experts + of_others
    # The last of an expert's three products, and the shared experts.
    beside_exchange = {"none": 0.0, "single": of_experts / 3 + of_others, "two": computing}[overlap]
    together = computing - beside_exchange
    together += overlapped(beside_exchange, exchanged, rates.slowdown)
    sent = layers * attention.collective_seconds + summed
    inner = together + sent
    step = inner + of_head + drafted * (inner / layers + of_head)

    # Experts are where they are computed with, tables are spread evenly, and so is the rest.
    rest = _outside_attention(config) - beside - mixtures * moe.experts * each
    others = rest / chips + whole + mixtures * (moe.experts + redundant) / expert * each
    memory = attention.memory_bytes + size * others
    flops = mixtures * routed + 2 * rows * queries * whole + 2 * batch * queries * head
    read = mixtures * own + whole + head
    return MixtureCost(
        **{
            **{f.name: getattr(attention, f.name) for f in dataclasses.fields(DecodeCost)},
            "weight_bytes": attention.weight_bytes + size * read / layers,
            "flops": attention.flops + flops / layers,
            "seconds": step / layers,
            "collectives": (*attention.collectives, *moved),
            "collective_seconds": (sent + together - min(together, computing)) / layers,
            "memory_bytes": memory,
            "fits": memory <= chip.memory_bytes,
        },
        expert=expert,
        touched=touched,
        experts=moe.experts,
        expert_bytes=size * mixtures * own,
        attention_seconds=layers * attention.seconds,
        overlap=overlap,
        step_seconds=step,
        tokens_per_second=batch * (1 + accepted) / step,
    )


@functools.lru_cache
def _outside_attention(config: LoopedConfig) -> int:
    words = Counter(word for word, _ in kinds_of(config))
    mixers = sum(count * layer_parameters(word, config) for word, count in words.items())
    return parameter_count(config) - mixers


def _latent(config: LoopedConfig):
    words = set(config.layers)
    if words == {"mla"}:
        return dataclasses.replace(LAYERS["mla"].sizes_of(config), layers=len(config.layers))
    if words - {"full", "window"}:
        raise ValueError(
            f"model: decoding is modelled for mixtures of softmax or mla layers alone; got "
            f"{', '.join(sorted(words))}"
        )
    return None


def _attention(
    config: LoopedConfig, scheme: str, slices: int, degrees: Degrees, rows: int, context: int
) -> tuple[Share, float]:
    """A chip's share of a layer, and cached tokens of its rows."""
    if latent := _latent(config):
        return share_of(latent, scheme, degrees, slices), rows * context
    options: list[Any] = [config.options[word] for word in config.layers]
    seen = [min(context, getattr(own, "sliding_window", context)) for own in options]
    size = options[0].head_size or config.width // config.heads
    heads, keys = config.heads, options[0].key_value_heads or config.heads
    of_queries, of_keys = 2 * config.width * heads * size, 2 * config.width * keys * size
    some = max(1 / keys, 1 / degrees.tensor)  # of the key heads, at least one
    moved = merges(degrees, heads * size, heads * (size + 1), config.width)
    parameters = of_queries / degrees.group + of_keys * some
    share = Share(
        parameters, 2 * size * keys * some / degrees.dcp, 4 * size * heads / degrees.group, moved
    )
    return share, rows * sum(seen) / len(config.layers)
