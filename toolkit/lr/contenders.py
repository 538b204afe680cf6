"""Baselines of a search: tuned schedules, and optimisers that claim to need no tuning.

One loop runs them all, because each takes the loss and names the parameters to evaluate:

    rival = contender("schedule_free", steps, rate=3e-3)
    state = rival.transformation.init(params)
    updates, state = rival.transformation.update(gradients, state, params, value=loss)
    params = optax.apply_updates(params, updates)
    loss_fn(rival.evaluation_params(state, params), held_out)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import optax

from toolkit._annotations import AtLeast, Positive
from toolkit._checks import check_choice, checked
from toolkit.lr.schedules import tabulated_schedule
from toolkit.lr.shapes import shape_rates

WARMUP = 0.05  # fraction of a run


@dataclass(frozen=True)
class Contender:
    """A training method for a loop.

    Attributes:
        transformation: optax transformation; every update takes `value=loss`.
        evaluation_params: (optimizer_state, params) -> the parameters to evaluate and keep.

    Example:
        >>> rival = contender("cosine", steps=100, rate=3e-3)
        >>> rival.evaluation_params(None, jnp.zeros(2)).shape
        (2,)
    """

    transformation: optax.GradientTransformationExtraArgs
    evaluation_params: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ContenderKind:
    """A row of `CONTENDERS`."""

    # (base optimiser, steps, rate) -> optax transformation
    build: Callable[[optax.GradientTransformation, int, float], Any]
    source: str  # where it was proposed
    default_rate: float | None = None  # None: its rate must be tuned


@checked
def contender(
    name: str,
    steps: Annotated[int, AtLeast(2)],
    rate: Annotated[float, Positive()] | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Contender:
    """A schedule or a tuning-free optimiser by its name, for a run of `steps`.

    Schedules rise over the first 5 % of the run and fall to zero at its end. Prodigy, D-Adaptation,
    Mechanic and MoMo are Adam's variants; DoG, DoWG and COCOB are what their papers define.

    Args:
        name: a key of `CONTENDERS`.
        steps: steps of the whole run.
        rate: peak of the schedule; required for tuned ones, optax's default for the others.
        optimizer: with learning rate 1, under the schedules, Mechanic and the plateau rule; None
            for `optax.adam(1.0)`.

    Cost: Memory: two copies of the parameters for Adam; up to four for Prodigy, D-Adaptation and
        COCOB, and eight for Mechanic.

    Source: `source` of the rows of `CONTENDERS`; optax's implementations.

    Example:
        >>> rival = contender("prodigy", steps=100)
        >>> params = jnp.ones(3)
        >>> state = rival.transformation.init(params)
        >>> updates, state = rival.transformation.update(params, state, params, value=1.0)
        >>> rival.evaluation_params(state, params + updates).shape
        (3,)
    """
    check_choice("name", name, CONTENDERS)
    kind = CONTENDERS[name]
    rate = kind.default_rate if rate is None else rate
    if rate is None:
        raise ValueError(f"{name} needs a rate, which must be tuned")
    base = optax.adam(1.0) if optimizer is None else optimizer
    transformation = optax.with_extra_args_support(kind.build(base, steps, rate))
    if name == "schedule_free":
        return Contender(transformation, optax.contrib.schedule_free_eval_params)
    return Contender(transformation, lambda optimizer_state, params: params)


def _scheduled(
    shape: str, base: optax.GradientTransformation, steps: int, rate: float
) -> optax.GradientTransformation:
    return optax.chain(base, optax.scale_by_schedule(_schedule(shape, steps, rate)))


def _schedule(shape: str, steps: int, rate: float) -> optax.Schedule:
    return tabulated_schedule(rate * shape_rates(shape, steps, round(WARMUP * steps)))


def _schedule_free(base: Any, steps: int, rate: float) -> Any:
    return optax.contrib.schedule_free_adamw(rate, warmup_steps=max(round(WARMUP * steps), 1))


def _prodigy_cosine(base: Any, steps: int, rate: float) -> Any:
    # Prodigy estimates the peak itself and must not learn from the small steps of a warm-up.
    return optax.contrib.prodigy(_schedule("cosine", steps, rate), safeguard_warmup=True)


def _mechanic(base: Any, steps: int, rate: float) -> Any:
    return optax.contrib.mechanize(_scheduled("cosine", base, steps, rate))


def _reduce_on_plateau(base: Any, steps: int, rate: float) -> Any:
    # A mean over 2 % of the run, since losses of single batches never stop improving by chance.
    plateau = optax.contrib.reduce_on_plateau(
        factor=0.5, patience=2, accumulation_size=max(steps // 50, 1)
    )
    return optax.chain(_scheduled("constant", base, steps, rate), plateau)


def _from_optax(name: str, base: Any, steps: int, rate: float) -> Any:
    return getattr(optax.contrib, name)(rate)


CONTENDERS: dict[str, ContenderKind] = {
    "constant": ContenderKind(partial(_scheduled, "constant"), "no schedule"),
    "linear": ContenderKind(partial(_scheduled, "linear"), "arXiv:2310.07831"),
    "cosine": ContenderKind(partial(_scheduled, "cosine"), "arXiv:1608.03983"),
    "wsd": ContenderKind(partial(_scheduled, "wsd"), "arXiv:2404.06395"),
    "wsd_sqrt": ContenderKind(partial(_scheduled, "wsd_sqrt"), "arXiv:2405.18392"),
    "schedule_free": ContenderKind(_schedule_free, "arXiv:2405.15682"),
    "prodigy": ContenderKind(partial(_from_optax, "prodigy"), "arXiv:2306.06101", 1.0),
    "prodigy_cosine": ContenderKind(_prodigy_cosine, "arXiv:2306.06101", 1.0),
    "dadapt": ContenderKind(partial(_from_optax, "dadapt_adamw"), "arXiv:2301.07733", 1.0),
    "dog": ContenderKind(partial(_from_optax, "dog"), "arXiv:2302.12022", 1.0),
    "dowg": ContenderKind(partial(_from_optax, "dowg"), "arXiv:2305.16284", 1.0),
    "momo": ContenderKind(partial(_from_optax, "momo_adam"), "arXiv:2305.07583", 1e-2),
    "cocob": ContenderKind(partial(_from_optax, "cocob"), "arXiv:1705.07795", 1.0),
    "mechanic": ContenderKind(_mechanic, "arXiv:2306.00144", 1.0),
    "reduce_on_plateau": ContenderKind(_reduce_on_plateau, "Keras's callback"),
}
