"""One comparison, checked, timed and judged, as used by every suite.

A suite is a function that yields `Case`s; a case is a set of contenders that compute the same
thing, with a check. Suites run in separate processes, because the numbers of cores and host devices
cannot change once jax has started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.measure import Record, Timing, UncheckedRatioError, record, speedup, time_contenders
from toolkit.measure.timing import ABSENT, PASSED

FRACTION = "fraction of "  # how the record of a yardstick's fraction is named


@dataclass(frozen=True)
class Yardstick:
    """The best rate of the machine, timed in the same rounds as the contenders.

        fraction = (work of ours / seconds of ours) / (work of the call / seconds of the call)

    Attributes:
        name: such as "float32 matmul".
        call: function of no arguments that does `work`; its result is not compared.
        work: work of the call, in `unit`.
        ours: work of our contender, in `unit`.
        unit: "FLOP" or "byte".
        least: wanted fraction, or None.

    Example:
        >>> copy = Yardstick("copy", lambda: None, work=8e9, ours=4e9, unit="byte")
        >>> copy.fraction(our_seconds=1.0, call_seconds=1.0)
        0.5
    """

    name: str
    call: Callable[[], Any]
    work: float
    ours: float
    unit: str
    least: float | None = None

    def fraction(self, our_seconds: float, call_seconds: float) -> float:
        """Our rate as a fraction of the machine's."""
        return (self.ours / our_seconds) / (self.work / call_seconds)


@dataclass(frozen=True)
class Case:
    """Contenders that compute the same thing, with the wanted ratios.

    Attributes:
        name: what is compared, with its sizes.
        contenders: name -> function of no arguments that does the work once.
        check: raises when the contenders' results disagree; called before any timing.
        ours: the contender that is ours.
        targets: peer -> least wanted ratio (time of the peer over ours).
        limit: wanted upper bound on our seconds, or None.
        note: a fact to print with the figures, such as counted FLOPs.
        yardstick: the best rate of the machine, for comparison.
        parts: name -> function for a part of our work, timed in the same rounds; its result is not
            compared.
        floor: least seconds the work can take by a chip's published peaks (modelled), or None.
        growth: for contenders of doubling sizes: wanted upper bound on the ratio of each to the one
            before, for seconds and each of `facts`.
        facts: contender -> numbers from the compiler or a formula, as name -> (value, unit), or
            (value, unit, "measured"); called after the timing, since compiling is slow.

    Example:
        >>> calls = {"ours": lambda: jnp.ones(3) * 2, "peer": lambda: jnp.ones(3) + 1}
        >>> case = Case("two", calls, agree(1e-6), ours="ours", targets={"peer": 0.5})
        >>> case.check({name: call() for name, call in case.contenders.items()})
    """

    name: str
    contenders: Mapping[str, Callable[[], Any]]
    check: Callable[[Mapping[str, Any]], None]
    ours: str
    targets: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    note: str = ""
    yardstick: Yardstick | None = None
    parts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    floor: float | None = None
    growth: float | None = None
    facts: Callable[[], Mapping[str, Mapping[str, tuple[Any, ...]]]] = dict


@dataclass(frozen=True)
class PlannedCase:
    """A case that is built on demand.

    Attributes:
        name: of the case.
        build: makes the case of that name.

    Example:
        >>> def build(name):
        ...     return Case(name, {"ours": lambda: jnp.ones(3)}, agree(1e-6), ours="ours")
        >>> PlannedCase("one", build).build("one").name
        'one'
    """

    name: str
    build: Callable[[str], Case]


@dataclass(frozen=True)
class Suite:
    """A named list of cases and the numbers of cores it is run on.

    Attributes:
        cases: "module:function" that yields the cases, or plans of them, given the number of
            cores. The module is imported in the process that runs the suite.
        cores: the process is run once for each of these.
        summary: one line for the user.

    Example:
        >>> SUITES["softmax"].cores  # run once with one core, once with two
        (1, 2)
    """

    cases: str
    cores: tuple[int, ...]
    summary: str


def bound(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    """`function` with its arguments, as a contender."""
    return lambda: function(*args)


def in_place(step: Callable[..., tuple[Any, Any]], state: Any, *args: Any) -> Callable[[], Any]:
    """`step(state, *args) -> (out, state)` as a contender; each call updates the state in place."""
    jitted, donated = jax.jit(step, donate_argnums=0), [state]

    def call() -> Any:
        out, donated[0] = jitted(donated[0], *args)
        return jax.block_until_ready((out, donated[0]))[0]

    return call


def weighted_gradient(form: Callable[..., jax.Array], inputs: int) -> Callable[..., Any]:
    """The forward and backward pass of `form`, with a different cotangent for every output.

    d/d inputs  sum(form(*inputs) * weight)
    """

    def loss(weight: jax.Array, *args: jax.Array) -> jax.Array:
        return jnp.sum(form(*args) * weight)

    return jax.grad(loss, argnums=tuple(range(1, inputs + 1)))


@checked
def run_case(case: Case, *, rounds: int, cores: int) -> list[Record]:
    """Check, time, print and record one case.

    Args:
        case: the comparison.
        rounds: interleaved rounds a contender is timed for.
        cores: how many cores the process has, for the record.

    Returns:
        One record per contender: median seconds, with all samples; its check is "passed". Further
        records for the yardstick, our fraction of it, each part and each fact.

    Raises:
        UncheckedRatioError: when the check fails; nothing is printed or recorded then.

    Cost: About `rounds + 2` times the work of all contenders.

    Example:
        >>> calls = {"ours": lambda: jnp.ones(3) * 2, "peer": lambda: jnp.ones(3) + 1}
        >>> records = run_case(Case("two", calls, agree(1e-6), "ours"), rounds=3, cores=1)
        two  (1 core, measured here)
          ours ... ms  +- ...
          peer ... ms  +- ...   ...x the time of ours
    """
    calls = {**case.contenders, **case.parts}
    if case.yardstick is not None:
        calls[case.yardstick.name] = case.yardstick.call

    def check(results: Mapping[str, Any]) -> None:
        case.check({name: results[name] for name in case.contenders})

    timings = time_contenders(calls, rounds=rounds, check=check)
    if (verdict := timings[case.ours].check) != PASSED:
        raise UncheckedRatioError(f"no figures for {case.name}: its check {verdict}")
    print(f"\n{case.name}  ({cores} core{'s' * (cores > 1)}, measured here)")
    if case.note:
        print(f"  {case.note}")
    prefix = f"{case.name} | {cores} cores | "
    facts = case.facts()
    records = []
    before: Timing | None = None
    for name, timing in timings.items():
        line = f"  {name:<34}{1e3 * timing.median:>11.3f} ms  +- {1e3 * timing.spread:.3f}"
        if name == case.ours and case.limit is not None:
            line += _verdict(f"< {1e3 * case.limit:g} ms", timing.median < case.limit)
        if case.yardstick is not None and name == case.yardstick.name:
            line += f"   {case.yardstick.work / timing.median / 1e9:.1f} G{case.yardstick.unit}/s"
        if case.growth is not None and before is not None:
            line += _growth(timing.median / before.median, case.growth)
        if name != case.ours and name in case.contenders and case.growth is None:
            ratio = speedup(timings, case.ours, name)
            line += f"   {ratio:.2f}x the time of ours"
            if (target := case.targets.get(name)) is not None:
                line += _verdict(f">= {target:.3g}", ratio >= target)
        if name in case.parts:
            line += f"   {timing.median / timings[case.ours].median:.1%} of the time of ours"
        print(line, flush=True)
        judged = timing.check if name in case.contenders else ABSENT
        records.append(
            record(prefix + name, timing.median, "s", samples=timing.samples, check=judged)
        )
        for fact, (value, unit, *kind) in facts.get(name, {}).items():
            line = f"    {fact} {value:{',.0f' if value >= 100 else '.3g'}} {unit}"
            if case.growth is not None and before is not None:
                line += _growth(value / facts[before.name][fact][0], case.growth)
            print(line)
            kind = kind[0] if kind else "modelled"
            records.append(record(f"{prefix}{name}, {fact}", value, unit, kind=kind))
        before = timing
    seconds = timings[case.ours].median
    if case.floor is not None:
        fraction = case.floor / seconds
        print(
            f"  ours: {fraction:.0%} of the modelled floor, {1e3 * case.floor:.3f} ms", flush=True
        )
        records.append(record(f"{prefix}{FRACTION}floor", fraction, "1"))
    if (yardstick := case.yardstick) is not None:
        fraction = yardstick.fraction(seconds, timings[yardstick.name].median)
        rate = yardstick.ours / seconds / 1e9
        line = f"  ours: {rate:.1f} G{yardstick.unit}/s, {fraction:.0%} of {yardstick.name}"
        if yardstick.least is not None:
            line += _verdict(f">= {yardstick.least:.0%}", fraction >= yardstick.least)
        print(line, flush=True)
        records.append(record(f"{prefix}{FRACTION}{yardstick.name}", fraction, "1"))
    return records


def _growth(ratio: float, most: float) -> str:
    return f"   {ratio:.2f}x the one before" + _verdict(f"<= {most:g}", ratio <= most)


def _verdict(wanted: str, is_reached: bool) -> str:
    return f"   (wanted {wanted}: {'reached' if is_reached else 'NOT reached'})"
