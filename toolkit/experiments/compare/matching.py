"""What is made equal between contenders before they are trained."""

import dataclasses
from collections.abc import Callable, Mapping

from toolkit.language import TrainingRun
from toolkit.looped import flops_per_token, match_compute, match_parameters

MATCHES = {
    "flops": "FLOPs per token, by the feed-forward size, and tokens",
    "training-flops": "FLOPs of the whole training, by its steps; models as configured",
    "parameters": "parameters, by the feed-forward size, and tokens",
    "time": "seconds of the whole training on this machine, by its steps; models as configured",
    "tokens": "tokens alone; models as configured",
}
"""What may be equal; the first contender stays as it is."""


def run_flops(run: TrainingRun) -> float:
    """FLOPs that a whole training asks for (modelled)."""
    tokens = run.steps * run.batch * run.sequence_length
    return tokens * flops_per_token(run.config, run.sequence_length)


def matched(
    contenders: Mapping[str, TrainingRun],
    match: str,
    seconds_of_steps: Callable[[Mapping[str, TrainingRun]], Mapping[str, float]],
) -> dict[str, TrainingRun]:
    """The contenders with sizes or steps that make them equal to the first.

    ValueError where a size cannot be matched, or where the first has other tokens per step or, with
    equal steps, another number of steps.
    """
    first_label, first = next(iter(contenders.items()))
    names = ["batch", "sequence_length"]
    names += [] if match in ("training-flops", "time") else ["steps"]
    for label, run in contenders.items():
        for name in names:
            if (got := getattr(run, name)) != (wanted := getattr(first, name)):
                raise ValueError(
                    f"{name}: {label} has {got} and {first_label} {wanted}; wanted the same "
                    f"(--set {name}={wanted}), or another --match"
                )
    seconds = seconds_of_steps(contenders) if match == "time" else {}
    found = {first_label: first}
    for label, run in list(contenders.items())[1:]:
        changes: dict[str, object] = {}
        try:
            if match == "flops":
                changes["config"] = match_compute(run.config, first.config, run.sequence_length)
            elif match == "parameters":
                changes["config"] = match_parameters(run.config, first.config)
        except ValueError as error:
            raise ValueError(f"{label}: {error} Or use --match training-flops.") from None
        if match == "training-flops":
            changes["steps"] = max(1, round(first.steps * run_flops(first) * run.steps
                                            / run_flops(run) / first.steps))  # fmt: skip
        elif match == "time":
            changes["steps"] = max(1, round(first.steps * seconds[first_label] / seconds[label]))
        found[label] = dataclasses.replace(run, **changes)
    return found
