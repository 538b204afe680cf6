"""Policies of serving, each with what its paper claims: simulated, with requests drawn by chance.

Orders by expected length (TIE) wait for eight slots of unit speed at nine tenths of the load, with
log-t lengths of three degrees of freedom. Prefixes are forgotten by recency or by prediction (PBKV)
in a cache of eight slots; branches stop when four have ended (SART); samples go to the slowest of
eight prompts (DARTS). Pools that read and write (DistServe) and engines that do both get 600
requests, twelve per second, on two and two chips. Replicas of several sizes (OServe) share eight
chips. Nothing is timed: seconds are the simulator's.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.verdicts import Claim, above, below, fails
from toolkit.serving import (
    LogStudent,
    Pools,
    TracedRequest,
    Work,
    attainment,
    draw_workflows,
    first_of,
    fit_chain,
    hit_rate,
    mix_replicas,
    serve_in_order,
    simulate,
    spread_samples,
)

JOBS, SLOTS, MOST, THRESHOLD = 10_000, 8, 4096, 500
WAIT, PER_TOKEN, HITS, TIME, TOKENS = "mean wait", "wait per token", "hits", "time", "tokens"
KEPT, LOAD = "requests within bounds", "load over that of like replicas"
SLOWEST = "slowest prompt over even"


@dataclass(frozen=True)
class Setting:
    """A system and one of its policies."""

    system: str
    policy: str


def _order(policy: str, draw: np.random.Generator) -> Outcome:
    location, scale = draw.choice([3.5, 4.5, 5.5], JOBS), draw.choice([0.2, 1.2], JOBS)
    noise = draw.standard_t(3, JOBS)
    lengths = np.minimum(np.ceil(np.exp(location + scale * noise)), MOST)
    arrivals = np.cumsum(draw.exponential(lengths.mean() / 0.9 / SLOTS, JOBS))
    laws = {pair: LogStudent(*pair, 3.0, MOST)
            for pair in itertools.product((3.5, 4.5, 5.5), (0.2, 1.2))}  # fmt: skip
    index = {
        "expected": lambda law: law.expected,
        "median": lambda law: law.median,
        "tail": lambda law: law.tail_index(THRESHOLD),
    }
    keys = arrivals if policy == "arrival" else lengths
    if policy in index:
        by_law = {pair: index[policy](law) for pair, law in laws.items()}
        keys = np.array([by_law[pair] for pair in zip(location, scale, strict=True)])
    waits = serve_in_order(arrivals, lengths, keys, SLOTS)
    return {WAIT: float(waits.mean()), PER_TOKEN: float((waits / lengths).mean())}


def _forget(policy: str, draw: np.random.Generator) -> Outcome:
    found = []
    for _ in range(4):
        chain = draw.dirichlet(np.full(6, 0.35), 6)
        past, calls = (draw_workflows(chain, 60, 12, 6, draw) for _ in range(2))
        found.append(hit_rate(calls, 8, policy, fit_chain(past, 6)))
    return {HITS: float(np.mean(found))}


def _branch(policy: str, draw: np.random.Generator) -> Outcome:
    branches = draw.lognormal(-0.5, 1.0, (2000, int(policy)))
    ends = np.sort(branches, axis=1)[:, 3]
    return {TIME: float(ends.mean()),
            TOKENS: float(np.minimum(branches, ends[:, None]).sum(axis=1).mean())}  # fmt: skip


def _spread(policy: str, draw: np.random.Generator) -> Outcome:
    from scipy import stats

    laws = [stats.expon(scale=scale) for scale in draw.lognormal(0, 1, 8)]

    def slowest(counts: list[int]) -> float:
        return max(first_of(law, n, 2)[0] for law, n in zip(laws, counts, strict=True))

    even = [4] * len(laws)
    counts = spread_samples(laws, 2, sum(even)) if policy == "adapted" else even
    return {SLOWEST: slowest(counts) / slowest(even)}


def _seconds(work: Work) -> float:
    read = sum(new for new, _ in work.pieces)
    rows = 6e-4 * sum(work.contexts) + 0.04 * len(work.contexts)
    return (20 + 0.1 * read + rows) / 1e3


def _place(policy: str, draw: np.random.Generator) -> Outcome:
    count = 600
    arrivals = np.cumsum(draw.exponential(1 / 12, count)).tolist()
    prompts = np.clip(draw.lognormal(np.log(300), 0.6, count), 8, 2000).astype(int).tolist()
    outputs = np.clip(draw.lognormal(np.log(120), 0.8, count), 2, 800).astype(int).tolist()
    trace = [TracedRequest(*row) for row in zip(arrivals, prompts, outputs, strict=True)]
    pools = Pools("split", (2, 2), (1, 1)) if policy == "split" else Pools(policy, (4,), (1,))
    engines = pools.instances({1: _seconds}, batch=1024, chunk=512)
    run = simulate(trace, engines, seconds_per_token_sent=0.8192e6 / 300e9)
    return {KEPT: attainment(run, first_token=0.25, largest_gap=0.08)}


def _mix(policy: str, draw: np.random.Generator) -> Outcome:
    throughput = {1: (6, 1), 2: (13, 5), 4: (24, 14)}
    found = mix_replicas(8, throughput, (draw.uniform(10, 40), draw.uniform(4, 14)))
    like = [each for each in found if sum(count > 0 for count in each.counts) == 1]
    return {LOAD: (like if policy == "like" else found)[0].scale / like[0].scale}


_SYSTEMS = {
    "TIE": (_order, ("arrival", "median", "expected", "tail", "oracle")),
    "PBKV": (_forget, ("lru", "predicted", "conservative", "belady")),
    "SART": (_branch, ("4", "8")),
    "DARTS": (_spread, ("even", "adapted")),
    "DistServe": (_place, ("joint", "chunked", "split")),
    "OServe": (_mix, ("like", "unlike")),
}


def _execute(setting: Setting, seed: int, workspace: Workspace) -> Outcome:
    return _SYSTEMS[setting.system][0](setting.policy, np.random.default_rng(1000 + seed))


def _draw(results: Results, caption: str) -> Any:
    from toolkit.experiments.kit.chart import caption_below
    from toolkit.figures import look, new_figure

    figure = new_figure(9.6, 4.4)
    shown = {"TIE": WAIT, "PBKV": HITS, "SART": TIME, "DARTS": SLOWEST, "DistServe": KEPT,
             "OServe": LOAD}  # fmt: skip
    for place, (system, name) in enumerate(shown.items()):
        axes = figure.add_axes((0.1 + 0.31 * (place % 3), 0.62 - 0.42 * (place // 3), 0.2, 0.28))
        policies = _SYSTEMS[system][1]
        means = [results.mean(f"{system}, {policy}", name) for policy in policies]
        axes.barh(range(len(policies)), means, color=look("full").colour)
        axes.set_yticks(range(len(policies)), policies)
        axes.set(title=f"{system}: {name}")
        axes.title.set_fontsize(9)
        axes.invert_yaxis()
    caption_below(figure, caption)
    return figure


EXPERIMENT = Experiment(
    name="serving",
    title="Policies of serving: does each do what its paper claims?",
    settings={
        f"{system}, {policy}": Setting(system, policy)
        for system, (_, policies) in _SYSTEMS.items()
        for policy in policies
    },
    execute=_execute,
    columns=(
        Column(WAIT, "seconds", 1),
        Column(PER_TOKEN, "1", 2),
        Column(HITS),
        Column(TIME),
        Column(TOKENS),
        Column(SLOWEST),
        Column(KEPT),
        Column(LOAD),
    ),
    claims=(
        Claim(
            "TIE: an index inflated by its tail waits less than the expectation",
            below(WAIT, ["TIE, tail"], ["TIE, expected"]),
            smallest=10.0,
            control=fails(below(WAIT, ["TIE, arrival"], ["TIE, expected"])),
        ),
        Claim(
            "TIE: the expectation waits less than the point estimate",
            below(WAIT, ["TIE, expected"], ["TIE, median"]),
            smallest=10.0,
            control=fails(below(WAIT, ["TIE, arrival"], ["TIE, oracle"])),
        ),
        Claim(
            "PBKV: predicted eviction finds more prefixes than recency",
            above(HITS, ["PBKV, predicted"], ["PBKV, lru"], 3),
            smallest=0.02,
            control=fails(above(HITS, ["PBKV, lru"], ["PBKV, belady"], 3)),
        ),
        Claim(
            "PBKV: predicting among the longer unused half only finds as much or more",
            above(HITS, ["PBKV, conservative"], ["PBKV, predicted"], 3),
            smallest=0.02,
            control=fails(above(HITS, ["PBKV, conservative"], ["PBKV, belady"], 3)),
        ),
        Claim(
            "SART: four of eight branches end sooner than four of four",
            below(TIME, ["SART, 8"], ["SART, 4"]),
            smallest=0.5,
            control=fails(below(TIME, ["SART, 4"], 1.0)),
        ),
        Claim(
            "SART: and they write no more tokens (lognormal lengths, sigma 1)",
            below(TOKENS, ["SART, 8"], ["SART, 4"]),
            smallest=0.1,
            control=fails(below(TOKENS, ["SART, 4"], 3.0)),
        ),
        Claim(
            "DARTS: samples where the wait is longest end a step sooner than as many for each",
            below(SLOWEST, ["DARTS, adapted"], ["DARTS, even"]),
            smallest=0.1,
            control=fails(below(SLOWEST, ["DARTS, even"], 0.9)),
        ),
        Claim(
            "DistServe: two pools keep more requests within bounds than prompts first",
            above(KEPT, ["DistServe, split"], ["DistServe, joint"]),
            smallest=0.05,
            control=fails(above(KEPT, ["DistServe, joint"], 0.9)),
        ),
        Claim(
            "DistServe: two pools keep more requests within bounds than chunks",
            above(KEPT, ["DistServe, split"], ["DistServe, chunked"]),
            smallest=0.05,
            control=fails(above(KEPT, ["DistServe, joint"], ["DistServe, chunked"])),
        ),
        Claim(
            "OServe: unlike replicas sustain more load than like ones",
            above(LOAD, ["OServe, unlike"], ["OServe, like"]),
            smallest=0.02,
            control=fails(above(LOAD, ["OServe, like"], 1.01)),
        ),
    ),
    draw=_draw,
    beyond="lengths and calls of real services; what a paper's own predictor adds.",
    minutes=1.0,
)
