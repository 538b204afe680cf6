"""Lesson 14, a pipeline on eight devices: ticks, places, and an order that hides its messages."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.lab.lessons.drawing import draw_bars
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_number,
)
from toolkit.lab.lessons.subjects.parts.eight_devices import DEVICES, mesh_of
from toolkit.lab.lessons.subjects.pipeline import draw_timeline
from toolkit.measure import collectives
from toolkit.parallel.pipeline import Pipeline, program_of
from toolkit.schedules import (
    Durations,
    Schedule,
    Task,
    faults,
    gpipe,
    one_forward_one_backward,
    simulate,
)

MICROBATCHES = 16
HOP = Durations(delay=Fraction(1, 2))
MOST_HELD = 2 * DEVICES - 1
SEQUENCES, WIDTH = 4, 16
Orders = list[list[tuple[str, int]]]


def orders_of(schedule: Schedule) -> Orders:
    """For each device its pairs (kind, microbatch)."""
    return [[(task.kind, task.microbatch) for task in order] for order in schedule.orders]


def schedule_from(order: Callable[..., Any], microbatches: int = MICROBATCHES) -> Schedule:
    """What a learner's order(device, devices, microbatches) says; a wrong answer if it is none."""
    rows = []
    for device in range(DEVICES):
        pairs = ask(order, device, DEVICES, microbatches)
        if not isinstance(pairs, list | tuple):
            raise WrongAnswer(f"Device {device} has {pairs!r}; wanted a list of pairs.")
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or pair[0] not in ("F", "B"):
                raise WrongAnswer(f"Device {device} has {pair!r}; wanted pairs such as ('F', 0).")
        rows.append(tuple(Task(kind, i, device) for kind, i in pairs))
    schedule = Schedule("yours", microbatches, tuple(range(DEVICES)), tuple(rows))
    if wrong := faults(schedule):
        raise WrongAnswer(f"It cannot run. {wrong[0]}")
    return schedule


def ran(schedule: Schedule) -> str:
    """Runs a schedule as one program on eight devices; what came out, beside one device's."""
    keys = jax.random.split(jax.random.key(0), schedule.stages)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    batch = jax.random.normal(jax.random.key(1), (schedule.microbatches, SEQUENCES, WIDTH))

    def whole(weights: Any, batch: Any) -> Any:
        for matrix in weights:
            batch = jnp.tanh(batch @ matrix)
        return jnp.sum(batch**2)

    run = Pipeline(
        lambda w, x, _: jnp.tanh(x @ w), first=lambda _, data: data,
        last=lambda _, x, data: jnp.sum(x**2), weights=weights, schedule=schedule,
        mesh=mesh_of(stage=DEVICES),
    )  # fmt: skip
    placed = run.place(weights)
    compiled = jax.jit(run).lower(placed, (), batch).compile()
    loss, (gradients, _) = compiled(placed, (), batch)
    wanted, slopes = jax.jit(jax.value_and_grad(whole))(weights, batch)
    pairs = zip(run.unplace(gradients), slopes, strict=True)
    apart = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    sent = [found for found in collectives(compiled) if found.kind == "collective-permute"]
    return (
        f"{schedule.name}: loss {float(loss):.4f}, on one device {float(wanted):.4f}; gradients "
        f"differ by {apart:.0e} of the largest. {run.program.length} ticks, "
        f"{sum(found.count for found in sent)} permutes counted in the program for "
        f"{run.program.messages} messages; places for {run.program.kept_slots[0]} activations."
    )


def ran_own(order: Callable[..., Any]) -> str:
    """The same for a learner's order, or what is wrong with it."""
    try:
        return ran(schedule_from(order))
    except WrongAnswer as wrong:
        return str(wrong)


def _ticks() -> Answer:
    program = program_of(one_forward_one_backward(DEVICES, MICROBATCHES))
    tasks = 2 * MICROBATCHES
    return Answer(
        program.length,
        f"{program.length} (counted): every device has {tasks} tasks; the first forward reaches "
        f"the last device after {DEVICES - 1} ticks, and its last backward needs {DEVICES - 1} on "
        "the way back.",
    )


def _places() -> Answer:
    few, all_first = (
        program_of(rule(DEVICES, 4 * MICROBATCHES)) for rule in (one_forward_one_backward, gpipe)
    )
    return Answer(
        few.kept_slots[0],
        f"{few.kept_slots[0]} (counted): device 0 starts its first backward after {DEVICES} "
        f"forwards, and frees one place for each that it takes from then on. With all forwards "
        f"first it would be {all_first.kept_slots[0]}.",
    )


def _variant(
    orders: Orders, forward: int = 1, backward: int = 1, by_order_alone: bool = False
) -> dict[Any, int]:
    """The ticks by the rule, or by a wrong one; messages that go forward, or back, take so many."""
    found: dict[Any, int] = {}
    for _ in range(2 * len(orders) * max(map(len, orders))):
        for device, order in enumerate(orders):
            now = 0
            for kind, i in order:
                step, lag = (1, forward) if kind == "F" else (-1, backward)
                needs = [("F", i, device)] if kind == "B" else []
                if 0 <= device - step < len(orders):
                    needs.append((kind, i, device - step))
                if not by_order_alone:
                    if any(need not in found for need in needs):
                        break
                    now = max(
                        [now] + [found[need] + (1 if need[2] == device else lag) for need in needs]
                    )
                found[kind, i, device] = now
                now += 1
    return found


def _judge_ticks(ticks: Callable[..., Any], show: Show) -> str:
    for schedule in (one_forward_one_backward(4, 6), gpipe(3, 4)):
        orders = orders_of(schedule)
        wanted = {
            (task.kind, task.microbatch, task.stage): tick
            for task, tick in program_of(schedule).ticks.items()
        }
        got = ask(ticks, [list(order) for order in orders])
        if not isinstance(got, dict) or got.keys() != wanted.keys():
            raise WrongAnswer(
                "ticks must return a dict with a tick for every (kind, microbatch, device)."
            )
        ends = [
            [1 + max(times[task] for task in wanted if task[2] == device) for device in
             range(schedule.devices)]
            for times in (got, wanted)
        ]  # fmt: skip
        names = [f"device {device}" for device in range(schedule.devices)]
        show(draw_bars(names, *ends, xlabel=f"ticks until its last task, {schedule.name}"))
        if got == wanted:
            continue
        for made, reason in (
            (_variant(orders, by_order_alone=True), "Nobody waits for anybody: a forward needs the "
             "stage before it, a backward the stage behind it."),
            (_variant(orders, 0, 0), "A message is used in the tick in which it is sent; it "
             "arrives in the next."),
            (_variant(orders, 0, 1), "A device that comes later in your loop uses what an earlier "
             "one made in the same tick; it arrives in the next."),
            (_variant(orders, 2, 2), "A message that is sent in a tick can be used in the very "
             "next one."),
        ):  # fmt: skip
            if got == made:
                raise WrongAnswer(reason)
        if {task: tick - 1 for task, tick in got.items()} == wanted:
            raise WrongAnswer("Ticks are counted from 0.")
        task = min((task for task in wanted if got[task] != wanted[task]), key=wanted.__getitem__)
        kind, i, device = task
        raise WrongAnswer(
            f"{kind}{i} on device {device} is in tick {wanted[task]}, not in {got[task]}."
        )
    return "Right: that is how the executor lays a schedule out."


def _judge_places(places: Callable[..., Any], show: Show) -> str:
    schedules = [one_forward_one_backward(4, 9), gpipe(4, 9)]
    names, got, wanted = [], [], []
    for schedule in schedules:
        for device, order in enumerate(orders_of(schedule)):
            names.append(f"{schedule.name}, device {device}")
            got.append(ask_number(places, list(order)))
            wanted.append(schedule.peak_activations[device])
    show(draw_bars(names, got, wanted, xlabel="places"))
    if got == wanted:
        return "Right: 1F1B needs as many as there are devices behind, whatever it is fed."
    if got == [9.0] * len(got):
        raise WrongAnswer("That is every microbatch; a backward frees a place.")
    if got == [most - 1 for most in wanted]:
        raise WrongAnswer("One too few: the place is free after the backward, not when it starts.")
    name, a, b = next(row for row in zip(names, got, wanted, strict=True) if row[1] != row[2])
    raise WrongAnswer(f"{name} holds up to {b}, not {a:g}.")


def _judge_early(early: Callable[..., Any], show: Show) -> str:
    schedule = schedule_from(early)
    timeline = simulate(schedule, HOP)
    plain = simulate(one_forward_one_backward(DEVICES, MICROBATCHES), HOP).makespan
    target = simulate(eager(DEVICES, MICROBATCHES), HOP).makespan
    show(draw_timeline(timeline, "yours"))
    end = float(timeline.makespan)
    if (most := max(schedule.peak_activations)) > MOST_HELD:
        raise WrongAnswer(f"A device holds {most} activations; {MOST_HELD} fit.")
    if timeline.makespan >= plain:
        raise WrongAnswer(
            f"It ends at {end:g}, and 1F1B at {float(plain):g}: its devices still wait for "
            "messages in every round. Start forwards earlier."
        )
    if timeline.makespan > target:
        raise WrongAnswer(f"It ends at {end:g}, earlier than 1F1B; {float(target):g} is possible.")
    return f"Right: it ends at {end:g} instead of {float(plain):g}."


def eager(devices: int, microbatches: int) -> Schedule:
    """1F1B with two forwards ahead for every device behind, so that messages have time."""
    orders = []
    for device in range(devices):
        ahead = min(2 * (devices - 1 - device), microbatches)
        order = [Task("F", i, device) for i in range(ahead)]
        for i in range(microbatches):
            order += [Task("F", i + ahead, device)] if i + ahead < microbatches else []
            order.append(Task("B", i, device))
        orders.append(tuple(order))
    return Schedule("eager 1F1B", microbatches, tuple(range(devices)), tuple(orders))


OUTLINE = Outline(
    "A pipeline on eight devices",
    questions=(
        Question(
            "ticks",
            "A program runs in ticks: in each, every device runs at most one task, a forward or a "
            "backward, and then sends what it made; what is sent in a tick can be used in the "
            f"next. 1F1B runs {MICROBATCHES} microbatches on {DEVICES} devices. How many ticks "
            "does it take?",
            _ticks,
            unit="ticks",
            low=1,
            high=10_000,
        ),
        Question(
            "places",
            f"A forward's activations wait in a place for its backward. 1F1B now runs "
            f"{4 * MICROBATCHES} microbatches on {DEVICES} devices. How many places does the "
            "fullest device need?",
            _places,
            unit="places",
            low=0,
            high=10_000,
            seconds=1,
        ),
    ),
    exercises=(
        Exercise(
            "ticks",
            "The tick of every task, from the orders of the devices.",
            _judge_ticks,
            (
                "A task needs the one before it on its device, and what it waits for: a forward "
                "that of the device before, a backward that of the device behind and its own "
                "forward.",
                "Go tick by tick: a device runs its next task if all that it waits for ran in "
                "earlier ticks.",
                "Collect what ran in this tick, and add it to what has run only at the end of it.",
            ),
            minutes=15,
        ),
        Exercise(
            "places",
            "The most activations that a device holds at once, from its order.",
            _judge_places,
            (
                "Count up at a forward.",
                "Count down at a backward, after it has run.",
                "held += 1 at F, then most = max(most, held); held -= 1 at B.",
            ),
            minutes=5,
        ),
        Exercise(
            "early",
            "An order that hides messages of half a forward, and holds at most "
            f"{MOST_HELD} activations.",
            _judge_early,
            (
                "In 1F1B a device has one forward ahead for every device behind it: none is left "
                "to run while a message is on its way.",
                "Let it have two ahead for every device behind it.",
                "ahead = min(2 * (devices - 1 - device), microbatches) forwards, then a forward "
                "and a backward in turn, and at the end the backwards that are left.",
            ),
            minutes=20,
        ),
    ),
)
