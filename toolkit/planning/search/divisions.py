"""The divisions of a cluster's chips that divide a model and its batch."""

import math
from collections.abc import Iterator

from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import Cluster
from toolkit.planning.model_checks import check_model
from toolkit.planning.strategy import Strategy

LARGEST_TENSOR = 64
_DISPATCHES = ("all_to_all", "gather")
LEAST_CONTEXT = 1024  # tokens of a sequence that a chip has at least


def bases_of(
    config: LoopedConfig,
    where: Cluster,
    batch: int,
    length: int,
    capacity: float,
    *,
    beyond_built: bool = False,
) -> Iterator[Strategy]:
    """Every division of the chips that divides the model and the batch, of a mixture of experts
    with every number of shards of the experts and every dispatch that a plan may choose; also such
    as are modelled only, with `beyond_built`."""
    whole, has_experts = Strategy(capacity=capacity), "moe" in config.feed_forward_words
    is_tpu = where.chip.name.startswith("TPU")
    for pipeline in divisors(where.chips):
        for tensor in divisors(where.chips // pipeline):
            inner = where.chips // pipeline // tensor
            if tensor > LARGEST_TENSOR:
                continue
            contexts = [n for n in divisors(inner) if n == 1 or length // n >= LEAST_CONTEXT]
            cuts = (
                (context, data)
                for context in (contexts if beyond_built else contexts[:1])
                if batch % (inner // context) == 0
                for data in divisors(inner // context)
            )
            for context, data in cuts:
                cut = {"data": data, "fsdp": inner // context // data, "tensor": tensor}
                cut |= {"context": context}
                if beyond_built and not is_tpu and tensor > 1:
                    cut |= {"overlapped": "tensor"}
                if pipeline > 1 and config.loops > 1:  # every loop passes all devices
                    cut |= {"schedule": "breadth-first", "chunks": config.loops}
                base = whole.changed(**cut, pipeline=pipeline)
                ways = _DISPATCHES + ("by_host",) * (beyond_built and not is_tpu)
                bases = [base, *(_with_experts(base, ways) if has_experts else ())]
                fits = [each for each in bases if _divides(config, each, batch, length)]
                if not fits and not has_experts and context == 1:
                    break
                yield from fits


def _with_experts(base: Strategy, ways: tuple[str, ...]) -> Iterator[Strategy]:
    for expert in base.expert_degrees[1:]:
        for dispatch in ways:
            yield base.changed(expert=expert, dispatch=dispatch)


def _divides(config: LoopedConfig, base: Strategy, batch: int, length: int) -> bool:
    try:
        check_model(config, base, batch, length)
    except ValueError:
        return False
    return True


def sharded_ways(base: Strategy, beyond_built: bool) -> list[dict[str, bool]]:
    """What of the optimiser's state and the gradients the replicas may cut."""
    found = [{"shard_optimizer": False}]
    if base.for_parameters.data > 1 or base.data > 1:
        found.append({"shard_optimizer": True})
        if beyond_built:
            found.append({"shard_optimizer": True, "shard_gradients": True})
    return found


def degrees_of(strategy: Strategy) -> tuple[int | str, ...]:
    """What tells one division from another."""
    degrees = strategy.data, strategy.fsdp, strategy.context, strategy.tensor, strategy.pipeline
    return *degrees, strategy.expert, strategy.dispatch


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
