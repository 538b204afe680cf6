"""What a mixer takes: the name, axes and range of each of its inputs, and how one is drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Values:
    """The numbers an input may hold.

    Attributes:
        low: least of them.
        high: largest of them.
        of: brings unconstrained numbers into the range, as a layer does with its projections.
    """

    low: float
    high: float
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
        axes: in words, of batch, time, heads, key, value; `steps`, the corrections of a token;
            `index_heads`, those of an indexer, which serves all heads of the mixer.
        values: what it may hold.
        is_gate: whether it is a gate, which may be float32 beside inputs of fewer bits.

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


def per_step(one: Input) -> Input:
    """That input once for each of the several corrections a token makes."""
    return replace(one, axes=(*TOKEN, "steps", *one.axes[3:]))
