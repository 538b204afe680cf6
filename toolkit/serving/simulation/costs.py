"""Seconds of an iteration: a formula, fitted to a run here, or modelled from a chip's figures."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from toolkit._checks import checked
from toolkit.looped import LoopedConfig, active_parameter_count, cache_bytes_per_token
from toolkit.looped.parameters import token_flops
from toolkit.planning import plan_decode
from toolkit.planning.clusters import cluster
from toolkit.serving.runs import Turn, Work


@dataclasses.dataclass(frozen=True)
class IterationCost:
    """Seconds of an iteration, as a sum over what it does.

        fixed + per_piece pieces + per_token sum(n) + per_pair sum(n (b + (n + 1) / 2))
              + step [rows > 0] + per_row rows + per_context sum(c)

    n new tokens of a piece after b others; c tokens of a row that writes.

    Example:
        >>> cost = IterationCost(fixed=0.01, per_token=1e-4, per_row=1e-3)
        >>> cost(Work(pieces=((100, 0),), contexts=(50, 60)))
        0.022
    """

    fixed: float = 0.0
    per_piece: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    step: float = 0.0
    per_row: float = 0.0
    per_context: float = 0.0

    def __call__(self, work: Work) -> float:
        return float(np.dot(_terms(work), dataclasses.astuple(self)))


def _terms(work: Work) -> tuple[float, ...]:
    pieces, rows = work.pieces, len(work.contexts)
    tokens = sum(new for new, _ in pieces)
    pairs = sum(new * (before + (new + 1) / 2) for new, before in pieces)
    return 1, len(pieces), tokens, pairs, rows > 0, rows, sum(work.contexts)


def opt_13b_on_a100(work: Work) -> float:
    """Seconds of OPT-13B on an A100, as DistServe's simulator has them (recorded).

    A prompt of L tokens takes 18.10 + 0.1019 L + 7.12e-6 L^2 ms; a step of r rows over c tokens
    takes 19.93 + 6.27e-4 c + 0.0385 r ms below 95 rows, else 7.17 + 5.80e-4 c + 0.158 r. Where an
    iteration does both, both are charged; the simulator lets rows beside a prompt go free.

    Args:
        work: what the iteration does.

    Returns:
        Seconds.

    Source: simdistserve of Zhong et al., "DistServe", 2024 (arXiv:2401.09670).

    Example:
        >>> round(opt_13b_on_a100(Work(((512, 0),), ())), 4)
        0.0721
    """
    tokens, rows, context = sum(n for n, _ in work.pieces), len(work.contexts), sum(work.contexts)
    squares = sum(new * (new + before) for new, before in work.pieces)
    reading = 18.10 + 0.1019 * tokens + 7.12e-6 * squares if tokens else 0.0
    small, large = 19.93 + 6.27e-4 * context + 0.0385 * rows, 7.17 + 5.8e-4 * context + 0.158 * rows
    writing = (small if rows < 95 else large) if rows else 0.0
    return (reading + writing) / 1e3


@checked
def fit_cost(turns: Sequence[Turn], *, has_fixed_slots: bool = True) -> IterationCost:
    """The cost that fits a run's turns best: least squares with coefficients of at least 0.

    Args:
        turns: of a busy run; a loop that times programs alone misses what happens between them.
        has_fixed_slots: whether a step computes all rows, taken or not, as `Engine` does. Rows and
            contexts then change nothing, and are left out.

    Returns:
        Coefficients (measured, where the run was).

    Example:
        >>> works = [Work(((n, 0),), (5,) * rows) for n in (1, 4, 8) for rows in (0, 1)]
        >>> cost = IterationCost(fixed=0.5, per_token=0.25, step=1.0)
        >>> turns = [Turn(0.0, cost(work), work, Iteration((), ())) for work in works]
        >>> round(fit_cost(turns)(Work(((6, 0),), (5,))), 3)
        3.0
    """
    from scipy.optimize import nnls

    names = [field.name for field in dataclasses.fields(IterationCost)]
    used = [name for name in names if not has_fixed_slots or name not in ("per_row", "per_context")]
    if len(turns) < len(used):
        raise ValueError(f"turns: got {len(turns)}, wanted at least {len(used)}")
    terms = np.array([_terms(turn.work) for turn in turns])[:, [names.index(n) for n in used]]
    seconds = np.array([turn.end - turn.start for turn in turns])
    scale = np.maximum(np.abs(terms).max(0), 1e-12)
    found, _ = nnls(terms / scale, seconds)
    return IterationCost(**dict(zip(used, map(float, found / scale), strict=True)))


@checked
def vary(
    cost: Callable[[Work], float], turns: Sequence[Turn], seed: int = 0
) -> Callable[[Work], float]:
    """A cost with the spread of a run: each duration is times one of the run's own ratios.

    Queues grow with the variance of service, not with its mean alone (Pollaczek and Khinchine), so
    a mean cost predicts too short a wait. Iterations with a prompt draw from those with one.

    Args:
        cost: as fitted to the turns.
        turns: of the run.
        seed: of the draws.

    Returns:
        A cost with a state of its own: make a new one for every simulation.

    Example:
        >>> work = Work((), (5,))
        >>> turns = [Turn(0.0, seconds, work, Iteration((), (0,))) for seconds in (1.0, 3.0)]
        >>> vary(lambda work: 2.0, turns)(work) in (1.0, 3.0)
        True
    """
    draw = np.random.default_rng(seed)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for turn in turns:
        if (expected := cost(turn.work)) > 0:
            ratios[bool(turn.work.pieces)].append((turn.end - turn.start) / expected)

    def varied(work: Work) -> float:
        own = ratios[bool(work.pieces)] or [1.0]
        return cost(work) * own[draw.integers(len(own))]

    return varied


@checked
def planned_cost(
    config: LoopedConfig, chips: str, *, efficiency: float = 0.5
) -> Callable[[Work], float]:
    """Seconds of an iteration from the published figures of chips (modelled).

        max(bytes read / bandwidth, FLOPs / peak) / efficiency         of softmax and latent models
        plan_decode(...).step_seconds                                  of rows of a mixture

    Args:
        config: the model, in bfloat16, whose weights an iteration reads once.
        chips: kind and number, such as "h100:8"; a model is cut evenly, and nothing is sent.
        efficiency: share of both rates that is reached, of all but `plan_decode`.

    Returns:
        A cost for `Instance`.

    Cost: `plan_decode` once per power of two of rows and of context.

    Source: Yuan et al., "LLM inference unveiled: survey and roofline model insights", 2024
        (arXiv:2402.16363).

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> config = LoopedConfig.tiny("full", width=64, heads=4)
        >>> planned_cost(config, "h100:1")(Work(((512, 0),), ())) > 0
        True
    """
    where = cluster(chips)
    rates = [efficiency * where.chips * x for x in
             (where.chip.bytes_per_second, where.chip.flops_per_second)]  # fmt: skip
    bandwidth, peak = rates
    weights = 2 * config.loops * active_parameter_count(config)
    per_token, per_context = token_flops(config, 0), cache_bytes_per_token(config)
    per_pair = (token_flops(config, 1024) - per_token) / 1024
    is_mixture = "moe" in config.feed_forward_words

    @functools.cache
    def rows_of_mixture(rows: int, context: int) -> float:
        return plan_decode(config, rows, context, chips).costs[0].step_seconds  # type: ignore[attr-defined]

    def seconds(work: Work) -> float:
        _, _, tokens, pairs, _, rows, context = _terms(work)
        written = 0.0
        if is_mixture and rows:
            size = [2 ** math.ceil(math.log2(x)) for x in (rows, max(1, context / rows))]
            written, rows, context = rows_of_mixture(*size), 0, 0
        flops = (tokens + rows) * per_token + (pairs + context) * per_pair
        if not tokens + rows:
            return written
        return written + max((weights + context * per_context) / bandwidth, flops / peak)

    return seconds
