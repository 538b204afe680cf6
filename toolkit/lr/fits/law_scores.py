"""The peak and the shape of a run, as the multi-power law fitted to the probes before it sees them.

The tail of a probe says which rate is best for a probe, and a rule of thumb moves that to the
run. The law predicts the run itself, and its loss at the end is compared instead. It is a guess:
a run is many probes long, and from a few dozen noisy steps the law has chosen peaks several times
too high. Where it has no lowest loss between the rates that it was fitted to, it says nothing that
was measured, and nothing is chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from toolkit.lr.fits.multi_power_law import MultiPowerLaw, fit_multi_power_law
from toolkit.lr.fits.peak import find_peak, first_before_a_rise
from toolkit.lr.shapes import shape_rates

SCORERS = ("tail", "multi_power_law")
PEAKS = 33  # compared between the lowest rate and the highest, before a parabola through the best
FEWEST_CURVES = 3  # to tell what a higher rate gains from what it costs

Curve = tuple[np.ndarray, np.ndarray]  # rates [steps] and losses [steps]


class LawChoice(NamedTuple):
    """What the law thinks best."""

    law: MultiPowerLaw  # as fitted
    shape: str  # of the run
    peak: float  # of the run, by which the shape is multiplied


def unbroken_curves(
    table: dict[str, np.ndarray], curves: np.ndarray, *, unsure: int
) -> list[Curve]:
    """Rates and losses of the probes that a law may be fitted to: they learned and did not break
    down.

    `table` and `curves` are a controller's. Of the stage `unsure`, whose probes are far apart,
    those above the best have broken down as likely as not and are left out.
    """
    if not curves.size:
        return []
    is_kept = np.isfinite(table["forecast"])
    rows = np.flatnonzero(table["stage"] == unsure)
    rows = rows[np.argsort(table["rate"][rows])]
    is_kept[rows[first_before_a_rise(table["forecast"][rows]) + 1 :]] = False
    parts = np.split(curves, np.cumsum(table["steps"])[:-1], axis=1)
    return [
        (rates, losses)
        for (rates, losses), end, is_sound in zip(parts, table["forecast"], is_kept, strict=True)
        if is_sound and len(rates) > 2 and (losses > 0).all() and end < losses[0]
    ]


def best_by_law(
    curves: Sequence[Curve], shapes: Sequence[str], steps: int, warmup_steps: int
) -> LawChoice | None:
    """The shape and the peak of the lowest loss at the end of a run, by the law fitted to curves.

        min over shape and peak of loss(peak * shape(steps))

    None with fewer than three curves, where a prediction is not finite or not positive, or where
    the best peak is the lowest or the highest rate of the curves.

    Source: Luo et al. (arXiv:2503.12811), section 5, who optimise every rate of the run.
    """
    if len(curves) < FEWEST_CURVES:
        return None
    law = fit_multi_power_law(curves)
    tried = [rates.max() for rates, _ in curves]
    if min(tried) == max(tried):
        return None
    peaks = np.geomspace(min(tried), max(tried), PEAKS)
    found = []
    for shape in shapes:
        unit = shape_rates(shape, steps, warmup_steps)
        with np.errstate(all="ignore"):
            losses = np.array([law.predict(peak * unit)[0] for peak in peaks])
        best = find_peak(peaks, losses)
        if best is None or not (np.isfinite(losses) & (losses > 0)).all():
            return None
        peak = float(np.exp(best.log_rate))
        with np.errstate(all="ignore"):
            loss = law.predict(peak * unit)[0]
        found.append((loss, best.edge, LawChoice(law, shape, peak)))
    _, edge, choice = min(found, key=lambda option: option[0])
    return None if edge else choice
