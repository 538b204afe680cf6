"""The requests and the engines of the instruments of serving: Llama 3 8B on two H100, modelled."""

import functools

import numpy as np

from toolkit.looped import cache_bytes_per_token
from toolkit.planning import cluster
from toolkit.planning.models import model_of
from toolkit.serving import (
    Instance,
    PrefillFirst,
    Run,
    Scheduler,
    Served,
    Static,
    TracedRequest,
    WriteOnly,
    planned_cost,
    simulate,
)

MODEL, CHIP, CHIPS = "llama-3-8b", "h100:1", 2
PAGE = 16  # tokens
BATCH = 2048  # tokens of prompts that are read together where they are read alone
POLICIES = {
    "static": "batch waits for its longest",
    "first": "prompts first",
    "chunks": "prompts in chunks",
    "pools": "two pools",
}
ORDERS = {
    "arrival": lambda job: (job.arrival, job.number),
    "shortest": lambda job: (job.output, job.number),
}


@functools.cache
def requests_at_one_per_second(count: int) -> tuple[TracedRequest, ...]:
    """Poisson arrivals; prompts and texts of lognormal lengths, about 350 and 40 tokens."""
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.exponential(1, count))
    prompts = np.clip(draw.lognormal(np.log(300), 0.6, count), 8, 1000).astype(int)
    outputs = np.clip(draw.lognormal(np.log(30), 0.8, count), 2, 128).astype(int)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return tuple(TracedRequest(*row) for row in rows)


@functools.cache
def _cost():
    return planned_cost(model_of(MODEL), CHIP)


@functools.lru_cache(512)
def served(
    policy: str, rate: float, count: int, *, order: str = "arrival", budget: int = 256,
    slots: int = 16, pages: int = 1024, evicts: bool = False,
) -> Run[Served]:  # fmt: skip
    """A run of the first requests at a rate, on two chips; slots and pages are a chip's."""
    key = ORDERS[order]
    how = {"room": pages * PAGE, "reserves": "written" if evicts else "all"}

    def instance(scheduler: Scheduler, role: str = "both") -> Instance:
        seats = None if role == "prefill" else slots
        return Instance(scheduler, _cost(), seats, role=role, **how)  # type: ignore[arg-type]

    if policy == "pools":
        instances = [
            instance(PrefillFirst(BATCH, order=key), "prefill"),
            instance(WriteOnly(order=key), "decode"),
        ]
    else:
        make = {"static": (Static, BATCH), "first": (PrefillFirst, BATCH),
                "chunks": (Scheduler, budget)}[policy]  # fmt: skip
        instances = [instance(make[0](make[1], order=key)) for _ in range(CHIPS)]
    trace = [entry._replace(arrival=entry.arrival / rate)
             for entry in requests_at_one_per_second(count)]  # fmt: skip
    link = cluster("h100:2").link(1, CHIPS)
    sent = cache_bytes_per_token(model_of(MODEL)) / link.bytes_per_second
    return simulate(trace, instances, seconds_per_token_sent=sent)
