"""A row of `MIXERS`: functions and costs of a mixer; name, axes and range of its inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from toolkit._checks import checked
from toolkit.attention.costs import (
    LEVELS,
    additive_forward_flops,
    additive_step_flops,
    delta_forward_flops,
    delta_step_flops,
    recurrent_state_bytes,
    recurrent_step_bytes,
    token_bytes,
)


@dataclass(frozen=True)
class Values:
    """The numbers an input may hold."""

    low: float  # least of them
    high: float  # largest of them
    # brings unconstrained numbers into the range, as a layer does with its projections
    of: Callable[[np.ndarray], np.ndarray]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


ANY = Values(-np.inf, np.inf, lambda x: x)
UNIT = Values(-1.0, 1.0, _unit)  # vectors of length 1
LOG_DECAY = Values(-np.inf, 0.0, lambda x: -np.logaddexp(0, -x) / 4)
FRACTION = Values(0.0, 1.0, _sigmoid)
STRENGTH = Values(0.0, 2.0, lambda x: 2 * _sigmoid(x))  # above 1 a delta rule overshoots


def log_decay_above(low: float) -> Values:
    """Log-decays of a mixer whose layer lets a token forget no more than `exp(low)`."""
    return Values(low, 0.0, lambda x: low * _sigmoid(x))


@dataclass(frozen=True)
class Input:
    """One array that a mixer takes.

    Attributes:
        name: of the argument.
        axes: their names, from batch, time, heads, key and value; `steps`, the corrections of a
            token; and `index_heads`, the heads of an indexer, which serves all heads of the mixer.
        values: what it may hold.
        is_gate: whether it is a gate, which may be float32 where other inputs have fewer bits.

    Example:
        >>> Input("beta", ("batch", "time", "heads")).is_gate
        True
    """

    name: str
    axes: tuple[str, ...]
    values: Values = ANY
    is_gate: bool = True


TOKEN = ("batch", "time", "heads")
Q = Input("q", (*TOKEN, "key"), UNIT, is_gate=False)
K = Input("k", (*TOKEN, "key"), UNIT, is_gate=False)
V = Input("v", (*TOKEN, "value"), ANY, is_gate=False)
G = Input("g", TOKEN, LOG_DECAY)
CHANNEL_G = Input("g", (*TOKEN, "key"), LOG_DECAY)
BETA = Input("beta", TOKEN, STRENGTH)


def per_step(token: Input) -> Input:
    """The same input, once for each of several corrections per token."""
    return replace(token, axes=(*TOKEN, "steps", *token.axes[3:]))


@dataclass(frozen=True)
class Mixer:
    """One token mixer: a row of `MIXERS`.

    Attributes:
        name: its key in `MIXERS` and in the layer patterns of looped models.
        title: for headings and legends.
        paper: where it was published.
        is_linear_time: whether its cost per token does not grow with the context.
        inputs: what `function` takes before its keywords, in its order: q, k, v, then gates.
        implementations: names that `implementation=` of `function` takes; None picks among them.
        options: keyword arguments that every function of the row takes, with their values.
        function: (*inputs, initial_state, segment_ids, **options) -> (out, state).
        step: (*inputs of one token, state, **options) -> (out_t, state).
        reference: `function` as the bare equation.
        empty_state: (batch, heads, key, value, capacity, dtype, **options) -> state to decode
            from, a pytree of arrays that are all zero; heads are those of v. Each array of a
            recurrent state begins with [batch, heads].
        forward_flops: (batch, time, heads, key, value, **options) of one parallel pass.
        forward_bytes: likewise, and `element_bytes`.
        step_flops: (batch, context, heads, key, value, **options) of one decoded token.
        step_bytes: likewise, and `element_bytes`.
        state_bytes: likewise: what decoding keeps after `context` tokens.
        transition: what tokens multiply the state by, where that is one matrix [key, value]: a
            "matrix" [key, key], or a "diagonal" where they only decay and add. None: the state is
            not such a matrix.

    Example:
        >>> MIXERS["gdn"].names
        ('q', 'k', 'v', 'g', 'beta')
    """

    name: str
    title: str
    paper: str
    is_linear_time: bool
    inputs: tuple[Input, ...]
    implementations: tuple[str, ...]
    options: Mapping[str, int]
    function: Callable[..., Any]
    step: Callable[..., Any]
    reference: Callable[..., Any]
    empty_state: Callable[..., Any]
    forward_flops: Callable[..., int]
    forward_bytes: Callable[..., int]
    step_flops: Callable[..., int]
    step_bytes: Callable[..., int]
    state_bytes: Callable[..., int]
    transition: Literal["matrix", "diagonal"] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all inputs, in order."""
        return tuple(given.name for given in self.inputs)

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of those that are gates."""
        return tuple(given.name for given in self.inputs if given.is_gate)

    @property
    def is_recurrent(self) -> bool:
        """Whether its state has one size, whatever the context."""
        return self.state_bytes(1, 0, 1, 1, 1, **self.options) > 0

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Implementations with derivatives in both modes and of any order, not a gradient alone."""
        return tuple(name for name in self.implementations if name != "pallas")

    def input(self, name: str) -> Input:
        """The input of that name."""
        return self.inputs[self.names.index(name)]


@checked
def recurrent(
    *,
    inputs: tuple[Input, ...], implementations: tuple[str, ...] = ("xla", "scan", "pallas"),
    transition: Literal["matrix", "diagonal"] | None = "matrix", **columns: Any,
) -> Mixer:  # fmt: skip
    """A row whose state has one size whatever the context, such as a matrix [key, value] per head.

    Args:
        inputs: what the function takes, in its order.
        implementations: names of its forms.
        transition: what a token multiplies the state by, see `Mixer`.
        **columns: the other fields of `Mixer`: `name`, `title`, `paper`, `function`, `step` and
            `reference` at least. The state is a float32 matrix, and FLOPs are those of a delta
            rule, or with a "diagonal" transition of a state that decays and adds, unless given.
            A state of another kind comes with `empty_state`, `state_bytes` and both FLOPs.

    Returns:
        The row.

    Example:
        >>> row = MIXERS["gla"]
        >>> names = {"name": "mine", "title": "Mine", "paper": "-", "transition": "diagonal"}
        >>> functions = {n: getattr(row, n) for n in ("function", "step", "reference")}
        >>> recurrent(inputs=row.inputs, **names, **functions).is_linear_time
        True
    """
    is_matrix = transition == "matrix"
    state_bytes = columns.get("state_bytes", recurrent_state_bytes)
    return Mixer(
        **{
            "is_linear_time": True,
            "options": MappingProxyType({}),
            "empty_state": _recurrent_empty_state,
            "forward_flops": delta_forward_flops if is_matrix else additive_forward_flops,
            "forward_bytes": partial(token_bytes, inputs),
            "step_flops": delta_step_flops if is_matrix else additive_step_flops,
            "step_bytes": partial(recurrent_step_bytes, inputs, state_bytes),
            "state_bytes": state_bytes,
        }
        | columns,
        inputs=inputs,
        implementations=implementations,
        transition=transition,
    )


def _recurrent_empty_state(batch, heads, key, value, capacity, dtype):
    precise = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.zeros((batch, heads, key, value), precise)


@checked
def draw_inputs(
    row: Mixer, time: int, *,
    batch: int = 2, heads: int = 2, key: int = 16, value: int = 8, steps: int = 2,
    levels: int = LEVELS, dtype: jnp.dtype | type = jnp.float32,
    gate_dtype: jnp.dtype | type | None = None, seed: int = 0,
) -> list[jax.Array]:  # fmt: skip
    """Inputs as a layer would make them: unit keys, mild decays, gates within their ranges.

        x = values.of(standard normal numbers)   for each of `row.inputs`

    Args:
        row: the mixer.
        time: tokens.
        batch: sequences.
        heads: heads of all inputs, and of an indexer.
        key: key size of a head.
        value: value size of a head.
        steps: corrections per token, of the mixers that make several.
        levels: of log-linear mixers.
        dtype: of the inputs.
        gate_dtype: of the gates, whose numbers are still rounded to `dtype`; None for `dtype`.
        seed: of the draw.

    Returns:
        One array per input of the row, in the order in which its functions take them.

    Example:
        >>> from toolkit.attention import draw_inputs, mixer
        >>> q, k, v, g, beta = draw_inputs(mixer("gdn"), 5, batch=1)
        >>> k.shape, beta.shape
        ((1, 5, 2, 16), (1, 5, 2))
    """
    random = np.random.default_rng(seed)
    sizes = {
        "batch": batch, "time": time, "heads": heads, "index_heads": heads, "key": key,
        "value": value, "steps": steps, "levels": levels, "pairs": key // 2,
    }  # fmt: skip

    def draw(name: str) -> jax.Array:
        given = row.input(name)
        shape = [sizes[axis] for axis in given.axes]
        drawn = jnp.asarray(given.values.of(random.standard_normal(shape)), dtype)
        return drawn.astype(gate_dtype) if given.is_gate and gate_dtype else drawn

    return [draw(name) for name in row.names]
