r"""Decoding with a whole mixture of experts on several chips.

    touched  = E (1 - (1 - k/E)^rows)                 distinct experts of a layer, at an even load
    bytes    = attention + experts touched + what every token passes, of a chip
    seconds  = attention + max(bytes / bandwidth, FLOPs / peak) + sum over collectives, per layer

Experts are spread over all chips. If attention cuts rows ("data"), tokens go to their experts and
back by all-to-alls, and every chip has the shared expert and dense layers whole; otherwise every
chip has all rows, its part of those layers, and an all-reduce adds the parts up. Few rows touch few
experts, so the weights that a step reads grow with the batch until all experts are touched.
"""

import dataclasses
import math
from typing import Any

from toolkit.looped import LoopedConfig, parameter_count
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS
from toolkit.looped.parameters import layer_parameters
from toolkit.planning.clusters import Cluster
from toolkit.planning.decode.latent import (
    BYTES,
    SENT,
    DecodeCost,
    Share,
    check_rows,
    collective_seconds,
    cost_of,
    decode_cost,
    latent_schemes,
)
from toolkit.planning.models import expert_hidden, kinds_of


@dataclasses.dataclass(frozen=True)
class MixtureCost(DecodeCost):
    """A `DecodeCost` of whole layers: its figures per layer are means over all layers.

    Attributes:
        touched: distinct experts that a mixture's rows choose, expected at an even load.
        experts: experts of a mixture.
        expert_bytes: weights of experts that a chip reads in a step.
        attention_seconds: the part of attention in a step.
        step_seconds: one token for every row, with the head.
    """

    touched: float
    experts: int
    expert_bytes: float
    attention_seconds: float
    step_seconds: float


def touched_experts(experts: int, chosen: int, rows: int) -> float:
    """Distinct experts that some rows choose, expected if all are chosen alike."""
    return (
        experts * -math.expm1(rows * math.log1p(-chosen / experts)) if chosen < experts else experts
    )


def mixture_schemes(config: LoopedConfig, chips: int) -> list[tuple[str, int]]:
    """The schemes of attention, with slices, that these chips can run."""
    if latent := _latent(config):
        return latent_schemes(latent, chips)
    schemes = ("replicate", "data", "dcp") if config.heads % chips == 0 else ("data",)
    return [(scheme, 1) for scheme in schemes]


def mixture_cost(
    config: LoopedConfig,
    batch: int,
    context: int,
    where: Cluster,
    *,
    scheme: str,
    slices: int,
    link: float | None,
    weights: str,
    cache: str,
    imbalance: float,
) -> MixtureCost:
    """The cost of one token per row through the whole model, and the memory of a chip."""
    check_rows(batch, context, link, weights, cache)
    kinds, chips, chip, size = kinds_of(config), where.chips, where.chip, BYTES[weights]
    is_cut = scheme == "data"
    rows = math.ceil(batch / chips) if is_cut else batch
    how: dict[str, Any] = {"scheme": scheme, "slices": slices, "link": link}
    how |= {"weights": weights, "cache": cache}
    attention = _attention(config, batch, rows, context, where, how)

    moe, fed = config.moe, [fed for _, fed in kinds]
    mixtures, expert = fed.count("moe"), 3 * config.width * expert_hidden(config)
    touched = touched_experts(moe.experts, moe.chosen, batch)
    experts = min(imbalance * touched, moe.experts) / chips * expert
    routed = 6 * config.width * expert_hidden(config) * imbalance * batch * moe.chosen / chips
    # What every token passes beside the experts, in all layers.
    beside = sum(FEED_FORWARDS[word].parameters(config)[1] for word in fed)
    beside -= mixtures * moe.chosen * expert
    head = config.vocabulary * config.width / chips
    whole = beside if is_cut else beside / chips
    read = mixtures * experts + whole + head
    flops = mixtures * routed + 2 * rows * whole + 2 * batch * head
    moving, computing = size * read / chip.bytes_per_second, flops / chip.flops_per_second

    kind, numbers = ("all-to-all", moe.chosen) if is_cut else ("all-reduce", 1)
    sent = SENT * rows * config.width * numbers
    exchange = collective_seconds(where, kind, sent, slices=1, rate=link)
    exchanges = mixtures * (2 if is_cut else 1) + (len(fed) - mixtures) * (not is_cut)
    exchanged = exchanges * exchange
    layers = len(kinds)
    step = layers * attention.seconds + max(moving, computing) + exchanged
    # Experts and tables are spread evenly; the rest is where it is computed with.
    mixers = sum(layer_parameters(word, config) for word, _ in kinds)
    others = (parameter_count(config) - mixers - beside) / chips + whole
    memory = attention.memory_bytes + size * others
    return MixtureCost(
        **{
            **{f.name: getattr(attention, f.name) for f in dataclasses.fields(DecodeCost)},
            "weight_bytes": attention.weight_bytes + size * read / layers,
            "flops": attention.flops + flops / layers,
            "seconds": step / layers,
            "collectives": (*attention.collectives, (kind, float(sent))),
            "collective_seconds": attention.collective_seconds + exchanged / layers,
            "memory_bytes": memory,
            "fits": memory <= chip.memory_bytes,
        },
        touched=touched,
        experts=moe.experts,
        expert_bytes=size * mixtures * experts,
        attention_seconds=layers * attention.seconds,
        step_seconds=step,
    )


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


def _attention(config, batch, rows, context, where, how) -> DecodeCost:
    if latent := _latent(config):
        return decode_cost(latent, batch, context, where, other_parameters=0.0, **how)
    chips, layers = where.chips, len(config.layers)
    options = [config.options[word] for word in config.layers]
    seen = [min(context, getattr(own, "sliding_window", context)) for own in options]
    size = options[0].head_size or config.width // config.heads
    heads, keys = config.heads, options[0].key_value_heads or config.heads
    of_queries, of_keys = 2 * config.width * heads * size, 2 * config.width * keys * size
    end = ("all-reduce", float(config.width))
    if how["scheme"] == "data":
        share = Share(of_queries + of_keys, 2 * size * keys, 4 * size * heads, ())
    elif how["scheme"] == "replicate":
        own = max(1 / keys, 1 / chips)  # of the key heads, at least one
        parameters = of_queries / chips + of_keys * own
        share = Share(parameters, 2 * size * keys * own, 4 * size * heads / chips, (end,))
    else:
        merged = ("all-gather", float(heads * size)), ("reduce-scatter", float(heads * (size + 1)))
        parameters = of_queries / chips + of_keys
        core = 4 * size * heads / chips
        share = Share(parameters, 2 * size * keys / chips, core, (*merged, end))
    return cost_of(share, layers, where, rows, rows * sum(seen) / layers, 0.0, **how)
