"""Loops that start anew and read what the loop before them left (Inkling-2).

Every loop starts from the prelude's output. From the second on, each looped layer retrieves four
messages from the sources of the loop before it, by queries of its own, and gates mix them into what
its queries, keys, values and feed-forward layer read. The sources of the prelude and of the last
loop stay visible to the coda.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from toolkit._pytrees import register_dataclass
from toolkit.looped.mixing.layer import Separate
from toolkit.looped.residual.attention_residuals import Sourced, attend_to_sources
from toolkit.looped.residual.hyper_connections import normalised


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
    """What a loop leaves for the next.

    Attributes:
        h: the sum of its last group of layers [..., width].
        sources: the sums of its other groups.
        is_there: False before the first loop, which reads no messages.
    """

    h: Float[Array, "... width"]
    sources: tuple[Float[Array, "... width"], ...]
    is_there: Bool[Array, ""]

    @classmethod
    def before(cls, injected: Sourced, groups: int) -> "Pass":
        """What the first of loops with so many groups of layers finds."""
        nothing = jnp.zeros_like(injected.h)
        return cls(nothing, (nothing,) * (groups - 1), jnp.zeros((), bool))

    @classmethod
    def after(cls, injected: Sourced, state: Sourced) -> "Pass":
        """What a loop that ended in this state leaves: its own sources alone."""
        own = state.sources[len(injected.sources) + 1 :]
        return cls(state.h, own, jnp.ones((), bool))

    def for_coda(self, injected: Sourced) -> Sourced:
        """The state after the last loop, with the sources of the prelude."""
        return Sourced(self.h, (*injected.sources, injected.h, *self.sources))


class MessageGate(nnx.Module):
    """(1 - f) x + g m,   f, g = tanh(W_f z), tanh(W_g z),   z = W [norm(x), norm(m)].

    W_f and W_g start at zero: the gate is closed.
    """

    def __init__(self, width: int, rank: int, epsilon: float, rngs: nnx.Rngs):
        draw = nnx.initializers.normal((2 * width) ** -0.5)
        self.down = nnx.Param(draw(rngs.params(), (2 * width, rank)))
        self.forget = nnx.Param(jnp.zeros((rank, width)))
        self.message = nnx.Param(jnp.zeros((rank, width)))
        self.epsilon = epsilon

    def __call__(self, x: Array, message: Array) -> Array:
        """Both in at least float32; message [..., width]."""
        both = jnp.concatenate([normalised(part, self.epsilon) for part in (x, message)], axis=-1)
        z = both @ self.down[...].astype(both.dtype)
        forget, take = (
            jnp.tanh(z @ kernel[...].astype(z.dtype)) for kernel in (self.forget, self.message)
        )
        return (1 - forget) * x + take * message


class MessageGates(nnx.Module):
    """The gates of a layer, for its queries, keys, values and feed-forward layer.

    Attributes:
        queries: by which the messages are retrieved [4, width]; they start at zero.

    Source: Inkling-2, its modelling file in Hugging Face transformers ("inkling2_loop").
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        how = config.width, config.message_rank, config.norm_epsilon, rngs
        self.query, self.key = MessageGate(*how), MessageGate(*how)
        self.value, self.feed_forward = MessageGate(*how), MessageGate(*how)
        self.queries = nnx.Param(jnp.zeros((4, config.width)))

    def messages(self, before: Pass) -> Float[Array, "... 4 width"]:
        """The four messages that a loop left for this layer."""
        return attend_to_sources(self.queries[...], (*before.sources, before.h))

    def of_mixer(self, x: Array | Separate, messages: Array, before: Pass) -> Separate:
        """What queries, keys and values are made of."""
        gates = self.query, self.key, self.value
        parts = x if isinstance(x, Separate) else (x, x, x)
        each = enumerate(zip(gates, parts, strict=True))
        return Separate(*(_gated(gate, x, messages[..., n, :], before) for n, (gate, x) in each))

    def of_feed_forward(self, x: Array, messages: Array, before: Pass) -> Array:
        """What the feed-forward layer reads."""
        return _gated(self.feed_forward, x, messages[..., 3, :], before)


def _gated(gate: MessageGate, x: Array, message: Array, before: Pass) -> Array:
    return jnp.where(before.is_there, gate(x.astype(message.dtype), message).astype(x.dtype), x)
