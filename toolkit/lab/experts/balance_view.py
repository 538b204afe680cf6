"""The bias that evens the loads of a trained router, step by step. Pure functions."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit.experts import expert_loads, route, updated_choice_bias
from toolkit.lab.experts.small_mixture import CHOSEN, EXPERTS, TIME, held_out_logits
from toolkit.lab.experts.tokens_view import TRAINED
from toolkit.lab.kit.view import Data, View

STEPS = 400
NEAR = 0.25  # above an even load
WINDOWS_PER_STEP = 2
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


class Levelling(NamedTuple):
    """What every step of the bias leads to, before the first step and after each.

    Attributes:
        bias: [steps + 1, experts].
        loads: [steps + 1, experts], pairs of the whole text with that bias.
        moved: [steps + 1], share of the pairs that go to another expert than without a bias.
    """

    bias: Float[np.ndarray, "steps experts"]
    loads: Float[np.ndarray, "steps experts"]
    moved: Float[np.ndarray, "steps"]

    @property
    def violation(self) -> Float[np.ndarray, "steps"]:
        """The fullest expert's load over the mean, minus 1."""
        return self.loads.max(1) / self.loads.mean(1) - 1


@functools.cache
def levelling(model: str, layer: int, rate: float) -> Levelling:
    """All steps for one layer, counted from 1; every step reads the next windows of the text."""
    logits = held_out_logits(model)[layer - 1]
    return Levelling(*map(np.asarray, _levelled(jnp.asarray(logits), jnp.float32(rate))))


@jax.jit
def _levelled(logits: Float[Array, "tokens experts"], rate: Any) -> tuple[Array, Array, Array]:
    each = WINDOWS_PER_STEP * TIME
    batches = logits.reshape(-1, each, EXPERTS)

    def chosen(logits: Array, bias: Array) -> Array:
        return route(logits, CHOSEN, scores="sigmoid", choice_bias=bias).experts

    first = chosen(logits, jnp.zeros(EXPERTS))

    def seen(bias: Array) -> tuple[Array, Array, Array]:
        now = chosen(logits, bias)
        stays = (now[:, :, None] == first[:, None]).any(-1).mean()
        return bias, expert_loads(now, EXPERTS).astype(jnp.float32), 1 - stays

    def step(bias: Array, number: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        loads = expert_loads(chosen(batches[number % len(batches)], bias), EXPERTS)
        return updated_choice_bias(bias, loads.astype(jnp.float32), rate), seen(bias)

    last, found = jax.lax.scan(step, jnp.zeros(EXPERTS), jnp.arange(STEPS))
    bias, loads, moved = (
        jnp.concatenate([all_but_last, end[None]])
        for all_but_last, end in zip(found, seen(last), strict=True)
    )
    return bias, loads, moved


@dataclass(frozen=True)
class BalanceView(View):
    """The loads after some steps of the bias."""

    model: str
    layer: int
    rate: float
    step: int
    of: Levelling

    @property
    def loads(self) -> Float[np.ndarray, "experts"]:
        """Loads of the experts, over an even one."""
        return self.of.loads[self.step] / self.of.loads[self.step].mean()

    @property
    def bias(self) -> Float[np.ndarray, "experts"]:
        """Their biases."""
        return self.of.bias[self.step]

    def data(self) -> Data:
        start = self.of.loads[0] / self.of.loads[0].mean()
        return {
            "expert": [str(expert + 1) for expert in range(EXPERTS)],
            "bias": [*map(float, self.bias)],
            "without bias, of an even load (share)": [*map(float, start)],
            "with it (share)": [*map(float, self.loads)],
        }

    def sentence(self) -> str:
        before, now = 1 + self.of.violation[[0, self.step]]
        within = np.flatnonzero(self.of.violation < NEAR)
        reached = (
            f"It first comes within {NEAR:.0%} of an even load at step {within[0]}."
            if len(within)
            else f"In {STEPS} steps it never comes within {NEAR:.0%} of an even load."
        )
        return (
            f"Layer {self.layer} of the model trained {TRAINED[self.model]}: after {self.step} "
            f"steps of {self.rate:g} the fullest expert has {now:.2f} times an even load, and "
            f"{before:.2f} times without a bias. {self.of.moved[self.step]:.0%} of the pairs go to "
            f"another expert than without it. {reached}"
        )

    def footnote(self) -> str:
        return (
            f"Measured here: a trained router on {len(held_out_logits(self.model)[0]):,} bytes of "
            f"held-out text, {WINDOWS_PER_STEP * TIME} a step. Nothing but the bias changes."
        )


def balance_view(*, model: str, layer: int, rate: float, step: int) -> BalanceView:
    """The loads of a layer, counted from 1, after `step` steps of a bias."""
    return BalanceView(model, layer, rate, step, levelling(model, layer, rate))
