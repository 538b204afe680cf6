"""The protocol of a search: it requests steps, receives their losses, and keeps a ledger.

A searcher decides which rates to try next, which to keep and when to stop; it trains nothing.
`init`, `ask` and `tell` are pure functions on a plain pytree of numbers, so that any loop can run
them and any checkpoint can hold them:

    controller = init(searcher)
    while (request := ask(searcher, controller)) is not None:
        new_state, losses = ...                    # train from `state` at request.rates
        controller, is_kept = tell(searcher, controller, request, losses)
        state = new_state if is_kept else state    # a candidate's state is thrown away
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.lr.fits.peak import curve_ends

UNPAIRED = 2e-3  # relative; programs of one and of many candidates round differently
FORWARD_COST = 1 / 3  # of a gradient evaluation, which is a forward pass and a backward one of two


@register_dataclass
@dataclass(frozen=True)
class Ledger:
    """What a search has cost so far.

    Attributes:
        gradient_evaluations: steps in all, discarded candidates included.
        forward_evaluations: batches whose loss alone was computed, for validation.
        sequential_depth: steps one after another, if candidates asked together run together.
        kept_steps: steps of training that were not thrown away.

    Example:
        >>> round(Ledger(gradient_evaluations=100, forward_evaluations=6).spent, 6)
        102.0
    """

    gradient_evaluations: int = 0
    forward_evaluations: int = 0
    sequential_depth: int = 0
    kept_steps: int = 0

    @property
    def spent(self) -> float:
        """What the budget counts: gradient evaluations, and forward ones at a third."""
        return self.gradient_evaluations + FORWARD_COST * self.forward_evaluations


_ROWS = {
    "stage": np.int64,
    "steps": np.int64,
    "rate": np.float64,
    "forecast": np.float64,
    "variance": np.float64,
}


@register_dataclass
@dataclass(frozen=True)
class Controller:
    """The state of a search, of numbers and NumPy arrays only; searchers add fields.

    Attributes:
        ledger: the costs.
        rates: [kept_steps] float32, the rate of every step of training kept: the schedule.
        table: a row for each candidate evaluated, in columns [candidates]: "stage" in which;
            "steps" of it; "rate", its peak; "forecast" of the loss, infinity if it diverged;
            "variance" of that.
        checks: [checks, 3] of the kept training: step, training loss, validation loss.

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> controller = init(searcher)
        >>> request = ask(searcher, controller)
        >>> controller.rates.shape, len(controller.table["rate"])
        ((0,), 0)
    """

    ledger: Ledger = field(default_factory=Ledger)
    rates: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    table: dict[str, np.ndarray] = field(
        default_factory=lambda: {name: np.zeros(0, dtype) for name, dtype in _ROWS.items()}
    )
    checks: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))


@dataclass(frozen=True)
class Request:
    """Steps to make from the state reached, all candidates on the same batches.

    Attributes:
        kind: "warmup", "probe", "train" or "decay"; only probes are thrown away.
        rates: [candidates, steps] float32, the rate of every step; one candidate unless a probe.
        validate_every: steps between validation losses; 0 for training losses.
        asked_at: gradient evaluations of the ledger when `ask` gave it.
        is_checked: whether `tell` wants the validation loss after all steps, too.

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> request = ask(searcher, init(searcher))
        >>> request.points, request.rates.shape
        (20, (3, 20))
    """

    kind: str
    rates: np.ndarray
    validate_every: int = 0
    asked_at: int | None = None
    is_checked: bool = False

    @property
    def points(self) -> int:
        """Losses that a candidate is to report."""
        return self.rates.shape[1] // (self.validate_every or 1)


class Searcher(Protocol):
    """A search method: constants, and pure functions on its controller.

    `ask` is not called once the budget is spent, and `tell` finds the ledger and the rates of the
    controller already brought up to date: accounting is shared by all searchers.

    Attributes:
        budget: total gradient evaluations.
        validation_batches: batches per validation loss; 0 for none.

    Example:
        >>> searcher: Searcher = AutoLRS.scaled((1e-4, 1e-1), budget=1000)
        >>> searcher.budget, searcher.validation_batches
        (1000, 0)
    """

    @property
    def budget(self) -> int: ...

    @property
    def validation_batches(self) -> int: ...

    def init(self) -> Any:
        """A controller before the first step."""
        ...

    def ask(self, controller: Any) -> Request | None:
        """The next request; None to stop before the budget is spent."""
        ...

    def tell(self, controller: Any, request: Request, losses: np.ndarray, is_kept: bool) -> Any:
        """The controller updated with these losses [candidates, points]."""
        ...

    def keeps(self, controller: Any, request: Request, losses: np.ndarray) -> bool:
        """Whether to keep training with these losses."""
        ...


@checked
def init(searcher: Searcher) -> Any:
    """A search before its first step.

    Args:
        searcher: the constants.

    Returns:
        The controller to ask and tell.

    Example:
        >>> init(ProbeThenDecay((1e-4, 1e-1), budget=400)).ledger.gradient_evaluations
        0
    """
    return searcher.init()


@checked
def ask(searcher: Searcher, controller: Any) -> Request | None:
    """The next request, starting from the state of the kept training.

    Args:
        searcher: the constants.
        controller: of this search; asking again gives the same answer.

    Returns:
        A `Request`, or None when the budget is spent or nothing is left to train.

    Cost: For AutoLRS one fit of a Gaussian process (some 20 ms) for a sequential candidate,
        otherwise nothing.

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> controller = init(searcher)
        >>> request = ask(searcher, controller)
        >>> request.kind
        'probe'
    """
    request = None if steps_left(searcher, controller) < 1 else searcher.ask(controller)
    spent = int(controller.ledger.gradient_evaluations)
    return None if request is None else replace(request, asked_at=spent)


@checked
def tell(
    searcher: Searcher, controller: Any, request: Request, losses: Any, *,
    validation: Any = None,
) -> tuple[Any, bool]:  # fmt: skip
    """Process the losses of a request, and decide whether to keep its state.

    The state of a candidate or of diverged training is never kept; after divergence the next
    request is more careful, from the same state.

    Args:
        searcher: the constants.
        controller: the one that was asked.
        request: what was run.
        losses: [candidates, steps], each before its update; or [candidates, steps //
            validate_every] validation losses. Any that is not finite means that the run diverged.
        validation: the validation loss after these steps, where the request `is_checked`, likewise;
            None leaves the check out.

    Returns:
        The new controller, and whether to continue from the request's final state.

    Raises:
        ValueError: when the request was answered before, when the first losses of a probe differ
            between candidates although no rate has touched them yet, or when the warm-up, which is
            not searched, diverged.

    Cost: For AutoLRS one forecast per candidate, some 10 ms each.

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> controller = init(searcher)
        >>> request = ask(searcher, controller)
        >>> controller, is_kept = tell(searcher, controller, request, jnp.ones(request.rates.shape))
        >>> is_kept, controller.ledger.gradient_evaluations == request.rates.size
        (False, True)
    """
    losses, spent = np.asarray(losses, np.float64), controller.ledger.gradient_evaluations
    if request.asked_at not in (None, spent):
        raise ValueError(
            f"request was asked for after {request.asked_at} gradient evaluations, and the "
            f"controller has {spent}: it was told already; ask for the next"
        )
    candidates, steps = request.rates.shape
    points = request.points
    if losses.shape != (candidates, points):
        raise ValueError(
            f"losses of this request must be [{candidates}, {points}], got {losses.shape}"
        )
    if request.kind == "probe" and not request.validate_every:
        _require_paired(losses[:, 0])
    is_kept = request.kind != "probe" and searcher.keeps(controller, request, losses)
    is_kept &= validation is None or bool(np.isfinite(validation))
    checks = candidates * points * bool(request.validate_every) + (validation is not None)
    forward = checks * searcher.validation_batches
    ledger = controller.ledger
    ledger = replace(
        ledger,
        gradient_evaluations=ledger.gradient_evaluations + candidates * steps,
        forward_evaluations=ledger.forward_evaluations + forward,
        sequential_depth=ledger.sequential_depth + steps,
        kept_steps=ledger.kept_steps + (steps if is_kept else 0),
    )
    rates = np.concatenate([controller.rates, request.rates[0]]) if is_kept else controller.rates
    checked_so_far = controller.checks
    if is_kept and validation is not None:
        row = [[ledger.kept_steps, curve_ends(losses).mean(), validation]]
        checked_so_far = np.concatenate([checked_so_far, row])
    updated = replace(controller, ledger=ledger, rates=rates, checks=checked_so_far)
    return searcher.tell(updated, request, losses, is_kept), is_kept


def _require_paired(first: np.ndarray) -> None:
    """Check that candidates start alike: before any update, only data and random draws could
    differ."""
    finite = first[np.isfinite(first)]
    if len(finite) and np.ptp(finite) > UNPAIRED * np.abs(finite).max():
        raise ValueError(
            "losses[:, 0] is the loss before any update, one for all candidates, but goes from "
            f"{finite.min():.6g} to {finite.max():.6g}: run all from the same state, on the same "
            "batches and with the same random keys"
        )


def steps_left(searcher: Searcher, controller: Controller) -> int:
    """Whole steps left in the budget."""
    return int(searcher.budget - controller.ledger.spent + 1e-9)


def require(constants: Any, checks: dict[str, tuple[bool, str]]) -> None:
    """Refuse the first invalid constant, by name."""
    for name, (is_right, wanted) in checks.items():
        if not is_right:
            raise ValueError(f"{name} must be {wanted}, got {getattr(constants, name)!r}")


def with_rows(table: dict[str, np.ndarray], **columns: Any) -> dict[str, np.ndarray]:
    """A table with rows added; a column given as a number applies to all of them."""
    count = len(np.atleast_1d(columns["rate"]))
    return {
        name: np.concatenate([column, np.broadcast_to(columns[name], count).astype(column.dtype)])
        for name, column in table.items()
    }


def one_candidate(kind: str, rates: Any) -> Request:
    """A request for a single candidate with these rates [steps]."""
    return Request(kind, np.asarray(rates, np.float32)[None])
