"""Whether one step moves the activations of a wide model as far as those of a narrow one.

    change = rms(activation after some steps - activation before)
    slope = d log change / d log width

The slopes are about 0 where the rates and initial weights are right for every width. Under the
usual ones a hidden activation moves farther in a wider model, so that its best rate is lower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from toolkit._annotations import AtLeast
from toolkit._checks import checked

Count = Annotated[int, AtLeast(1)]


class ModelOfWidth(NamedTuple):
    """A model of one width, ready to train.

    Attributes:
        params: its initial weights.
        optimizer: with its rates, as for this width.
        loss: params -> scalar loss on one batch.
        activations: params -> arrays by name, on that batch; the same names for every width.

    Example:
        >>> from optax import adam
        >>> act = lambda w: {"hidden": jnp.ones((4, 2)) @ w}
        >>> loss = lambda w: act(w)["hidden"].sum()
        >>> model = ModelOfWidth(jnp.ones((2, 8)), adam(1e-3), loss, act)
        >>> model.activations(model.params)["hidden"].shape
        (4, 8)
    """

    params: Any
    optimizer: optax.GradientTransformation
    loss: Callable[[Any], Float[Array, ""]]
    activations: Callable[[Any], dict[str, Array]]


@dataclass(frozen=True)
class CoordinateCheck:
    """How far training moves the activations of models of several widths.

    Attributes:
        widths: [widths].
        changes: by name of an activation, the root mean square of its change [widths].

    Example:
        >>> CoordinateCheck((64, 256), {"hidden": jnp.array([0.1, 0.2])}).slopes
        {'hidden': 0.5...}
    """

    widths: tuple[int, ...]
    changes: dict[str, np.ndarray]

    @property
    def slopes(self) -> dict[str, float]:
        """By name, the fitted slope of log change over log width."""
        widths = np.log(self.widths)
        return {
            name: float(np.polyfit(widths, np.log(change), 1)[0])
            for name, change in self.changes.items()
        }

    def draw(self) -> Any:
        """A figure of the changes over the widths, with the slopes in the legend."""
        from toolkit.figures import LOOKS, new_figure, style

        with style():
            figure = new_figure(6.0, 4.0)
            axes = figure.subplots()
        looks = list(LOOKS.values())
        for place, (name, slope) in enumerate(self.slopes.items()):
            look, label = looks[place % len(looks)], f"{name}: slope {slope:+.2f}"
            changes = self.changes[name]
            axes.plot(self.widths, changes, label=label, marker=look.marker, **look.line)
        axes.set(xscale="log", yscale="log", xlabel="width", ylabel="change of the activation, rms")
        axes.set_xticks(self.widths, map(str, self.widths), minor=False)
        axes.minorticks_off()
        # At least as many decades high as wide, so that what is flat looks flat.
        every = np.concatenate(list(self.changes.values()))
        room = max(every.max() / every.min(), max(self.widths) / min(self.widths)) ** 0.6
        middle = (every.max() * every.min()) ** 0.5
        axes.set_ylim(middle / room, middle * room)
        axes.legend()
        return figure


@checked
def coordinate_check(
    build: Callable[[int], ModelOfWidth], widths: Sequence[int], *, steps: Count = 3
) -> CoordinateCheck:
    """Train models of several widths for a few steps, and measure how far their activations move.

    Args:
        build: width -> the model, its optimiser, loss and activations.
        widths: at least two, in any order.
        steps: of training; few, and at a small rate, since all models saturate in the end.

    Raises:
        ValueError: with fewer than two widths, no step, or other names at another width.

    Cost: a compilation and `steps` gradients per width.

    Source: Yang and Hu, "Tensor Programs V" (arXiv:2203.03466), appendix D.1.

    Example:
        >>> from optax import sgd
        >>> act = lambda w: {"hidden": jax.nn.relu(jnp.ones((4, 2)) @ w)}
        >>> loss = lambda w: jnp.sum(act(w)["hidden"] ** 2)
        >>> build = lambda n: ModelOfWidth(jnp.ones((2, n)), sgd(0.01), loss, act)
        >>> abs(coordinate_check(build, [64, 256, 1024]).slopes["hidden"]) < 0.01
        True
    """
    if len(set(widths)) < 2:
        raise ValueError(f"widths: got {list(widths)}, wanted at least two")
    found = {width: _changes(build(width), steps) for width in sorted(set(widths))}
    names = next(iter(found.values())).keys()
    for width, changes in found.items():
        if changes.keys() != names:
            raise ValueError(
                f"build: activations of width {width} are {sorted(changes)}, of another width "
                f"{sorted(names)}"
            )
    return CoordinateCheck(
        tuple(found), {name: np.array([found[width][name] for width in found]) for name in names}
    )


def _changes(model: ModelOfWidth, steps: int) -> dict[str, float]:
    def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        updates, state = model.optimizer.update(jax.grad(model.loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def changes(params: Any) -> dict[str, Array]:
        start = params, model.optimizer.init(params)
        (trained, _), _ = jax.lax.scan(step, start, length=steps)
        before, after = model.activations(params), model.activations(trained)
        return jax.tree.map(lambda a, b: jnp.sqrt(jnp.mean(jnp.square(b - a))), before, after)

    return {name: float(change) for name, change in changes(model.params).items()}
