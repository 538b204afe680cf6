"""The results of probes: losses by stage, and the best peak rate."""

from dataclasses import dataclass, field

import jax
import numpy as np

from toolkit.lr.fits.peak import PeakRate, find_peak
from toolkit.lr.protocol import Controller

GRID, AROUND_PEAK, SHAPE, PLANNED = range(4)  # stages
EVIDENCE = 40  # steps; shorter probes see the harm of large steps, but not yet the benefit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProbeController(Controller):
    """The state of `ProbeThenDecay`, in addition to the `Controller`."""

    # [remaining steps] float32, the rates of the run; empty before it is planned
    plan: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    # `GRID`, `AROUND_PEAK` or `SHAPE` while probing, `PLANNED` afterwards
    stage: int = GRID
    extended: int = 0  # how often the search has gone beyond its range
    first_loss: float = np.inf  # before any step; infinity until known


def loss_at_start(controller: ProbeController, losses: np.ndarray) -> float:
    """The loss before any step, recorded from the first answer."""
    known = controller.first_loss
    return known if np.isfinite(known) else float(losses[0, 0])


def find_stage_peak(controller: ProbeController, stage: int) -> PeakRate:
    """The peak among the candidates of a stage; the lowest rate if all diverged."""
    table, rows = controller.table, rows_of(controller, stage)
    rates, losses = table["rate"][rows], table["forecast"][rows]
    peak = find_peak(rates, losses)
    return PeakRate(float(np.log(rates.min())), -1) if peak is None else peak


def is_inconclusive(controller: ProbeController, stage: int, peak: PeakRate) -> bool:
    """Whether the lowest rate is best in probes that are too short and did not diverge."""
    rows = rows_of(controller, stage)
    is_short = controller.table["steps"][rows].max() < EVIDENCE
    return bool(
        peak.edge == -1 and is_short and np.isfinite(controller.table["forecast"][rows]).all()
    )


def rows_of(controller: ProbeController, stage: int) -> np.ndarray:
    """Which rows of the table are probes of a stage."""
    return controller.table["stage"] == stage
