"""How the parameters of any model are updated, as one set of options.

The flags of `toolkit train`, the tables of its files and the arguments of `prepare` are the fields
of `Recipe`; each is described there and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import optax
from jaxtyping import Array, Int

from toolkit import lr
from toolkit._checks import check_choice, check_fields, checked
from toolkit.parallel import Layout
from toolkit.parallel.gradients import Exchange, ExchangePlan
from toolkit.parallel.loss_scaling import with_loss_scale
from toolkit.parallel.updates import Batch, Params, TrainState
from toolkit.training.averages import with_average
from toolkit.training.forms import ProgramForm
from toolkit.training.optimiser import OPTIMIZERS, assembled, decay_mask
from toolkit.training.step import TrainStep, make_train_step

ScheduleName = Literal["constant", "linear", "cosine", "wsd", "wsd_sqrt"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How parameters are updated, whatever the model.

    Attributes:
        steps: optimiser steps of the whole run, which schedules refer to.
        optimizer: adamw, ademamix, lion, muon, lamb, adafactor, sgd or schedule_free; or a row that
            a module of your own adds to `toolkit.training.OPTIMIZERS`.
        learning_rate: peak of the schedule; or "search", to search a schedule during training, with
            `steps` then including the gradient evaluations of candidates.
        schedule: the course of the rate after the warm-up: constant, linear, cosine, wsd or
            wsd_sqrt (a plateau, then a fall along a line or 1 - sqrt in the last fifth); None for
            cosine, and for constant under schedule_free.
        warmup: steps in which the rate rises from 0; None for a twentieth of the run.
        final_rate: rate at the end of linear and cosine, as a fraction of the peak.
        weight_decay: decoupled decay, scaled by the learning rate.
        no_decay: what does not decay: "vectors", and parameters with one of the other words in
            their path, such as "embedding".
        clip_norm: largest global norm of a gradient; 0 for no clipping.
        b1: decay of the first moment, or momentum; None for the optimiser's own default.
        b2: decay of the second moment; None for the optimiser's own default.
        eps: added to the root of the second moment.
        ema: decay of the moving average of the weights, which is evaluated and kept in place of the
            last weights; 0 for none.
        loss_scaling: scale the loss, for float16: a gradient that is not finite halves the scale
            and is skipped.
        accumulate: passes per update, of equal parts of the batch, whose gradients are averaged.
        exchange: how the replicas of a layout agree on the gradient, as compressor:pattern:feedback
            of `toolkit.parallel.gradients.Exchange`, such as int4:two_hop or, some tensors
            otherwise, embedding*@top_k=0.01:gather:error_feedback,int4; None: the compiler sums.

    Example:
        >>> recipe = Recipe(steps=100, optimizer="lion", learning_rate=1e-3, ema=0.99)
        >>> recipe.warmup_steps, recipe.schedule_name
        (5, 'cosine')
    """

    steps: int = 1000
    optimizer: str = "adamw"
    learning_rate: float | Literal["search"] = 3e-3
    schedule: ScheduleName | None = None
    warmup: int | None = None
    final_rate: float = 0.0
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("vectors",)
    clip_norm: float = 1.0
    b1: float | None = None
    b2: float | None = None
    eps: float = 1e-8
    ema: float = 0.0
    loss_scaling: bool = False
    accumulate: int = 1
    exchange: str | None = None

    def __post_init__(self):
        if isinstance(self.no_decay, list):  # as JSON and TOML have it
            object.__setattr__(self, "no_decay", tuple(self.no_decay))
        check_fields(self)
        for name in ("steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        rate = self.learning_rate
        if rate != "search" and not rate > 0:
            raise ValueError(f"learning_rate: got {rate!r}, wanted more than 0, or 'search'")
        for name in ("weight_decay", "clip_norm", "warmup"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}: got {value}, wanted 0 or more")
        for name in ("b1", "b2", "ema"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise ValueError(f"{name}: got {value}, wanted at least 0 and less than 1")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate: got {self.final_rate}, wanted 0 to 1")
        if self.eps <= 0:
            raise ValueError(f"eps: got {self.eps}, wanted more than 0")
        if self.warmup is not None and self.warmup >= self.steps > 1:
            raise ValueError(f"warmup: got {self.warmup}, wanted less than {self.steps} steps")
        if self.final_rate and self.schedule_name not in ("linear", "cosine"):
            raise ValueError(
                f"final_rate: got {self.final_rate} with schedule {self.schedule_name!r}; wanted "
                "linear or cosine"
            )
        exchange = Exchange.parse(self.exchange or "int8")
        if any(own.of_weights for own in (exchange, *dict(exchange.exceptions).values())):
            raise ValueError(
                f"exchange: got {self.exchange!r}, and the compiler gathers the weights here; "
                "wanted no compressor of weights (`sharded_train_step` takes one)"
            )
        self._check_exclusions()

    def _check_exclusions(self):
        is_averaging = OPTIMIZERS[self.optimizer].is_averaging
        if is_averaging and self.ema:
            raise ValueError(
                f"ema: got {self.ema} with optimizer {self.optimizer!r}, which averages the "
                "weights itself; wanted 0"
            )
        if is_averaging and self.b1 == 0:
            raise ValueError(f"b1: got 0 with optimizer {self.optimizer!r}; wanted more than 0")
        for name in ("b1", "b2"):
            own = getattr(OPTIMIZERS[self.optimizer], name)
            if (value := getattr(self, name)) and not own:
                raise ValueError(f"{name}: got {value}, and {self.optimizer!r} has none")
        if self.eps != Recipe.eps and not OPTIMIZERS[self.optimizer].has_eps:
            raise ValueError(f"eps: got {self.eps}, and {self.optimizer!r} has none")
        if self.learning_rate != "search":
            return
        wanted = {"schedule": None, "warmup": None, "final_rate": 0, "ema": 0, "accumulate": 1}
        wanted |= {"loss_scaling": False, "exchange": None}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r} with learning_rate 'search'; wanted "
                    f"{value!r}"
                )
        if is_averaging:
            raise ValueError(
                f"optimizer: got {self.optimizer!r} with learning_rate 'search', which wants one "
                "that does not average the weights"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return max(1, self.steps // 20) if self.warmup is None else self.warmup

    @property
    def schedule_name(self) -> str:
        """The schedule, by default that of the optimiser."""
        averages = OPTIMIZERS[self.optimizer].is_averaging
        return self.schedule or ("constant" if averages else "cosine")

    def rates(self) -> optax.Schedule | float:
        """The learning rate by step; 1 for a search."""
        if self.learning_rate == "search":
            return 1.0
        peak, total, rise = self.learning_rate, max(2, self.steps), self.warmup_steps
        if self.schedule_name in ("wsd", "wsd_sqrt"):
            shape = "sqrt" if self.schedule_name == "wsd_sqrt" else "linear"
            how = {"warmup_steps": rise, "cooldown_steps": max(1, total // 5), "shape": shape}
            return lr.warmup_stable_decay_schedule(peak, total, **how)
        fall = max(1, total - rise)
        after = {
            "constant": lambda: optax.constant_schedule(peak),
            "linear": lambda: optax.linear_schedule(peak, peak * self.final_rate, fall),
            "cosine": lambda: optax.cosine_decay_schedule(peak, fall, self.final_rate),
        }[self.schedule_name]()
        return optax.join_schedules([optax.linear_schedule(0.0, peak, rise), after], [rise])

    def exchange_plan(self, layout: Layout | None) -> ExchangePlan | None:
        """The exchange on a layout; None without one."""
        if self.exchange is None:
            return None
        if layout is None:
            raise ValueError(
                f"exchange: got {self.exchange!r} without a layout; wanted one with replicas, such "
                "as 'data'"
            )
        return ExchangePlan(Exchange.parse(self.exchange), layout)

    def make_optimizer(self, form: ProgramForm | None = None) -> optax.GradientTransformation:
        """The optax transformation of these options, for parameters in the form of a program."""
        mask = partial(decay_mask, spared=self.no_decay)
        if form is not None:
            if OPTIMIZERS[self.optimizer].reads_matrices:
                raise ValueError(
                    f"optimizer: got {self.optimizer!r}, which reads whole matrices, and a plan "
                    "stacks and cuts them; wanted one that goes number by number, such as 'adamw'"
                )
            mask = partial(form.mask, mask)
        kind = OPTIMIZERS[self.optimizer]
        optimizer = assembled(
            kind,
            self.rates(),
            b1=kind.b1 if self.b1 is None else self.b1,
            b2=kind.b2 if self.b2 is None else self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=mask,
            clip_norm=self.clip_norm or None,
        )
        if self.ema:
            optimizer = with_average(optimizer, self.ema)
        return with_loss_scale(optimizer) if self.loss_scaling else optimizer


@checked
def prepare(
    loss_fn: Callable[..., Any], params: Params, recipe: Recipe, *,
    sample: Callable[[Any, Int[Array, ""]], Batch] | None = None, most_steps: int = 1,
    model_state: Any = None, compute_dtype: Any = None,
    batch_sharding: jax.sharding.Sharding | None = None,
    weigh: Callable[[Batch], Any] | None = None, layout: Layout | None = None,
) -> tuple[TrainState, TrainStep]:  # fmt: skip
    """The first two arguments of `fit`: the state of a run and its train step, by a recipe.

    Args:
        loss_fn: as for `make_train_step`.
        params: the first parameters, placed.
        recipe: how to update them.
        sample: as for `make_train_step`, like all that follow.
        most_steps: the most updates one call of the step may make.
        model_state: state that the loss itself changes.
        compute_dtype: type of the matrices in the loss.
        batch_sharding: sharding of every array of a sampled batch.
        weigh: weight of a part of the batch when the gradient is accumulated.
        layout: of the parameters, for the recipe's exchange.

    Returns:
        (state, train_step).

    Example:
        >>> recipe = Recipe(steps=5, optimizer="sgd", learning_rate=0.1, warmup=0)
        >>> state, step = prepare(lambda w, data: (w - data) ** 2, jnp.float32(1), recipe)
        >>> fit(state, step, jnp.float32(3), FitOptions(recipe.steps, log_every=1)).stopped_by
    """
    if recipe.learning_rate == "search":
        raise ValueError(
            "recipe: learning_rate is 'search', which `search_rate` takes; give a rate"
        )
    optimizer, exchange = recipe.make_optimizer(), recipe.exchange_plan(layout)
    step = make_train_step(
        loss_fn,
        optimizer,
        sample=sample,
        most_steps=most_steps,
        compute_dtype=compute_dtype,
        batch_sharding=batch_sharding,
        accumulate=recipe.accumulate,
        weigh=weigh,
        exchange=exchange,
    )
    state = TrainState.create(params, optimizer, model_state, exchange)
    return (state if exchange is None else exchange.layout.apply(state)), step
