"""The shortest schedule of a small shape, by one integer program over all its blocks."""

from toolkit._checks import checked
from toolkit.schedules.search.shapes import Shape
from toolkit.schedules.search.whole import Found, lower_bound


@checked
def exact_schedule(
    shape: Shape, microbatches: int, memory: int, *, seconds: float = 30.0
) -> tuple[Found, bool]:
    """The shortest schedule, as one integer program over all blocks: for small cases.

    Args:
        shape: the blocks of one microbatch.
        microbatches: how many.
        memory: of every device.
        seconds: for the program.

    Returns:
        (the schedule, whether it is proved to be the shortest).

    Example:
        >>> from toolkit.schedules.search import tessel_shape
        >>> found, is_proved = exact_schedule(tessel_shape("V", devices=2), 2, memory=2)
        >>> found.makespan, is_proved
        (12, True)
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    if microbatches < 1:
        raise ValueError(f"microbatches: got {microbatches}, wanted at least 1")
    longest = microbatches * sum(block.span for block in shape)
    start = [
        [model.new_int_var(0, longest, f"{r},{i}") for i in range(len(shape))]
        for r in range(microbatches)
    ]
    for r, row in enumerate(start):
        for i, block in enumerate(shape):
            for before in block.after:
                model.add(row[i] >= row[before] + shape[before].span)
            if r:  # microbatches are alike: their order is no choice
                model.add(row[i] >= start[r - 1][i] + block.span)
    for device in {d for block in shape for d in block.devices}:
        mine = [(r, i) for r in range(microbatches) for i in range(len(shape))
                if device in shape[i].devices]  # fmt: skip
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[r][i], shape[i].span, f"{r},{i},{device}")
            for r, i in mine
        )
        changes = [(start[r][i], shape[i].memory) for r, i in mine if shape[i].memory]
        if changes:
            times, deltas = zip(*changes, strict=True)
            model.add_reservoir_constraint(times, deltas, 0, memory)
    end = model.new_int_var(lower_bound(shape, microbatches), longest, "end")
    for i, block in enumerate(shape):
        model.add(end >= start[-1][i] + block.span)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"seconds: got {seconds}, in which no schedule was found")
    starts = tuple(tuple(solver.value(s) for s in row) for row in start)
    found = Found(shape, starts, int(solver.best_objective_bound), "exact")
    return found, status == cp_model.OPTIMAL
