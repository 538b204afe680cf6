"""Which prefix to forget: caches of workflows, whose next agent can be predicted (PBKV).

A workflow calls one agent after another, each with its own prefix; a call finds its prefix if it is
still in the cache. Prefixes are of one size here, so that Belady's rule is optimal.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float

from toolkit._annotations import AtLeast
from toolkit._checks import check_choice, checked


class AgentCall(NamedTuple):
    """An agent that a workflow calls: the prefix is (workflow, agent).

    Example:
        >>> AgentCall(workflow=0, agent=2, is_last=False).agent
        2
    """

    workflow: int
    agent: int
    is_last: bool


@checked
def draw_workflows(
    chain: Float[np.ndarray, "agents agents"], workflows: int, steps: int,
    together: Annotated[int, AtLeast(1)],
    draw: np.random.Generator,
) -> list[AgentCall]:  # fmt: skip
    """Calls of workflows that walk through a Markov chain, some at a time in random order.

    Args:
        chain: chances of the next agent, rows that sum to 1.
        workflows: how many in all.
        steps: calls of each.
        together: workflows at a time.
        draw: random numbers.

    Returns:
        The calls in order.

    Example:
        >>> import numpy as np
        >>> calls = draw_workflows(np.eye(2), 3, 2, 1, np.random.default_rng(0))
        >>> [call.workflow for call in calls]
        [0, 0, 1, 1, 2, 2]
    """
    _check_chain(chain)
    agents = len(chain)
    running: dict[int, tuple[int, int]] = {}
    calls, begun = [], 0
    while begun < workflows or running:
        while begun < workflows and len(running) < together:
            running[begun] = int(draw.integers(agents)), 0
            begun += 1
        number = sorted(running)[draw.integers(len(running))]
        agent, step = running.pop(number)
        calls.append(AgentCall(number, agent, step + 1 == steps))
        if step + 1 < steps:
            running[number] = int(draw.choice(agents, p=chain[agent])), step + 1
    return calls


@checked
def fit_chain(calls: Sequence[AgentCall], agents: Annotated[int, AtLeast(1)]) -> np.ndarray:
    """Chances of the next agent from past workflows, every pair counted once more than seen.

    Args:
        calls: of past workflows, in order.
        agents: how many there are.

    Returns:
        [agents, agents], rows that sum to 1.

    Example:
        >>> fit_chain([AgentCall(0, 0, False), AgentCall(0, 1, True)], agents=2)[0].tolist()
        [0.3333333333333333, 0.6666666666666666]
    """
    counts, last = np.ones((agents, agents)), dict[int, int]()
    for workflow, agent, _ in calls:
        if workflow in last:
            counts[last[workflow], agent] += 1
        last[workflow] = agent
    return counts / counts.sum(axis=1, keepdims=True)


Score = Callable[[tuple[int, int], int], Hashable]
"""What is forgotten first: (prefix, place of the call) -> the least is forgotten."""


@checked
def hit_rate(
    calls: Sequence[AgentCall], slots: int, policy: str, chain: np.ndarray | None = None, *,
    horizon: int = 3, decay: float = 0.7,
) -> float:  # fmt: skip
    """The share of calls whose prefix is in a cache of some slots.

        score(f, a) = sum_h=1..horizon decay^h (Q^h)[state of f, a],   0 once f has ended

    Args:
        calls: in order.
        slots: prefixes that the cache holds.
        policy: "lru" forgets the longest unused; "predicted" the least score, then the longest
            unused; "conservative" the least score among the longer unused half; "belady" the next
            used last, which knows the future.
        chain: Q, for the two that predict.
        horizon: calls to look ahead.
        decay: of their weight.

    Returns:
        A share in [0, 1].

    Source: PBKV, 2025, for prediction by workflows; the score is ours. Belady, "A study of
        replacement algorithms", 1966.

    Example:
        >>> calls = [AgentCall(0, 0, False), AgentCall(0, 1, False), AgentCall(0, 0, True)]
        >>> round(hit_rate(calls, 2, "lru"), 2)
        0.33
    """  # fmt: skip
    if slots < 1:
        raise ValueError(f"slots: got {slots}, wanted at least 1")
    check_choice("policy", policy, ("lru", "predicted", "conservative", "belady"))
    ahead = np.zeros(())
    if policy in ("predicted", "conservative"):
        if chain is None:
            raise ValueError(f"chain: got None, and {policy!r} predicts; wanted chances")
        _check_chain(chain)
        powers = [np.linalg.matrix_power(chain, h) for h in range(1, horizon + 1)]
        ahead = np.sum([decay**h * power for h, power in enumerate(powers, 1)], axis=0)
    uses: dict[tuple[int, int], list[int]] = {}
    for place, call in reversed(list(enumerate(calls))):
        uses.setdefault(call[:2], []).append(place)
    state: dict[int, int] = {}
    used: dict[tuple[int, int], int] = {}  # prefix -> its last call
    hits = 0
    for place, (workflow, agent, is_last) in enumerate(calls):
        prefix = workflow, agent
        uses[prefix].pop()
        hits += prefix in used
        if prefix not in used and len(used) == slots:
            oldest = sorted(used, key=used.__getitem__)

            def score(own: tuple[int, int]) -> float:
                return float(ahead[state[own[0]], own[1]]) if own[0] in state else 0.0

            if policy == "belady":
                gone = max(used, key=lambda own: uses[own][-1] if uses[own] else math.inf)
            elif policy == "lru":
                gone = oldest[0]
            else:
                among = oldest if policy == "predicted" else oldest[: max(1, len(oldest) // 2)]
                gone = min(among, key=score)  # the first of equals is the longest unused
            del used[gone]
        used[prefix] = place
        if is_last:
            state.pop(workflow, None)
        else:
            state[workflow] = agent
    return hits / len(calls)


def _check_chain(chain: np.ndarray) -> None:
    if (chain < 0).any() or not np.allclose(chain.sum(axis=1), 1):
        raise ValueError("chain: its rows must be chances that sum to 1")
