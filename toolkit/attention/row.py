"""What the table of mixers says of each: a row of `MIXERS`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp

from toolkit.attention.costs import recurrent_state_bytes, recurrent_step_bytes, token_bytes
from toolkit.attention.inputs import Input


@dataclass(frozen=True)
class Mixer:
    """One token mixer: a row of `MIXERS`.

    Attributes:
        name: its key in `MIXERS` and in the layer patterns of looped models.
        title: for headings and legends.
        paper: where it was published.
        is_linear_time: whether its cost a token does not grow with the context.
        inputs: what `function` takes before its keywords, in its order: q, k, v, then gates.
        implementations: names that `implementation=` of `function` takes; None picks among them.
        options: keyword arguments that every function of the row takes, with their values.
        function: (*inputs, initial_state, segment_ids, **options) -> (out, state).
        step: (*inputs of one token, state, **options) -> (out_t, state).
        reference: `function` as the bare equation.
        empty_state: (batch, heads, key, value, capacity, dtype, **options) -> state to decode
            from; heads are those of v.
        forward_flops: (batch, time, heads, key, value, **options) of one parallel pass.
        forward_bytes: likewise, and `element_bytes`.
        step_flops: (batch, context, heads, key, value, **options) of one decoded token.
        step_bytes: likewise, and `element_bytes`.
        state_bytes: likewise: what decoding keeps after `context` tokens.
        transition: what tokens multiply the state by, of a mixer that has one of a fixed size: a
            "matrix" [key, key], or a "diagonal" where they only decay and add. None: it has none.

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
    def differentiable(self) -> tuple[str, ...]:
        """Implementations with derivatives in both modes and of any order, not a gradient alone."""
        return tuple(name for name in self.implementations if name != "pallas")

    def input(self, name: str) -> Input:
        """The input of that name."""
        return self.inputs[self.names.index(name)]


def recurrent(
    *,
    inputs: tuple[Input, ...],
    implementations: tuple[str, ...] = ("xla", "scan", "pallas"),
    transition: Literal["matrix", "diagonal"] = "matrix",
    **columns: Any,
) -> Mixer:
    """A row whose state is one float32 matrix [key, value] per head, whatever the context."""
    return Mixer(
        inputs=inputs,
        implementations=implementations,
        is_linear_time=True,
        options=MappingProxyType({}),
        empty_state=_recurrent_empty_state,
        forward_bytes=partial(token_bytes, inputs),
        step_bytes=partial(recurrent_step_bytes, inputs),
        state_bytes=recurrent_state_bytes,
        transition=transition,
        **columns,
    )


def _recurrent_empty_state(batch, heads, key, value, capacity, dtype):
    precise = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.zeros((batch, heads, key, value), precise)
