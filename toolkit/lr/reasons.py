"""The reason for a search's result, in one line."""

from typing import Any

import numpy as np

from toolkit.lr.autolrs import AutoLRS
from toolkit.lr.fits.overfitting import RECENT, overfits_since
from toolkit.lr.probe_then_decay import ProbeThenDecay, best_peak
from toolkit.lr.protocol import Controller, steps_left


def reason_of(constants: Any, controller: Any) -> str:
    """What determined the rates of this controller, with warnings."""
    table, ledger = controller.table, controller.ledger
    if not ledger.gradient_evaluations:
        return "nothing was run"
    if not len(table["rate"]):
        why = "the budget pays for no candidates: the middle of lr_range"
    elif not np.isfinite(table["forecast"]).any():
        why = f"all {len(table['rate'])} candidates diverged: the lowest rate"
    elif isinstance(constants, ProbeThenDecay):
        why = _by_probes(constants, controller)
    elif isinstance(constants, AutoLRS):
        why = _by_forecasts(constants, controller)
    else:
        why = f"chosen among {len(table['rate'])} candidates"
    # What the run saw after each piece: later checks may hide it again.
    seen = [controller.checks[: end + 1] for end in range(len(controller.checks))]
    if overfitted := [each for each in seen if overfits_since(each) is not None]:
        why += _disagreement(overfitted[0])
        is_ended = isinstance(constants, ProbeThenDecay) and not len(controller.plan)
        if is_ended and steps_left(constants, controller) >= 1:
            why += ", so that the run was ended early"
    why += _unused_validation(constants, controller)
    thrown_away = ledger.gradient_evaluations - ledger.kept_steps - int(table["steps"].sum())
    if thrown_away:
        why += f"; {thrown_away} steps of training diverged or rose, and rates are lower after them"
    return why if ledger.kept_steps else f"{why}; no training was kept"


def _unused_validation(constants: Any, controller: Controller) -> str:
    """What goes by training losses although a validation loss was given."""
    if not constants.validation_batches:
        return ""
    if isinstance(constants, ProbeThenDecay):
        parts = {
            "probes": constants.is_by_validation or not constants.probe_steps,
            "the run": constants.is_watched,
        }
        if unused := [part for part, is_used in parts.items() if not is_used]:
            return f"; the validation loss costs too much of the budget for {' and '.join(unused)}"
    elif steps_left(constants, controller) < 1 and not controller.ledger.forward_evaluations:
        return "; the validation loss was not used: no stage came to it"
    return ""


def _by_probes(constants: ProbeThenDecay, controller: Any) -> str:
    rates, steps = controller.table["rate"], controller.table["steps"].max()
    peak = best_peak(constants, controller)
    if peak.is_open:
        why = f"probes of {steps} steps leave open which rate is best"
        return f"{why}: {np.exp(peak.log_rate):.2g}, towards the middle of lr_range"
    if peak.edge:
        which = "highest" if peak.edge > 0 else "lowest"
        return (
            f"the {which} rate tried, {np.exp(peak.log_rate):.2g}, is the best in probes of "
            f"{steps} steps: a better one may lie beyond it"
        )
    return (
        f"probes of {steps} steps are best at {np.exp(peak.log_rate):.2g}, of rates from "
        f"{rates.min():.2g} to {rates.max():.2g}"
    )


def _disagreement(checks: np.ndarray) -> str:
    """Where training and validation part."""
    lowest = overfits_since(checks)
    _, *then = checks[checks[:, 0] == lowest][0]
    now = checks[-RECENT:].mean(0)[1:]
    return (
        f"; it overfits: from step {lowest} to {checks[-1, 0]:.0f} the training loss fell from "
        f"{then[0]:.3g} to {now[0]:.3g} and the validation loss rose from {then[1]:.3g} to "
        f"{now[1]:.3g}"
    )


def _by_forecasts(constants: AutoLRS, controller: Controller) -> str:
    table, edges = controller.table, 0
    stages = np.unique(table["stage"])
    for stage in stages:
        rows = np.flatnonzero(table["stage"] == stage)
        best = table["rate"][rows[np.argmin(table["forecast"][rows])]]
        edges += bool(np.isclose(best, constants.lr_range, rtol=1e-3).any())
    why = f"the lowest forecast in each of {len(stages)} stages"
    return f"{why}, in {edges} of them at the edge of lr_range" if edges else why
