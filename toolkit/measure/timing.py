"""Fair timing: contenders take turns in one process, and ratios need a passed check.

The speed of a machine drifts. If contenders were timed one after the other, the last would bear the
drift. Here every round calls each contender once, in rotating order, and the median over rounds is
reported with its spread.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from toolkit._checks import checked
from toolkit.measure.words import in_words

PASSED = "passed"
ABSENT = "absent"


class UncheckedRatioError(RuntimeError):
    """A speed ratio was requested without a passed check of equal results."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender, measured here.

    Attributes:
        name: the contender.
        median: median wall-clock seconds per call over the rounds.
        spread: interquartile range of the samples, in seconds.
        samples: wall-clock seconds per call, one a round.
        cpu_samples: processor seconds per call, one a round: all threads of this process together,
            so `cpu_median / median` is the number of cores kept busy.
        repetitions: calls averaged in one sample (above 1 for very short calls).
        check: "passed", "absent", or "failed: " and the reason.

    Example:
        >>> timing = time_contenders({"sum": lambda: sum(range(9))}, rounds=3, min_seconds=0)["sum"]
        >>> len(timing.samples), timing.check
        (3, 'absent')
    """

    name: str
    median: float
    spread: float
    samples: tuple[float, ...]
    cpu_samples: tuple[float, ...]
    repetitions: int
    check: str

    @property
    def cpu_median(self) -> float:
        """Median processor seconds per call."""
        return statistics.median(self.cpu_samples)

    def __str__(self) -> str:
        return (
            f"{self.name}: {in_words(self.median, 'seconds')} (median of {len(self.samples)}, "
            f"spread {in_words(self.spread, 'seconds')}, check {self.check}, measured here)"
        )


@checked
def time_contenders(
    contenders: Mapping[str, Callable[[], Any]], *,
    rounds: int = 7, warmup: int = 1, min_seconds: float = 0.02,
    check: Callable[[dict[str, Any]], Any] | None = None, progress: bool = False,
) -> dict[str, Timing]:  # fmt: skip
    """Time callables against each other: checked, warmed up, interleaved, blocked on.

    Sample r of a contender is (end - start) / repetitions, and the reported value is the median
    over r. Each call is waited for before the next starts, so this is latency, not throughput.

    Args:
        contenders: name -> callable without arguments that returns its result. jax arrays in any
            pytree are waited for; results of other libraries are taken as they come (a torch
            callable on a GPU must synchronise by itself).
        rounds: samples per contender.
        warmup: untimed calls per contender, after the first call that the check looks at.
        min_seconds: minimum duration of a sample; shorter calls are repeated.
        check: called once before timing with name -> result; raises or returns False if they are
            wrong. Timing continues after a failure, but `speedup` refuses.
        progress: whether to show a tqdm bar over the rounds.

    Returns:
        name -> Timing, in the order given.

    Cost: 1 + warmup + 1 + rounds * repetitions calls of each contender.

    Example:
        >>> x = jnp.ones(8)
        >>> calls = {"ours": lambda: x * 2, "peer": lambda: x + x}
        >>> def check(results):
        ...     assert (results["ours"] == results["peer"]).all()
        >>> timings = time_contenders(calls, rounds=3, min_seconds=0, check=check)
    """
    from tqdm import tqdm

    if not contenders:
        raise ValueError("contenders is empty: want at least one name -> callable")
    if rounds < 1 or warmup < 0 or not min_seconds >= 0:
        raise ValueError(
            f"rounds={rounds}, warmup={warmup}, min_seconds={min_seconds}: "
            "want rounds >= 1, warmup >= 0, min_seconds >= 0"
        )
    results = {name: jax.block_until_ready(call()) for name, call in contenders.items()}
    verdict = _judge(check, results)
    for call in contenders.values():
        for _ in range(warmup):
            jax.block_until_ready(call())
    repetitions = {
        name: max(1, math.ceil(min_seconds / max(_sample(call, 1)[0], 1e-9)))
        for name, call in contenders.items()
    }
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for round_index in tqdm(range(rounds), desc="timing", unit="round", disable=not progress):
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            seconds, cpu_seconds = _sample(contenders[name], repetitions[name])
            wall[name].append(seconds)
            processor[name].append(cpu_seconds)
    return {
        name: Timing(
            name=name,
            median=statistics.median(wall[name]),
            spread=interquartile_range(wall[name]),
            samples=tuple(wall[name]),
            cpu_samples=tuple(processor[name]),
            repetitions=repetitions[name],
            check=verdict,
        )
        for name in names
    }


@checked
def speedup(timings: Mapping[str, Timing], ours: str, peer: str) -> float:
    """How many times faster `ours` is than `peer`: median(peer) / median(ours).

    Args:
        timings: the result of `time_contenders`.
        ours: name of the contender in the denominator.
        peer: name of the contender it is compared with.

    Returns:
        The ratio of medians; above 1 means `ours` is faster.

    Raises:
        UncheckedRatioError: when the correctness check failed or there was none.

    Example:
        >>> calls = {"ours": lambda: sum(range(9)), "peer": lambda: sum(range(999))}
        >>> timings = time_contenders(calls, rounds=3, min_seconds=0, check=lambda results: None)
        >>> speedup(timings, "ours", "peer") > 1
        True
    """
    for name in (ours, peer):
        if name not in timings:
            raise ValueError(f"{name!r} was not timed: want one of {', '.join(timings)}")
        if timings[name].check != PASSED:
            raise UncheckedRatioError(
                f"no ratio of {ours!r} to {peer!r}: the correctness check is {timings[name].check}"
            )
    return timings[peer].median / timings[ours].median


@checked
def interquartile_range(samples: Iterable[float]) -> float:
    """Spread of samples, robust to outliers: Q3 - Q1.

    Args:
        samples: the numbers, at least one.

    Returns:
        Third minus first quartile (inclusive method), 0 for a single sample.

    Source: Tukey, "Exploratory Data Analysis", 1977, section 2 (the hinges).

    Example:
        >>> interquartile_range([1.0, 2.0, 3.0, 4.0, 90.0])
        2.0
    """
    values = list(samples)
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _sample(call: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    """Wall-clock and processor seconds per call."""
    cpu_start, start = time.process_time(), time.perf_counter()
    for _ in range(repetitions):
        jax.block_until_ready(call())
    end, cpu_end = time.perf_counter(), time.process_time()
    return (end - start) / repetitions, (cpu_end - cpu_start) / repetitions


def _judge(check: Callable[[dict[str, Any]], Any] | None, results: dict[str, Any]) -> str:
    if check is None:
        return ABSENT
    try:
        verdict = check(results)
    except Exception as error:  # any exception of a check is a failed check
        return f"failed: {type(error).__name__}: {error}"
    is_denied = isinstance(verdict, bool | np.bool_) and not verdict
    return "failed: the check returned False" if is_denied else PASSED
