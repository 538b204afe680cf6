"""Sequences of very different lengths: groups of chips sized to them, or equal groups.

`parallel.plan_micro_batches` (FlexSP) forms the groups; the costs come from the model of time and
memory here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from toolkit._checks import check_choice, checked
from toolkit.looped import LoopedConfig, parameter_count
from toolkit.measure import in_words
from toolkit.parallel import SequenceCosts, SequenceGroup, plan_micro_batches
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.memory.categories import layer_memory
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import model_of
from toolkit.planning.strategy import RECOMPUTE, Strategy
from toolkit.planning.time.seconds import Constants, constants_of
from toolkit.planning.time.step import layer_seconds, table_seconds

MEGABYTE, GIGABYTE = 2**20, 1e9
PROBED = 4096  # sequence length from which costs per token are derived


class SequencePlan(NamedTuple):
    """Groups of chips for sequences of different lengths.

    Attributes:
        micro_batches: the groups of each; sequences are indices into the lengths.
        seconds: of a step, modelled.
        equal_degree: chips per group if all were equal; 0 if no equal groups hold the sequences.
        equal_seconds: seconds of a step with equal groups; infinity if none hold them.
        costs: cost of a sequence, as passed to `parallel.plan_micro_batches`.

    Example:
        >>> found = plan_sequences("llama-3-8b", "h100:8", [32768, 4096, 4096, 4096])
        >>> found.seconds <= found.equal_seconds
        True
    """

    micro_batches: tuple[tuple[SequenceGroup, ...], ...]
    seconds: float
    equal_degree: int
    equal_seconds: float
    costs: SequenceCosts

    def __str__(self) -> str:
        lines = []
        for number, groups in enumerate(self.micro_batches, 1):
            words = (f"{group.degree} chips: {len(group.sequences)}" for group in groups)
            lines.append(f"micro-batch {number}, sequences of each group: {'; '.join(words)}")
        took, equal = (in_words(s, "seconds") for s in (self.seconds, self.equal_seconds))
        instead = (
            f"equal groups of {self.equal_degree}: {equal}"
            if self.equal_degree
            else "no equal groups hold them"
        )
        return "\n".join([*lines, f"{took} per step; {instead} (FlexSP; modelled)"])


@checked
def plan_sequences(
    model: Any,
    chips: str | Cluster,
    lengths: Sequence[int],
    *,
    recompute: str = "layer",
    memory: float | None = None,
    constants: Constants | None = None,
    seconds: float = 10.0,
) -> SequencePlan:
    """Divide a cluster into groups for sequences of different lengths, if that is faster.

        time of a sequence on d chips = (attention s^2 + products s) / d + all-to-alls
        tokens per chip               = (memory - 16 parameters / chips) / bytes per token

    Args:
        model: a configuration of softmax layers, or the name of one (`MODELS`).
        chips: kind and number (a power of two), such as "h100:64".
        lengths: tokens of each sequence of a step.
        recompute: "none", "elementwise" or "layer".
        memory: usable bytes per chip; None: all.
        constants: rates that chips and links achieve; None: the defaults.
        seconds: time limit of each integer program.

    Returns:
        A `SequencePlan`; no slower than equal groups of any size.

    Raises:
        ValueError: when the sequences do not fit on the devices.

    Cost: One integer program per micro-batch and size of groups.

    Source: Wang et al., "FlexSP", ASPLOS 2025.

    Example:
        >>> plan_sequences("llama-3-8b", "h100:8", [8192] * 4).costs.layers
        32
    """
    config, where = model_of(model), cluster(chips)
    check_choice("recompute", recompute, RECOMPUTE)
    if len(set(config.layers)) > 1 or config.layers[0] not in ("full", "window"):
        raise ValueError(
            "model: sequences are cut by the heads of layers of one kind, full or window"
        )
    if "moe" in config.feed_forward_words:
        raise ValueError("model: sequences of different lengths are planned for dense models only")
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be positive; got {memory}")
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be one or more numbers of at least 1 token")
    costs = sequence_costs(config, where, recompute, memory, constants_of(where, constants))
    room = costs.capacity * max(costs.bandwidth)
    if 0 < room < max(lengths):
        raise ValueError(
            f"lengths: got a sequence of {max(lengths):,} tokens; nearest that works: at most "
            f"{room:,}, on {max(costs.bandwidth)} chips together"
        )
    tried = {}
    for degrees in (tuple(costs.bandwidth), *((degree,) for degree in costs.bandwidth)):
        own = dataclasses.replace(costs, bandwidth={d: costs.bandwidth[d] for d in degrees})
        try:
            found = plan_micro_batches(lengths, devices=where.chips, costs=own, seconds=seconds)
        except ValueError:
            if degrees == tuple(costs.bandwidth):
                raise
            continue
        took = sum(max(group.milliseconds for group in groups) for groups in found) / 1e3
        tried[degrees] = took, tuple(map(tuple, found))
    equal = {degrees[0]: took for degrees, (took, _) in tried.items() if len(degrees) == 1}
    best = min(tried.values(), key=lambda each: each[0])
    degree = min(equal, key=lambda each: equal[each], default=0)
    return SequencePlan(best[1], best[0], degree, equal.get(degree, float("inf")), costs)


def sequence_costs(
    config: LoopedConfig, where: Cluster, recompute: str, memory: float | None, constants: Constants
) -> SequenceCosts:
    """The cost of a sequence on this cluster, with parameters and optimiser state fully sharded."""
    strategy = Strategy(fsdp=where.chips, recompute=recompute)
    check_model(config, strategy, where.chips, PROBED)
    word, layers = config.layers[0], len(config.layers) * config.loops
    probed = layer_memory(config, word, "swiglu", recompute, strategy, 1, PROBED)
    per_token = (probed.kept * layers + probed.working) / PROBED
    probes = [
        (
            layer_seconds(config, word, "swiglu", recompute, strategy, where, 1, length, constants),
            table_seconds(config, strategy, where, 1, length, constants),
        )
        for length in (PROBED, 2 * PROBED, 3 * PROBED)
    ]
    # A parabola through three lengths: products grow with a length, attention squared. Waves of
    # tiles, which short sequences fill in part, are no parabola: up to 4 % below 4,096 tokens.
    first, second, third = (
        1e3 * (len(config.layers) * layer.computing + table.computing) for layer, table in probes
    )
    quadratic = max(0.0, (third - 2 * second + first) / (2 * PROBED**2))  # not with windows
    linear = (second - first) / PROBED - 3 * PROBED * quadratic
    constant = first - linear * PROBED - quadratic * PROBED**2
    gathers = (probes[0][0].hidden_forward + probes[0][0].hidden_backward) * len(config.layers)
    degrees = [2**power for power in range(where.chips.bit_length()) if 2**power <= where.chips]
    return SequenceCosts(
        quadratic=quadratic,
        linear=linear,
        constant=constant + 1e3 * gathers,
        bandwidth={d: _rate(where, d) * constants.link / GIGABYTE for d in degrees},
        layers=layers,
        width=config.width,
        memory_megabytes=(memory or where.chip.memory_bytes) / MEGABYTE,
        megabytes_per_token=per_token / MEGABYTE,
        parameters=float(parameter_count(config)),
        shards=where.chips,
    )


def _rate(where: Cluster, degree: int) -> float:
    """One chip alone sends nothing, at any rate."""
    return where.link(1, degree).bytes_per_second if degree > 1 else 1.0 * GIGABYTE
