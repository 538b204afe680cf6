"""An order of tasks searched for the stages of a plan, where no schedule with a name fits them."""

import dataclasses
from fractions import Fraction

from toolkit._checks import checked
from toolkit.planning.predict import Prediction, prediction_of
from toolkit.planning.time.orders import schedule_of
from toolkit.schedules import Schedule, Task, to_csv
from toolkit.schedules.search import search_schedule, shape_of
from toolkit.schedules.search.shapes import Shape

PARTS = 4  # of the mean stage's forward pass: the unit of the integer program
# Activations that a device may hold, over those of the plan's own schedule.
MORE = (Fraction(1), Fraction(3, 2), Fraction(2))


@checked
def search_order(found: Prediction, *, seconds: float = 5.0) -> Prediction:
    """A plan's pipeline in a searched order of its tasks, if that is faster and fits.

    The stages stay where they are, with their own durations, so that slow and fast ones are
    interleaved as they are; backward passes are also tried in halves, unless layers are recomputed.
    The order is part of the strategy, as a table.

    Args:
        found: a prediction, such as `plan(...).best`.
        seconds: for each integer program.

    Returns:
        The faster prediction, or `found` if there is none, or if it cuts sequences in slices.

    Raises:
        ImportError: OR-tools is missing (extra `search`).

    Cost: up to six searches; a few seconds each for 4 devices and 16 microbatches.

    Source: Lin et al., "Tessel", 2023 (arXiv:2311.15269).

    Example:
        >>> alone = predict("llama-3.2-1b", "h100:1", Strategy(recompute="layer"), batch=1)
        >>> search_order(alone) is alone  # a single stage has one order
        True
    """
    strategy = found.strategy
    if strategy.pipeline == 1 or strategy.slices > 1:  # blocks of a search have no slices
        return found
    known, best = schedule_of(strategy), found
    halves = (False, True) if strategy.recompute == "none" else (False,)
    for is_split in halves:
        shape = _shape(found, known, is_split)
        for more in MORE:
            memory = int(max(known.peak_activations) * more)
            try:
                order = search_schedule(shape, strategy.microbatches, memory, seconds=seconds)
            except ValueError:  # nothing fits that memory
                continue
            each = _in_order(found, order.schedule())
            if each.fits and each.step_seconds < best.step_seconds:
                best = each
    return best


def _shape(found: Prediction, known: Schedule, is_split: bool) -> Shape:
    """The blocks of one microbatch, as long as the stages' tasks take."""
    homes = [[s for s, home in enumerate(known.placement) if home == d]
             for d in range(known.devices)]  # fmt: skip
    backward = "IW" if is_split else "B"
    orders = tuple(
        tuple(Task(kind, 0, stage) for kind in "F" + backward for stage in mine) for mine in homes
    )
    blocks = shape_of(dataclasses.replace(known, microbatches=1, orders=orders))
    busy, slowdown = found.busy, found.constants.slowdown
    unit = sum(part.forward_total(slowdown) for part in busy) / len(busy) / PARTS

    def span(task: Task) -> int:
        part = busy[task.stage]
        forward, weight = part.forward_total(slowdown), part.weight_gradient
        whole = part.backward_total(slowdown)
        took = {"F": forward, "B": whole, "I": whole - weight, "W": weight}[task.kind]
        return max(1, round(took / unit))

    return tuple(
        dataclasses.replace(block, span=span(block.name))
        for block in blocks
        if isinstance(block.name, Task)
    )


def _in_order(found: Prediction, schedule: Schedule) -> Prediction:
    strategy = dataclasses.replace(found.strategy, schedule=to_csv(schedule))
    return prediction_of(
        found.config, found.cluster, strategy, found.batch, found.sequence_length, found.limit,
        found.constants,
    )  # fmt: skip
