"""The results of probes: the ends of their curves, and the best peak rate."""

from dataclasses import dataclass, field

import numpy as np

from toolkit._pytrees import register_dataclass
from toolkit.lr.fits.peak import PeakRate, find_peak
from toolkit.lr.protocol import Controller

PROBING, PLANNED = range(2)  # stages
EVIDENCE = 20  # steps; shorter probes see the harm of large steps, but not yet the benefit


@register_dataclass
@dataclass(frozen=True)
class ProbeController(Controller):
    """The state of `ProbeThenDecay`, in addition to the `Controller`."""

    # [remaining steps] float32, the rates of the run; empty before it is planned
    plan: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    stage: int = PROBING
    extended: int = 0  # how often the search has gone beyond its range
    first_loss: float = np.inf  # before any step; infinity until known
    # [candidates for the peak, points], the ends of their curves on the same batches
    ends: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


def loss_at_start(controller: ProbeController, losses: np.ndarray) -> float:
    """The loss before any step, recorded from the first answer."""
    known = controller.first_loss
    return known if np.isfinite(known) else float(losses[0, 0])


def best_peak(controller: ProbeController) -> PeakRate:
    """The peak among the candidates; the lowest rate if all diverged."""
    rates = controller.table["rate"]
    peak = find_peak(rates, controller.ends)
    return PeakRate(float(np.log(rates.min())), -1) if peak is None else peak


def is_inconclusive(controller: ProbeController, peak: PeakRate) -> bool:
    """Whether the lowest rate is best in probes that are too short and did not diverge."""
    is_short = controller.table["steps"][0] < EVIDENCE
    return bool(peak.edge == -1 and is_short and np.isfinite(controller.ends).all())
