"""Serving: an engine that batches requests as they come, and a simulator of it.

Engine                  continuous batching of any looped model
Request                 a prompt and how to continue it
Progress                what became of it, with times
Timed                   a request with the times of its tokens: TTFT, TPOT, the largest gap
Written                 a token as the engine hands it out
PageTable               who refers to which page of the cache; prefixes that stay
Lease                   the pages of a request
replay                  a trace through the engine, by the wall's clock or a formula's
TracedRequest           a request of a trace: arrival, prompt, output
requests_of             requests with random prompts of a trace's lengths
Run, Turn, Work         the result: turns and times; what an iteration computes
attainment              the share of requests that keep bounds on their times
goodput, Goodput        the highest rate at which enough of them do

Schedulers (`scheduler.py`, `policies.py`), which the engine and the simulator share:

Scheduler               first come, first served, prompts in chunks beside the rows that write
PrefillFirst            whole prompts first, as before chunks
Static                  a batch that waits for its longest text
WriteOnly               the decoding half of two pools (DistServe)
SchedulingPolicy        the four methods of a scheduler
Iteration, Job          what a scheduler plans, and what it is given
fused_steps             steps of requests fused in time (Flover)

The simulator (`simulation/`) and what follows from it:

simulate                a trace by formulas alone, through one or several instances
Instance, Served        an engine of a simulation; a request of it
IterationCost           seconds of an iteration as a sum
fit_cost, vary          the cost that fits a run; with the run's spread
planned_cost            from the published figures of chips
opt_13b_on_a100         DistServe's own figures
Pools, placements       engines on chips, and all choices of them (DistServe)
reading_seconds         the first token's wait in a pool that reads
mix_replicas, Mixed     unlike replicas for unlike requests (OServe); `switch_pays`
LogStudent, fit_lengths lengths with heavy tails, and orders by them (TIE)
serve_in_order          jobs of one queue in any order
first_of, prune         branches of which the first to end are kept (SART)
spread_samples          samples per prompt so that the slowest is soonest done (DARTS)
all_reduce_seconds      a star, a ring or a tree over slow links (TPI-LLM); `star_all_reduce`
window_seconds          a model whose weights pass through a window of memory; `window_bytes`
pooled_rounds           rows of equal length pooled across batches (EXSPEC); `PooledRounds`
tokens_by_least         a speculative batch that is cut to its least
hit_rate                which prefix to forget (PBKV)
draw_workflows, AgentCall    workflows of agents; `fit_chain`: their transitions
"""

from toolkit.serving.engine import Engine
from toolkit.serving.policies import PrefillFirst, Static, WriteOnly, fused_steps
from toolkit.serving.prefixes import Lease, PageTable
from toolkit.serving.replay import replay
from toolkit.serving.requests import Progress, Request, Timed, TracedRequest, Written, requests_of
from toolkit.serving.runs import Goodput, Run, Turn, Work, attainment, goodput
from toolkit.serving.scheduler import Iteration, Job, Scheduler, SchedulingPolicy
from toolkit.serving.simulation.branches import first_of, prune, spread_samples
from toolkit.serving.simulation.costs import (
    IterationCost,
    fit_cost,
    opt_13b_on_a100,
    planned_cost,
    vary,
)
from toolkit.serving.simulation.lengths import LogStudent, fit_lengths, serve_in_order
from toolkit.serving.simulation.placement import (
    Mixed,
    Pools,
    mix_replicas,
    placements,
    reading_seconds,
    switch_pays,
)
from toolkit.serving.simulation.ragged import PooledRounds, pooled_rounds, tokens_by_least
from toolkit.serving.simulation.simulate import Instance, Served, simulate
from toolkit.serving.simulation.slow_links import (
    all_reduce_seconds,
    star_all_reduce,
    window_bytes,
    window_seconds,
)
from toolkit.serving.simulation.workflows import AgentCall, draw_workflows, fit_chain, hit_rate

__all__ = [
    "AgentCall", "Engine", "Goodput", "Instance", "Iteration", "IterationCost", "Job", "Lease",
    "LogStudent", "Mixed", "PageTable", "PooledRounds", "Pools", "PrefillFirst", "Progress",
    "Request", "Run", "Scheduler", "SchedulingPolicy", "Served", "Static", "Timed", "TracedRequest",
    "Turn", "Work", "WriteOnly", "Written", "all_reduce_seconds", "attainment", "draw_workflows",
    "first_of", "fit_chain", "fit_cost", "fit_lengths", "fused_steps", "goodput", "hit_rate",
    "mix_replicas", "opt_13b_on_a100", "placements", "planned_cost", "pooled_rounds", "prune",
    "reading_seconds", "replay", "requests_of", "serve_in_order", "simulate", "spread_samples",
    "star_all_reduce", "switch_pays", "tokens_by_least", "vary", "window_bytes", "window_seconds",
]  # fmt: skip
