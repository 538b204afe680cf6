"""Orders by expected length: TIE's log-t law, and the jobs of one queue served in any order."""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from toolkit._annotations import AtLeast
from toolkit._checks import checked

QUANTILES = (np.arange(4000) + 0.5) / 4000


@dataclass(frozen=True)
class LogStudent:
    """A length whose logarithm follows Student's t; a lognormal as `freedom` grows.

    Its mean is infinite for every finite `freedom`, so what can be ordered by is the mean of
    min(length, most).

    Attributes:
        location, scale: of the logarithm.
        freedom: degrees of freedom.
        most: the limit of tokens.

    Source: TIE, 2025, which orders by the expectation of a log-t law and adjusts it by the tail's
        probabilities; the factor could not be read, and `tail_index` is ours.

    Example:
        >>> law = LogStudent(4.5, 1.2, 3.0, most=4096)
        >>> round(law.expected, 2), round(law.beyond(500), 3)
        (321.65, 0.124)
    """

    location: float
    scale: float
    freedom: float
    most: int

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        from scipy import stats

        logs = self.location + self.scale * stats.t.ppf(QUANTILES, self.freedom)
        with np.errstate(over="ignore"):
            return np.minimum(np.ceil(np.exp(logs)), self.most)

    @property
    def median(self) -> float:
        """The point estimate, exp(location)."""
        return float(np.exp(self.location))

    @property
    def expected(self) -> float:
        """E[min(length, most)]: the order of the least mean wait on one machine (SEPT)."""
        return float(self._lengths.mean())

    def beyond(self, threshold: float) -> float:
        """P(length > threshold)."""
        from scipy import stats

        return float(stats.t.sf((np.log(threshold) - self.location) / self.scale, self.freedom))

    def tail_index(self, threshold: float) -> float:
        """expected + most P(length > threshold): inflated by its tail."""
        return self.expected + self.most * self.beyond(threshold)


@checked
def fit_lengths(lengths: Sequence[int], most: int) -> LogStudent:
    """The log-t law of greatest likelihood, of 1 to 30 degrees of freedom.

    Args:
        lengths: tokens of texts that were written.
        most: the limit of tokens.

    Raises:
        ValueError: fewer than three lengths, or one below 1.

    Example:
        >>> import numpy as np
        >>> drawn = np.random.default_rng(0).lognormal(4.0, 0.5, 500)
        >>> fit_lengths([int(x) + 1 for x in drawn], most=4096).median > 50
        True
    """
    from scipy import stats

    if len(lengths) < 3 or min(lengths) < 1:
        raise ValueError(f"lengths: got {len(lengths)}; wanted at least 3, of at least 1 token")
    freedom, location, scale = stats.t.fit(np.log(lengths))
    freedom = float(np.clip(freedom, 1, 30))
    _, location, scale = stats.t.fit(np.log(lengths), fix_df=freedom)
    return LogStudent(float(location), max(float(scale), 1e-3), freedom, most)


@checked
def serve_in_order(
    arrivals: np.ndarray,
    lengths: np.ndarray,
    keys: np.ndarray,
    slots: Annotated[int, AtLeast(1)],
) -> np.ndarray:
    """Seconds from arrival to end of jobs on slots of unit speed, without preemption.

    Args:
        arrivals: ascending [jobs].
        lengths: seconds of each job [jobs].
        keys: of the jobs that wait the one of the least key is next [jobs].
        slots: jobs at once.

    Returns:
        [jobs].

    Source: Smith's rule (1956), which is best on one slot where keys are expected lengths.

    Example:
        >>> import numpy as np
        >>> arrivals, lengths = np.zeros(2), np.array([5.0, 1.0])
        >>> serve_in_order(arrivals, lengths, keys=lengths, slots=1).tolist()
        [6.0, 1.0]
    """
    free, waiting, ends = [0.0] * slots, [], np.zeros(len(arrivals))
    place = 0
    for _ in range(len(arrivals)):
        now = heapq.heappop(free)
        if not waiting and place < len(arrivals):
            now = max(now, float(arrivals[place]))
        while place < len(arrivals) and arrivals[place] <= now:
            heapq.heappush(waiting, (keys[place], place))
            place += 1
        job = heapq.heappop(waiting)[1]
        ends[job] = now + lengths[job]
        heapq.heappush(free, float(ends[job]))
    return ends - arrivals
